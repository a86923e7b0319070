"""The hourly sums of requests, computed in numpy: a request costs a fraction of the time that SQL takes. Pure.

`hourly` has one row for each hour, dimension and name:

    dimension   name
    all         ""
    key         name of the API key; "" where keys are not required
    model       name of the model
    slot        number of the slot that answered; "" where no instance did
    overflow    name of the overflow endpoint; "" for requests served here

Each request counts once in each dimension, so the rows of a dimension sum up to those of `all`. `hour` is the Unix time
at which the hour began in the zone of [usage]. `prefill_s` is the time from sending a request to an instance until its
first byte, `decode_s` from there to its end (of a response with output tokens that is not streamed neither: its first byte
is at its end). The histograms are launcher.accounts.latency's.

Requests whose outcome is `completed` are in the histogram of durations. In that of first bytes are those `completed` or
`client_aborted` that got one: an error, an upstream's 4xx (`refused`) included, comes at once, and would make many of them
look like low latency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from launcher.accounts.latency import BUCKETS, buckets_of, each_to_bytes, merged
from launcher.accounts.request_rows import Kind, Row

DIMENSIONS: Final = ("all", "key", "model", "slot", "overflow")
# Sums of `hourly`, in the order of its columns.
INTEGERS: Final = (
    "requests", "completed", "client_aborted", "rejected", "failed", "continued", "overflowed", "inexact",
    "prompt_tokens", "cached_tokens", "output_tokens", "picos", "overflow_picos",
)  # fmt: skip
SECONDS: Final = ("prefill_s", "decode_s")
HISTOGRAMS: Final = ("first_byte", "duration")
HOURLY: Final = f"""CREATE TABLE hourly (
    dimension TEXT NOT NULL, hour INTEGER NOT NULL, name TEXT NOT NULL,
    {", ".join(f"{column} INTEGER NOT NULL" for column in INTEGERS)},
    {", ".join(f"{column} REAL NOT NULL" for column in SECONDS)},
    {", ".join(f"{column} BLOB NOT NULL" for column in HISTOGRAMS)},
    PRIMARY KEY (dimension, hour, name)
) WITHOUT ROWID;"""


class DamagedSumsError(ValueError):
    """Rows of `hourly` hold nothing that was ever written."""


_T = TypeVar("_T")
Integers = NDArray[np.int64]


class Numbers(dict[_T, int]):
    """Numbers of names, in the order in which they were first asked for."""

    def __missing__(self, name: _T) -> int:
        number = self[name] = len(self)
        return number


HourlyRow = tuple[Any, ...]  # in the order of its columns
Stored = Callable[[str, int], Sequence[HourlyRow]]
"""The rows that the ledger has of a dimension and an hour."""
HourOf = Callable[[float], int]

OUTCOMES: Final = ("completed", "client_aborted", "rejected", "failed")
"""Those with a sum of their own; the others of all requests are `refused`."""
# Time zones change their offsets at whole quarters of an hour.
_QUARTER_S: Final = 900
# Of an hour the first entries may come after the last ones of the hour before.
_HOURS_KEPT: Final = 2
_AMOUNTS: Final = ("prompt_tokens", "cached_tokens", "output_tokens", "picos")
_ENDED_AT: Final = Row._fields.index("ended_at")
_FIRST_SUM: Final = 3  # after dimension, hour, name
_FIRST_SECONDS: Final = _FIRST_SUM + len(INTEGERS)
_FIRST_HISTOGRAM: Final = _FIRST_SECONDS + len(SECONDS)


class Sums:
    """The sums of the latest hours, as the ledger will have them when the rows of `add` are written."""

    def __init__(self, hour_of: HourOf, stored: Stored) -> None:
        self._hour_of = hour_of
        self._stored = stored
        self._tables: dict[tuple[int, str], _Table] = {}

    def add(self, rows: Sequence[tuple[Any, ...]], kinds: Mapping[int, Kind]) -> list[HourlyRow]:
        """The rows of `hourly` that rows of `request` change, with them. `kinds`: theirs, by id. Raises DamagedSumsError for
        stored rows that are none."""
        changed: list[HourlyRow] = []
        for hour, part in sorted(self._by_hour(rows).items()):
            added = _Added(part, kinds)
            for dimension, names in added.names.items():
                changed.extend(self._table(hour, dimension).add(names, added))
        hours = sorted({hour for hour, _ in self._tables})[:-_HOURS_KEPT]
        self._tables = {key: table for key, table in self._tables.items() if key[0] not in hours}
        return changed

    def read(self, hour: int) -> None:
        """Read the rows that are stored of an hour. Raises DamagedSumsError for some that are none."""
        for dimension in DIMENSIONS:
            self._table(hour, dimension)

    def _by_hour(self, rows: Sequence[tuple[Any, ...]]) -> dict[int, list[tuple[Any, ...]]]:
        hours: dict[float, int] = {}
        parts: dict[int, list[tuple[Any, ...]]] = {}
        for row in rows:
            quarter = row[_ENDED_AT] // _QUARTER_S
            hour = hours.get(quarter)
            if hour is None:
                hour = hours[quarter] = self._hour_of(quarter * _QUARTER_S)
            parts.setdefault(hour, []).append(row)
        return parts

    def _table(self, hour: int, dimension: str) -> _Table:
        table = self._tables.get((hour, dimension))
        if table is None:
            stored = self._stored(dimension, hour)
            try:
                table = _Table(dimension, hour, stored)
            except (ValueError, TypeError, ArithmeticError) as error:
                raise DamagedSumsError(f"its sums of hour {hour}: {error}") from None
            self._tables[hour, dimension] = table
        return table


class _Added:
    """The sums that requests add to every dimension, by kind."""

    def __init__(self, rows: Sequence[tuple[Any, ...]], kinds: Mapping[int, Kind]) -> None:
        columns = dict(zip(Row._fields, zip(*rows, strict=True), strict=True))
        numbers, self.group_of = np.unique(np.array(columns["kind"], dtype=np.int64), return_inverse=True)
        groups = [kinds[number] for number in numbers.tolist()]
        duration, queued, first_byte = (
            np.array(columns[name], dtype=float) for name in ("duration_s", "queued_s", "first_byte_s")
        )
        amounts = np.array([columns[name] for name in _AMOUNTS], dtype=np.int64).T
        # A request that got no byte spent all of its time on an instance in prefill.
        begun = np.where(np.isnan(first_byte), duration, first_byte)
        # A response that is not streamed has its first byte at its end: its time is in neither, unless it has no output.
        streamed = np.array([group.streamed for group in groups])[self.group_of]
        # One that was refused took no time of the model.
        refused = np.array([group.outcome == "refused" for group in groups])[self.group_of]
        split = (streamed | (amounts[:, _AMOUNTS.index("output_tokens")] == 0)) & ~refused
        on_instance = np.where(split, (begun - queued, duration - first_byte), 0.0)
        self.integers = _integers(groups, self.group_of, amounts)
        self.seconds = np.zeros((len(groups), len(SECONDS)))
        _add(self.seconds, self.group_of, np.nan_to_num(on_instance.T))
        completed, served = (
            np.array([group.outcome in outcomes for group in groups])[self.group_of]
            for outcomes in (("completed",), ("completed", "client_aborted"))
        )
        self.counted = [served & ~np.isnan(first_byte), completed]
        self.buckets = [
            buckets_of(values[counted])
            for values, counted in zip((first_byte, duration), self.counted, strict=True)
        ]
        self.names: dict[str, list[str]] = {
            "all": [""] * len(groups),
            "key": [group.key for group in groups],
            "model": [group.model for group in groups],
            "slot": ["" if group.slot is None else str(group.slot) for group in groups],
            "overflow": [group.overflow for group in groups],
        }
        """Of each group."""


def _integers(groups: Sequence[Kind], group_of: Integers, amounts: Integers) -> Integers:
    """The sums of each kind, in the order of INTEGERS."""
    ones = np.array(
        [
            (
                1, *(kind.outcome == outcome for outcome in OUTCOMES), kind.continued > 0, kind.overflow != "",
                not kind.exact,
            )
            for kind in groups
        ],
        dtype=np.int64,
    )  # fmt: skip
    counts = np.bincount(group_of, minlength=len(ones))
    found = np.zeros((len(ones), len(INTEGERS)), dtype=np.int64)
    found[:, : ones.shape[1]] = ones * counts[:, None]
    sums = np.zeros((len(ones), amounts.shape[1]), dtype=np.int64)
    _add(sums, group_of, amounts)
    found[:, ones.shape[1] : -1] = sums
    found[:, -1] = sums[:, -1] * ones[:, INTEGERS.index("overflowed")]
    return found


class _Table:
    """The rows of one dimension and hour."""

    def __init__(self, dimension: str, hour: int, stored: Sequence[HourlyRow]) -> None:
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

    def add(self, names: Sequence[str], added: _Added) -> Iterator[HourlyRow]:
        numbers = np.array([self._names[name] for name in names])
        self._grow(len(self._names))
        _add(self._integers, numbers, added.integers)
        _add(self._seconds, numbers, added.seconds)
        flat = self._histograms.reshape(-1)
        for which, (counted, buckets) in enumerate(zip(added.counted, added.buckets, strict=True)):
            rows = numbers[added.group_of[counted]] * len(HISTOGRAMS) + which
            np.add.at(flat, rows * BUCKETS + buckets, 1)
        return self._rows(list(dict.fromkeys(names)))

    def _rows(self, names: Sequence[str]) -> Iterator[HourlyRow]:
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
