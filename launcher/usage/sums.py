"""The hourly sums that a batch of entries changes, computed in numpy: a request costs a fraction of a microsecond. Pure.

Requests whose outcome is `completed` are in the histogram of durations; in that of queued times all that an instance was
asked for. In that of first bytes are those `completed` or `client_aborted` that got one: an error comes at once, and would
make many refusals look like low latency.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from launcher.usage.entry import Entry
from launcher.usage.latency import BUCKETS, buckets_of, each_to_bytes, merged
from launcher.usage.schema import HISTOGRAMS, INTEGERS, SECONDS

Integers = NDArray[np.int64]
Row = tuple[Any, ...]  # of `hourly`, in the order of its columns
Stored = Callable[[str, int], Sequence[Row]]
"""The rows that the ledger has of a dimension and an hour."""
HourOf = Callable[[float], int]

OUTCOMES: Final = ("completed", "client_aborted", "rejected", "failed")
_OUTCOME: Final = {outcome: number for number, outcome in enumerate(OUTCOMES, start=1)}
# Time zones change their offsets at whole quarters of an hour.
_QUARTER_S: Final = 900
# Of an hour the first entries may come after the last ones of the hour before.
_HOURS_KEPT: Final = 2
_FIRST_SUM: Final = 3  # after dimension, hour, name
_FIRST_SECONDS: Final = _FIRST_SUM + len(INTEGERS)
_FIRST_HISTOGRAM: Final = _FIRST_SECONDS + len(SECONDS)


class Sums:
    """Of the latest hours, as the ledger will have them when the rows of `add` are written."""

    def __init__(self, hour_of: HourOf, stored: Stored) -> None:
        self._hour_of = hour_of
        self._stored = stored
        self._tables: dict[tuple[int, str], _Table] = {}

    def add(self, batch: Sequence[Entry]) -> list[Row]:
        """The rows of `hourly` that the batch changes, with it."""
        rows: list[Row] = []
        for hour, entries in self._by_hour(batch):
            columns = _Columns(entries)
            for dimension, names in columns.names.items():
                rows.extend(self._table(hour, dimension).add(names, columns))
        hours = sorted({hour for hour, _ in self._tables})[:-_HOURS_KEPT]
        self._tables = {key: table for key, table in self._tables.items() if key[0] not in hours}
        return rows

    def _by_hour(self, batch: Sequence[Entry]) -> Iterator[tuple[int, Sequence[Entry]]]:
        quarters = {int(entry.ended_at // _QUARTER_S) for entry in batch}
        hours = {quarter: self._hour_of(float(quarter * _QUARTER_S)) for quarter in quarters}
        if len(set(hours.values())) == 1:
            yield next(iter(hours.values())), batch
            return
        parts: defaultdict[int, list[Entry]] = defaultdict(list)
        for entry in batch:
            parts[hours[int(entry.ended_at // _QUARTER_S)]].append(entry)
        yield from sorted(parts.items())

    def _table(self, hour: int, dimension: str) -> _Table:
        table = self._tables.get((hour, dimension))
        if table is None:
            table = self._tables[hour, dimension] = _Table(dimension, hour, self._stored(dimension, hour))
        return table


def check(entry: Entry) -> bool:
    """Whether an entry can be summed up and written: whole numbers of 64 bits, texts of Unicode."""
    try:
        _Columns([entry])
        msgspec.msgpack.encode(entry)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


class _Columns:
    """What entries add to every dimension, column by column."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        counted = np.array(
            [
                (
                    _OUTCOME.get(entry.outcome, 0), entry.continued > 0, entry.overflow != "", not entry.exact,
                    entry.prompt_tokens, entry.cached_tokens, entry.output_tokens, entry.picos,
                )
                for entry in entries
            ],
            dtype=np.int64,
        )  # fmt: skip
        outcome = counted[:, 0]
        self.integers = np.empty((len(entries), len(INTEGERS)), dtype=np.int64)
        self.integers[:, 0] = 1
        for number in _OUTCOME.values():
            self.integers[:, number] = outcome == number
        self.integers[:, 5:12] = counted[:, 1:]
        self.integers[:, 12] = counted[:, 7] * counted[:, 2]
        measured = np.array(
            [(entry.duration_s, entry.queued_s, entry.first_byte_s) for entry in entries], dtype=float
        )
        duration, queued, first_byte = measured.T
        # A request that got no byte spent all of its time on an instance in prefill.
        begun = np.where(np.isnan(first_byte), duration, first_byte)
        self.seconds = np.nan_to_num(np.stack((begun - queued, duration - first_byte, queued), axis=1))
        completed = outcome == _OUTCOME["completed"]
        served = completed | (outcome == _OUTCOME["client_aborted"])
        self.counted = [(~np.isnan(queued)), served & ~np.isnan(first_byte), completed]
        self.buckets = [
            buckets_of(values[counted])
            for values, counted in zip((queued, first_byte, duration), self.counted, strict=True)
        ]
        self.names: dict[str, list[str]] = {
            "all": [""] * len(entries),
            "key": [entry.key for entry in entries],
            "model": [entry.model for entry in entries],
            "slot": ["" if entry.slot is None else str(entry.slot) for entry in entries],
            "overflow": [entry.overflow for entry in entries],
        }


