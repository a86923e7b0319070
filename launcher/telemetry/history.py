"""The rows of all spans: added every 2 s, thinned when a longer step has ended, found by time. Pure.

A row of a longer step is made of the rows of 2 s that are kept, whenever its step has ended: nothing is summed up in memory,
so that a restart in the middle of a step loses none of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct

from launcher.telemetry.history_columns import (
    HIT_RATE,
    HOST,
    KEPT,
    SLOT,
    Row,
    SlotValues,
    row_of,
    text_of,
    thin,
)


class Span(Struct, frozen=True):
    """Rows of one step; the last `most` that were added are kept."""

    name: str
    step_ms: int
    most: int
    slots: bool
    """Whether its rows have those of the slots."""

    @property
    def length_ms(self) -> int:
        return self.most * self.step_ms

    def end_of(self, ms: int) -> int:
        """The end of the step that a time is in; a step's end belongs to it."""
        return -(-ms // self.step_ms) * self.step_ms


HOUR: Final = Span("1h", 2_000, 1_800, slots=True)
DAY: Final = Span("1d", 60_000, 1_440, slots=True)
QUARTER: Final = Span("90d", 600_000, 12_960, slots=False)
SPANS: Final = (HOUR, DAY, QUARTER)
_LONGER: Final = (DAY, QUARTER)
_NAMED: Final = {span.name: span for span in SPANS}
# Of rows that are gone, while no file takes the changes: the next file is compared with what there is.
_MOST_CHANGES: Final = 50_000


class Key(NamedTuple):
    span: str
    ms: int
    """End of the row's step."""


class Found(NamedTuple):
    """Rows by time."""

    span: Span
    rows: Sequence[bytes]
    newest: int
    """End of the newest row of the span; 0 without one."""
    slots: Sequence[int]
    """Slots with values in these rows, perhaps also others."""


class History:
    """Not for two threads at a time. Rows are kept as texts: a fifth of the memory of their values."""

    def __init__(self) -> None:
        self.changes: dict[Key, bytes | None] = {}
        """Since somebody took them: rows that were added, and None for those that are gone."""
        # By time, in the order in which they were added: a clock that is wrong for an hour makes an hour's rows go, no more.
        self._rows: Mapping[Span, dict[int, bytes]] = {span: {} for span in SPANS}
        self._last = 0
        """End of the row that was added last; later ones are from before the clock was set back."""
        self._seen: dict[Span, dict[int, int]] = {span: {} for span in SPANS}
        """By span and slot: the newest row that has the slot."""

    def add(self, rows: Iterable[Row]) -> None:
        """Rows of 2 s, by time; the longer steps that end with one of them are thinned."""
        for row in rows:
            if row.ms != self._last + HOUR.step_ms:  # steps may have ended meanwhile
                self._catch_up(row.ms)
            self._last = row.ms
            self._put(HOUR, row)
            for span in _LONGER:
                if row.ms % span.step_ms == 0:
                    self._thin(span, row.ms)

    def changed(self) -> dict[Key, bytes | None]:
        """Take the changes."""
        changes, self.changes = self.changes, {}
        return changes

    def take(self, there: Mapping[Key, bytes], now_ms: int) -> int:
        """What a file has, in the order in which it was added; where both have a row, this one counts. `changes` are then
        those that the file lacks. Returns how many texts are no rows: they are left out."""
        damaged, older = 0, {span.name: dict[int, Sequence[SlotValues]]() for span in SPANS}
        for (name, ms), text in there.items():
            span = _NAMED.get(name)
            if span is None or ms in self._rows[span]:
                continue
            try:
                row = row_of(text, slots=span.slots)
            except msgspec.MsgspecError:
                damaged += 1
            else:
                older[name][ms] = row.slots
        if not self._last:
            self._last = max((ms for rows in older.values() for ms in rows if ms <= now_ms), default=0)
        for span in SPANS:
            mine, found = self._rows[span], older[span.name]
            newer = list(mine.items())
            mine.clear()
            for ms, slots in islice(found.items(), max(0, len(found) + len(newer) - span.most), None):
                mine[ms] = there[Key(span.name, ms)]
                if ms <= self._last:
                    self._seen[span] |= {it.slot: max(ms, self._seen[span].get(it.slot, 0)) for it in slots}
            mine.update(newer)
        here = {Key(span.name, ms): text for span, rows in self._rows.items() for ms, text in rows.items()}
        lacking = {key: text for key, text in here.items() if there.get(key) != text}
        self.changes = lacking | {key: None for key in there if key not in here}
        return damaged

    def find(self, name: str, after: int, now_ms: int) -> Found:
        """Rows that ended after `after`; all of the span where `after` is above the newest: the clock was set back."""
        span = _NAMED[name]
        newest = max((ms for ms in self._rows[span] if ms <= self._last), default=0)
        begin = now_ms // span.step_ms * span.step_ms - span.length_ms
        after = begin if after > newest else max(begin, after)
        rows = sorted((ms, text) for ms, text in self._rows[span].items() if after < ms <= newest)
        slots = sorted(slot for slot, ms in self._seen[span].items() if ms > after)
        return Found(span, [text for _, text in rows], newest, slots)

    def _put(self, span: Span, row: Row) -> None:
        rows, key = self._rows[span], Key(span.name, row.ms)
        rows.pop(row.ms, None)  # the new one is the last
        self.changes.pop(key, None)
        rows[row.ms] = self.changes[key] = text_of(row)
        if len(rows) > span.most:
            gone = Key(span.name, next(iter(rows)))
            del rows[gone.ms]
            self.changes.pop(gone, None)
            if len(self.changes) < _MOST_CHANGES:
                self.changes[gone] = None
        self._seen[span].update((it.slot, row.ms) for it in row.slots)

    def _catch_up(self, before: int) -> None:
        """Steps that ended before a time, and have no row that was made of as much: an earlier process did not thin them, or
        thinned a part."""
        seconds = {ms: row_of(text, slots=False).seconds for ms, text in self._rows[HOUR].items()}
        for span in _LONGER:
            of_step: defaultdict[int, int] = defaultdict(int)
            for ms, count in seconds.items():
                of_step[span.end_of(ms)] += count
            for end, count in sorted(of_step.items()):
                if end < before and count > self._seconds(span, end):
                    self._thin(span, end)

    def _thin(self, span: Span, end: int) -> None:
        """The step that ended at `end`. A row that was made of more stays: a wrong minute takes the place of no ten."""
        hour = self._rows[HOUR]
        times = range(end - span.step_ms + HOUR.step_ms, end + 1, HOUR.step_ms)
        rows = [row_of(hour[ms], slots=span.slots) for ms in times if ms in hour]
        if rows and sum(row.seconds for row in rows) >= self._seconds(span, end):
            self._put(span, thin(rows, end))

    def _seconds(self, span: Span, end: int) -> int:
        """That the row of a step is made of; 0 without one."""
        text = self._rows[span].get(end)
        return 0 if text is None else row_of(text, slots=False).seconds


# --- The reply of ``GET /v1/history``, part by part: an hour of 32 slots is 300,000 values. ---

_QUERIES: Final = list(KEPT).index("prefix_queries_per_s")
_HITS: Final = list(KEPT).index("prefix_hits_per_s")
_RATE: Final = HOST.index(HIT_RATE)
_NO_SLOT: Final = (None,) * len(SLOT)
# Of rows that are decoded and encoded at a time.
_PIECE_BYTES: Final = 32_768


class Reply:
    """`slots`: "all", "none", or a slot's number."""

    def __init__(self, found: Found, slots: str) -> None:
        self._rows = found.rows
        shown = [slot for slot in found.slots if slots in ("all", str(slot))]
        self._places = {slot: place for place, slot in enumerate(shown)}
        columns = [*HOST, *(f"slot.{slot}.{name}" for slot in shown for name in SLOT)]
        self._head = msgspec.json.encode({
            "span": found.span.name, "step_ms": found.span.step_ms, "newest": found.newest or None, "columns": columns,
        })  # fmt: skip

    def parts(self) -> Iterator[bytes]:
        """Each takes a millisecond or two to make."""
        yield self._head[:-1] + b',"rows":['
        texts = iter(self._rows)
        comma = b""
        size = max(1, _PIECE_BYTES // max(map(len, self._rows), default=1))
        while piece := list(islice(texts, size)):
            rows = (row_of(text, slots=bool(self._places)) for text in piece)
            yield comma + b",".join(msgspec.json.encode(_values(row, self._places)) for row in rows)
            comma = b","
        yield b"]}\n"


def _values(row: Row, places: Mapping[int, int]) -> list[object]:
    host = list(row.host)
    queries, hits = host[_QUERIES], host.pop(_HITS)
    host[_RATE] = round(hits / queries, 4) if queries and hits is not None else None
    if not places:
        return [row.ms, *host]
    slots: list[tuple[object, ...]] = [_NO_SLOT] * len(places)
    for it in row.slots:
        if it.slot in places:
            slots[places[it.slot]] = (it.tokens_per_s, it.in_flight, it.kv_usage, it.cpu_busy, it.state)
    return [row.ms, *host, *chain.from_iterable(slots)]
