"""The hourly sums that a batch of entries changes, computed in numpy: a request costs a fraction of a microsecond. Pure.

Requests whose outcome is `completed` are in the histogram of durations; in that of queued times all that an instance was
asked for. In that of first bytes are those `completed` or `client_aborted` that got one: an error comes at once, and would
make many refusals look like low latency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from launcher.usage.columns import Columns, Integers, Numbers
from launcher.usage.latency import BUCKETS, buckets_of, each_to_bytes, merged
from launcher.usage.schema import HISTOGRAMS, INTEGERS, SECONDS

Row = tuple[Any, ...]  # of `hourly`, in the order of its columns
Stored = Callable[[str, int], Sequence[Row]]
"""The rows that the ledger has of a dimension and an hour."""
HourOf = Callable[[float], int]

OUTCOMES: Final = ("completed", "client_aborted", "rejected", "failed")
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

    def add(self, batch: Columns) -> list[Row]:
        """The rows of `hourly` that the batch changes, with it."""
        rows: list[Row] = []
        for hour, columns in self._by_hour(batch):
            added = _Added(columns)
            for dimension, names in added.names.items():
                rows.extend(self._table(hour, dimension).add(names, added))
        hours = sorted({hour for hour, _ in self._tables})[:-_HOURS_KEPT]
        self._tables = {key: table for key, table in self._tables.items() if key[0] not in hours}
        return rows

    def _by_hour(self, batch: Columns) -> Iterator[tuple[int, Columns]]:
        quarters, quarter_of = np.unique(batch.times[:, 0] // _QUARTER_S, return_inverse=True)
        hours = np.array([self._hour_of(quarter * _QUARTER_S) for quarter in quarters.tolist()])
        for hour in sorted(set(hours.tolist())):
            yield hour, batch.part((hours == hour)[quarter_of]) if len(quarters) > 1 else batch

    def _table(self, hour: int, dimension: str) -> _Table:
        table = self._tables.get((hour, dimension))
        if table is None:
            table = self._tables[hour, dimension] = _Table(dimension, hour, self._stored(dimension, hour))
        return table


class _Added:
    """What entries add to every dimension, by group."""

    def __init__(self, columns: Columns) -> None:
        groups, self.group_of = columns.groups, columns.group_of
        _, duration, queued, first_byte, _ = columns.times.T
        # A request that got no byte spent all of its time on an instance in prefill.
        begun = np.where(np.isnan(first_byte), duration, first_byte)
        # A response that is not streamed has its first byte at its end: its time is in neither, unless it has no output.
        streamed = np.array([group.streamed for group in groups])[self.group_of]
        split = streamed | (columns.amounts[:, 2] == 0)
        on_instance = np.where(split, (begun - queued, duration - first_byte), 0.0)
        self.integers = _integers(columns)
        self.seconds = np.zeros((len(groups), len(SECONDS)))
        _add(self.seconds, self.group_of, np.nan_to_num(np.vstack((on_instance, queued)).T))
        completed, served = (
            np.array([group.outcome in outcomes for group in groups])[self.group_of]
            for outcomes in (("completed",), ("completed", "client_aborted"))
        )
        self.counted = [~np.isnan(queued), served & ~np.isnan(first_byte), completed]
        self.buckets = [
            buckets_of(values[counted])
            for values, counted in zip((queued, first_byte, duration), self.counted, strict=True)
        ]
        self.names: dict[str, list[str]] = {
            "all": [""] * len(groups),
            "key": [group.key for group in groups],
            "model": [group.model for group in groups],
            "slot": ["" if group.slot is None else str(group.slot) for group in groups],
            "overflow": [group.overflow for group in groups],
        }
        """Of each group."""


def _integers(columns: Columns) -> Integers:
    """The sums of each group, in the order of INTEGERS."""
    ones = np.array(
        [
            (
                1, *(group.outcome == outcome for outcome in OUTCOMES), group.continued > 0, group.overflow != "",
                not group.exact,
            )
            for group in columns.groups
        ],
        dtype=np.int64,
    )  # fmt: skip
    counts = np.bincount(columns.group_of, minlength=len(ones))
    found = np.zeros((len(ones), len(INTEGERS)), dtype=np.int64)
    found[:, : ones.shape[1]] = ones * counts[:, None]
    sums = np.zeros((len(ones), columns.amounts.shape[1]), dtype=np.int64)
    _add(sums, columns.group_of, columns.amounts)
    found[:, ones.shape[1] : -1] = sums
    found[:, -1] = sums[:, -1] * ones[:, INTEGERS.index("overflowed")]
    return found


class _Table:
    """The rows of one dimension and hour."""

    def __init__(self, dimension: str, hour: int, stored: Sequence[Row]) -> None:
        self._dimension, self._hour = dimension, hour
        self._names: Numbers[str] = Numbers()
        self._integers = np.zeros((len(stored), len(INTEGERS)), dtype=np.int64)
        self._seconds = np.zeros((len(stored), len(SECONDS)))
        self._histograms = np.zeros((len(stored), len(HISTOGRAMS), BUCKETS), dtype=np.int64)
        for row in stored:
            number = self._names[row[2]]
            self._integers[number] = row[_FIRST_SUM:_FIRST_SECONDS]
            self._seconds[number] = row[_FIRST_SECONDS:_FIRST_HISTOGRAM]
            self._histograms[number] = [merged([data]) for data in row[_FIRST_HISTOGRAM:]]

    def add(self, names: Sequence[str], columns: _Added) -> Iterator[Row]:
        numbers = np.array([self._names[name] for name in names])
        self._grow(len(self._names))
        _add(self._integers, numbers, columns.integers)
        _add(self._seconds, numbers, columns.seconds)
        flat = self._histograms.reshape(-1)
        for which, (counted, buckets) in enumerate(zip(columns.counted, columns.buckets, strict=True)):
            rows = numbers[columns.group_of[counted]] * len(HISTOGRAMS) + which
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
