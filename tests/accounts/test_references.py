"""The table of API prices: which one is used, and how old it is."""

from __future__ import annotations

import datetime as dt
import tomllib

from launcher.accounts.references import FILE, references, shipped
from launcher.config.usage_schema import Cost, Reference

DAY = dt.date(2026, 1, 10)


def own(date: str | None = None, name: str = "mine") -> Reference:
    return Reference(name=name, input=1.0, output=2.0, date=date)


def test_the_shipped_table_says_how_old_it_is() -> None:
    found = references(Cost(), DAY)
    assert found.note.startswith("API prices of 2025-12-31, 10 days ago (Rackspace")
    assert {row.date for row in found.rows} == {"2025-12-31"}
    assert len(found.rows) == 4


def test_own_references_replace_the_shipped_ones() -> None:
    found = references(Cost(reference=(own("2026-01-09"), own("2025-01-10", "old"))), DAY)
    assert [row.name for row in found.rows] == ["mine", "old"]
    assert found.note == "API prices of [[cost.reference]], the oldest of 2025-01-10, 365 days ago"


def test_a_missing_date_is_said() -> None:
    assert references(Cost(reference=(own(),)), DAY).note.endswith("without a date: set `date` in each")
    found = references(Cost(reference=(own("2026-01-10"), own())), DAY)
    assert found.note == "API prices of [[cost.reference]], the oldest of 2026-01-10, today; 1 without a date"
    assert references(Cost(reference=(own("2026-02-01"),)), DAY).note.endswith("in the future")


def test_prices_in_another_currency_are_not_compared() -> None:
    found = references(Cost(currency="EUR"), DAY)
    assert found.rows == ()
    assert "is in USD; add [[cost.reference]] with prices in EUR" in found.note
    assert references(Cost(currency="EUR", reference=(own(),)), DAY).rows


def test_the_table_is_packaged_and_names_its_source() -> None:
    assert shipped().url.startswith("https://")
    assert dt.date.fromisoformat(shipped().date)
    data = tomllib.loads((FILE.parents[2] / "pyproject.toml").read_text())
    assert "accounts/*.toml" in data["tool"]["setuptools"]["package-data"]["launcher"]
