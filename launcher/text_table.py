"""Text for a terminal: columns, and things counted."""

from __future__ import annotations

from collections.abc import Sequence


def counted(count: int, noun: str) -> str:
    """`1 instance`, `1,024 instances`, for nouns whose plural is an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line for each row, two spaces between columns; a line ends with its last sign.

    Rows are alike in length, and there is at least one: the head.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def fitted(lines: Sequence[str], width: int) -> list[str]:
    """Lines of at most `width` characters: longer ones end in an ellipsis."""
    return [line if len(line) <= width else line[: width - 1] + "…" for line in lines]
