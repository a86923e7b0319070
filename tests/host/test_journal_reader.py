"""Journal entries as the lines that were printed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from launcher.host.journal_reader import MAX_LINE_BYTES, _Lines

WHEN = datetime(2026, 1, 1, tzinfo=UTC)


def entry(text: str, stream: str = "s", **fields: str) -> dict[str, Any]:
    return {
        "MESSAGE": text,
        "_STREAM_ID": stream,
        "__REALTIME_TIMESTAMP": WHEN,
        "_SYSTEMD_UNIT": "u.service",
    } | fields


def texts(*entries: dict[str, Any]) -> list[str]:
    lines = _Lines()
    return [line.text for found in entries for line in lines.of(found)]


def test_an_entry_is_a_line() -> None:
    (line,) = _Lines().of(entry("loading  "))
    assert (line.unit, line.time, line.text) == ("u.service", WHEN.timestamp(), "loading")


def test_progress_bars_are_lines_too() -> None:
    assert texts(entry("10%\r20%\r\r30%")) == ["10%", "20%", "30%"]


def test_a_line_that_journald_broke_is_one_and_cut() -> None:
    found = texts(
        entry("x" * 49152, _LINE_BREAK="line-max"), entry("other", "t"), entry("x" * 49152, _LINE_BREAK="line-max"),
        entry("xx"), entry("after"),
    )  # fmt: skip
    assert [len(text) for text in found] == [MAX_LINE_BYTES, 5, 5]
    assert found[1:] == ["other", "after"]


def test_another_break_is_an_end() -> None:
    assert texts(entry("a", _LINE_BREAK="pid-change"), entry("b", _LINE_BREAK="eof"), entry("c")) == [
        "a",
        "b",
        "c",
    ]
