"""Values of [cost] that types allow and that cannot be counted."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.base.errors import LauncherError
from launcher.config.loading import parse_config
from launcher.config.schema import Config


def parsed(cost: dict[str, Any]) -> Config:
    return parse_config({"models": [{"name": "m", "path": "/m"}], "cost": cost}, origin="config.toml")


def reference(**fields: Any) -> dict[str, Any]:
    return {"reference": [{"name": "a", "input": 1, "output": 2, **fields}]}


@pytest.mark.parametrize(
    "cost",
    [
        {},
        {"hourly": 0},
        {"hourly": 0.79, "currency": "EUR"},
        {"purchase": 20000, "years": 4, "watts": 800, "price_per_kwh": 0.3},
        {"watts": "measured", "price_per_kwh": 0.3},
        reference(cached=0.1, date="2026-02-28"),
        {"price": {"input": 0.5, "output": 1.5, "cached": 0.000001}},
    ],
)
def test_what_is_valid(cost: dict[str, Any]) -> None:
    parsed(cost)


@pytest.mark.parametrize(
    ("cost", "key", "remedy"),
    [
        ({"hourly": 0.1234567890123}, "cost.hourly", "an amount such as 0.79"),
        ({"hourly": float("inf")}, "cost.hourly", "an amount"),
        ({"purchase": 1e13}, "cost.purchase: 1e+13 is too much", "an amount"),
        ({"hourly": float("nan")}, "cost.hourly", ""),
        ({"hourly": -1}, "cost.hourly", ""),
        ({"years": 0}, "cost.years", ""),
        ({"watts": 800}, "cost.watts without cost.price_per_kwh", "set price_per_kwh = 0.30"),
        ({"price_per_kwh": 0.3}, "cost.price_per_kwh without cost.watts", 'set watts = 800, or "measured"'),
        (reference(date="2026-02-30"), "cost.reference.0.date = '2026-02-30'", "2026-01-31"),
        (reference(cached=-1.0), "cost.reference.0.cached", "an amount"),
        (reference(input=0.0000001), "cost.reference.0.input", "an amount"),
        ({"price": {"input": 0.5, "output": 0.00000012}}, "cost.price.output", "an amount"),
    ],
)
def test_what_is_not(cost: dict[str, Any], key: str, remedy: str) -> None:
    with pytest.raises(LauncherError) as error:
        parsed(cost)
    assert error.value.message.startswith("cannot ")
    assert key in error.value.message
    assert "config.toml" in error.value.message
    assert remedy in error.value.remedy