class _Names(dict[str, int]):
    """Numbers of names, in the order in which they were first asked for."""

    def __missing__(self, name: str) -> int:
        number = self[name] = len(self)
        return number


class _Table:
    """The rows of one dimension and hour."""

    def __init__(self, dimension: str, hour: int, stored: Sequence[Row]) -> None:
        self._dimension, self._hour = dimension, hour
        self._names = _Names()
        self._integers = np.zeros((len(stored), len(INTEGERS)), dtype=np.int64)
        self._seconds = np.zeros((len(stored), len(SECONDS)))
        self._histograms = np.zeros((len(stored), len(HISTOGRAMS), BUCKETS), dtype=np.int64)
        for row in stored:
            number = self._names[row[2]]
            self._integers[number] = row[_FIRST_SUM:_FIRST_SECONDS]
            self._seconds[number] = row[_FIRST_SECONDS:_FIRST_HISTOGRAM]
            self._histograms[number] = [merged([data]) for data in row[_FIRST_HISTOGRAM:]]

    def add(self, names: Sequence[str], columns: _Columns) -> Iterator[Row]:
        numbers = np.array([self._names[name] for name in names])
        self._grow(len(self._names))
        _add(self._integers, numbers, columns.integers)
        _add(self._seconds, numbers, columns.seconds)
        flat = self._histograms.reshape(-1)
        for which, (counted, buckets) in enumerate(zip(columns.counted, columns.buckets, strict=True)):
            rows = numbers[counted] * len(HISTOGRAMS) + which
            np.add.at(flat, rows * BUCKETS + buckets, 1)
        return self._rows(list(dict.fromkeys(names)))

    def _rows(self, names: Sequence[str]) -> Iterator[Row]:
        numbers = [self._names[name] for name in names]
        integers, seconds = self._integers[numbers].tolist(), self._seconds[numbers].tolist()
        histograms = each_to_bytes(self._histograms[numbers].reshape(-1, BUCKETS))
        for row, name in enumerate(names):
            first = row * len(HISTOGRAMS)
            yield (
                self._dimension, self._hour, name, *integers[row], *seconds[row],
                *histograms[first : first + len(HISTOGRAMS)],
            )  # fmt: skip

    def _grow(self, rows: int) -> None:
        if rows <= len(self._integers):
            return
        more = max(rows, 2 * len(self._integers)) - len(self._integers)
        self._integers = _longer(self._integers, more)
        self._seconds = _longer(self._seconds, more)
        self._histograms = _longer(self._histograms, more)


def _longer(array: NDArray[Any], more: int) -> NDArray[Any]:
    return np.concatenate((array, np.zeros((more, *array.shape[1:]), dtype=array.dtype)))


def _add(sums: NDArray[Any], numbers: Integers, values: NDArray[Any]) -> None:
    """Add each row of `values` to the row of `sums` with its number. `add.at` is fast for one dimension only."""
    columns = sums.shape[1]
    places = (numbers * columns)[:, None] + np.arange(columns)
    np.add.at(sums.reshape(-1), places.reshape(-1), values.reshape(-1))
