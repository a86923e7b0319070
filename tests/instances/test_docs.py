"""docs/supervision.md is written from the lifecycle table and the causes."""

from __future__ import annotations

from pathlib import Path

from launcher.instances.docs import to_markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "supervision.md"


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == to_markdown(), "stale: run scripts/docs"
