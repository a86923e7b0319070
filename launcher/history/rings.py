"""Rows at places that follow from their time: row and place of a step are known without an index. Pure.

A row is found where its time says, and counts only if it holds that time: rows of an earlier turn of the ring, rows that a
process killed meanwhile wrote in part, and rows from before the clock was set are gaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from launcher.history.columns import Row
from launcher.history.record import Format

HEADER_BYTES: Final = 4096
# What a place begins with that was never written.
_UNUSED: Final = bytes(16)


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    step_ms: int
    rows: int
    format: Format

    @property
    def length_ms(self) -> int:
        return self.rows * self.step_ms

    def end_of(self, ms: int) -> int:
        """The end of the step that a time is in; a step's end belongs to it."""
        return -(-ms // self.step_ms) * self.step_ms


HOUR: Final = Span("1h", 2_000, 1_800, Format(slots=True, streams=True))
DAY: Final = Span("1d", 60_000, 1_440, Format(slots=True, streams=False))
QUARTER: Final = Span("90d", 600_000, 12_960, Format(slots=False, streams=False))
SPANS: Final = (HOUR, DAY, QUARTER)
FILE_BYTES: Final = HEADER_BYTES + sum(span.rows * span.format.size for span in SPANS)


class Store(Protocol):
    """FILE_BYTES that can be read and written."""

    def read(self, offset: int, size: int) -> bytes:
        """Fewer bytes at the end. Raises OSError."""

    def write(self, offset: int, data: bytes) -> None:
        """Raises OSError."""


class MemoryStore:
    """Where there is no file."""

    def __init__(self) -> None:
        self._data = bytearray(FILE_BYTES)

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self._data[offset : offset + size])

    def write(self, offset: int, data: bytes) -> None:
        self._data[offset : offset + len(data)] = data


class Ring:
    """The rows of one span."""

    def __init__(self, store: Store, span: Span, offset: int) -> None:
        self.span = span
        self._store = store
        self._offset = offset
        self._size = span.format.size

    def put(self, row: Row) -> None:
        self._store.write(self._place(row.ms), self.span.format.encode(row))

    def get(self, ms: int) -> Row | None:
        row = self.at(ms)
        return row if row is not None and row.ms == ms else None

    def at(self, ms: int) -> Row | None:
        """What is at the place of a time: that row, or one of another turn."""
        place = self._store.read(self._place(ms), self._size)
        return None if place.startswith(_UNUSED) else self.span.format.decode(place)

    def read(self, after: int, until: int) -> bytes:
        """The places of the steps that end in (after, until], at most one turn; both are ends of steps."""
        after = max(after, until - self.span.length_ms)
        count = (until - after) // self.span.step_ms
        if count <= 0:
            return b""
        first = self._index(after + self.span.step_ms)
        straight = min(count, self.span.rows - first)
        data = self._blocks(first, straight)
        return data if straight == count else data + self._blocks(0, count - straight)

    def rows(self, data: bytes, until: int, *, slots: bool = True) -> Iterator[Row]:
        """The rows in what `read` returned for `until`, by time; with or without their slots."""
        count = len(data) // self._size
        for number in range(count):
            place = data[number * self._size : (number + 1) * self._size]
            row = self.span.format.decode(place, slots=slots)
            if row is not None and row.ms == until - (count - 1 - number) * self.span.step_ms:
                yield row

    def steps(self, step_ms: int) -> Iterator[Sequence[int]]:
        """The places of each longer step."""
        count = step_ms // self.span.step_ms
        for first in range(1, self.span.rows, count):  # the first place is the last of a step
            yield [place % self.span.rows for place in range(first, first + count)]

    def every(self, places: Iterable[int] | None = None, *, slots: bool = True) -> Iterator[Row]:
        """All rows at these places, of any turn; at all places without them."""
        for index in range(self.span.rows) if places is None else places:
            place = self._blocks(index, 1)
            if place.startswith(_UNUSED):
                continue
            row = self.span.format.decode(place, slots=slots)
            if row is not None and self._index(row.ms) == index:
                yield row

    def newest(self, now_ms: int) -> int:
        """The end of the newest row up to now; 0 where the span has none."""
        step = self.span.step_ms
        last = now_ms // step * step
        return next(
            (ms for ms in range(last, last - self.span.length_ms, -step) if self.get(ms) is not None), 0
        )

    def _index(self, ms: int) -> int:
        return ms // self.span.step_ms % self.span.rows

    def _place(self, ms: int) -> int:
        return self._offset + self._index(ms) * self._size

    def _blocks(self, first: int, count: int) -> bytes:
        """Padded with zeros where the file is too short: a row is then absent, and the others stay at their places."""
        size = count * self._size
        return self._store.read(self._offset + first * self._size, size).ljust(size, b"\0")


def rings(store: Store) -> dict[str, Ring]:
    """By name of the span."""
    found, offset = {}, HEADER_BYTES
    for span in SPANS:
        found[span.name] = Ring(store, span, offset)
        offset += span.rows * span.format.size
    return found
