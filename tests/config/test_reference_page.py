"""docs/configuration.md is what the schema says."""

from __future__ import annotations

from pathlib import Path

from launcher.config.reference_page import to_markdown

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text() == to_markdown(), "stale: run scripts/docs"


def test_every_key_says_what_it_means() -> None:
    rows = [line for line in to_markdown().splitlines() if line.startswith("| `")]
    assert len(rows) > 40
    assert not [row for row in rows if row.rstrip().endswith("|  |")]


def test_a_table_within_a_table_has_a_section() -> None:
    page = to_markdown()
    assert "| `overflow` | `[[proxy.overflow]]` | `[]` |" in page
    section = page.partition("## `[[proxy.overflow]]`")[2].partition("\n## ")[0]
    for setting in ("url", "models", "api_key_file", "max_requests"):
        assert f"\n| `{setting}` |" in section
    assert "| `models` | table of text | required |" in section
