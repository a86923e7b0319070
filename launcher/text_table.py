"""Text tables and counted nouns."""

from __future__ import annotations

from collections.abc import Sequence


def counted(count: int, noun: str) -> str:
    """`1 instance`, `1,024 instances`, for nouns whose plural is an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line per row, two spaces between columns, no trailing spaces.

    All rows have the same length; the first is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def fitted(lines: Sequence[str], width: int) -> list[str]:
    """Lines of at most `width` characters: longer ones end in an ellipsis."""
    return [line if len(line) <= width else line[: width - 1] + "…" for line in lines]
