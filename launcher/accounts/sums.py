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
from copy import copy
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from launcher.accounts.latency import BUCKETS, buckets_of, each_to_bytes, merged
from launcher.accounts.request_rows import MOST_KINDS, Kind, Row

_NAMES: Final[Mapping[str, Callable[[Kind], str]]] = {
    "all": lambda _kind: "",
    "key": lambda kind: kind.key,
    "model": lambda kind: kind.model,
    "slot": lambda kind: "" if kind.slot is None else str(kind.slot),
    "overflow": lambda kind: kind.overflow,
}
DIMENSIONS: Final = tuple(_NAMES)
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


def _has_outcome(outcome: str, kind: Kind) -> bool:
    return kind.outcome == outcome


# By kind: the first counts of INTEGERS, in their order, and what decides what else is summed up.
_FLAGS: Final[Mapping[str, Callable[[Kind], bool]]] = {
    "requests": lambda _kind: True,
    **{outcome: partial(_has_outcome, outcome) for outcome in OUTCOMES},
    "continued": lambda kind: kind.continued > 0,
    "overflowed": lambda kind: kind.overflow != "",
    "inexact": lambda kind: not kind.exact,
    "refused": partial(_has_outcome, "refused"),
    "streamed": lambda kind: kind.streamed,
}
_COUNTED: Final = INTEGERS.index("prompt_tokens")
# Time zones change their offsets at whole quarters of an hour.
_QUARTER_S: Final = 900
# Of an hour the first entries may come after the last ones of the hour before.
_HOURS_KEPT: Final = 2
_AMOUNTS: Final = ("prompt_tokens", "cached_tokens", "output_tokens", "picos")
# Columns of `request` that are summed up, with their places in a row.
_COLUMNS: Final = {
    name: Row._fields.index(name)
    for name in ("ended_at", "kind", "duration_s", "queued_s", "first_byte_s", *_AMOUNTS)
}
_FIRST_SUM: Final = 3  # after dimension, hour, name
_FIRST_SECONDS: Final = _FIRST_SUM + len(INTEGERS)
_FIRST_HISTOGRAM: Final = _FIRST_SECONDS + len(SECONDS)


class Sums:
    """The sums of the latest hours, as the ledger will have them when the rows of `add` are written."""

    def __init__(self, hour_of: HourOf, stored: Stored) -> None:
        self._hour_of = hour_of
        self._stored = stored
        self._kinds = _Kinds()
        self._tables: dict[tuple[int, str], _Table] = {}

    def add(self, rows: Sequence[tuple[Any, ...]], kinds: Mapping[int, Kind]) -> list[HourlyRow]:
        """The rows of `hourly` that rows of `request` change, with them. `kinds`: theirs, by id. Raises DamagedSumsError for
        stored rows that are none."""
        if len(self._kinds.known) > MOST_KINDS:
            self._kinds = _Kinds()
            for table in self._tables.values():
                table.forget_kinds()
        columns = {name: [row[place] for row in rows] for name, place in _COLUMNS.items()}
        added = _Added(columns, self._kinds.numbers(columns["kind"], kinds), self._kinds.flags)
        changed: list[HourlyRow] = []
        for hour, of_hour in self._by_hour(columns["ended_at"]):
            part = added if of_hour is None else added.of(of_hour)
            for dimension in DIMENSIONS:
                changed.extend(self._table(hour, dimension).add(part, self._kinds.known))
        hours = sorted({hour for hour, _ in self._tables})[:-_HOURS_KEPT]
        self._tables = {key: table for key, table in self._tables.items() if key[0] not in hours}
        return changed

    def read(self, hour: int) -> None:
        """Read the rows that are stored of an hour. Raises DamagedSumsError for some that are none."""
        for dimension in DIMENSIONS:
            self._table(hour, dimension)

    def _by_hour(self, ended_at: Sequence[float]) -> Iterator[tuple[int, NDArray[np.bool_] | None]]:
        """The hours in which requests ended, each with which of them; None: all."""
        quarters, quarter_of = np.unique(np.array(ended_at) // _QUARTER_S, return_inverse=True)
        hours = np.array([self._hour_of(quarter * _QUARTER_S) for quarter in quarters.tolist()])
        found = sorted(set(hours.tolist()))
        for hour in found:
            yield hour, (hours == hour)[quarter_of] if len(found) > 1 else None

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


class _Kinds:
    """The part of a request's sums that its kind decides. Each is looked at once: batches mostly repeat the same ones."""

    def __init__(self) -> None:
        self.known: list[Kind] = []
        """By number."""
        self.flags = np.zeros((0, len(_FLAGS)), dtype=np.int64)
        """A row for each of them, in the order of _FLAGS."""
        self._numbers: Numbers[int] = Numbers()

    def numbers(self, ids: Sequence[int], kinds: Mapping[int, Kind]) -> Integers:
        """The numbers of kinds by their ids in `kinds`."""
        numbers = np.array([self._numbers[kind] for kind in ids])
        new = [kinds[kind] for kind in islice(self._numbers, len(self.known), None)]
        if new:
            self.known += new
            more = np.array([[flag(kind) for flag in _FLAGS.values()] for kind in new], dtype=np.int64)
            self.flags = np.concatenate((self.flags, more))
        return numbers


class _Added:
    """The amounts of some requests, a row for each, as they are added to every dimension."""

    def __init__(self, columns: Mapping[str, Sequence[Any]], kinds: Integers, flags_of: Integers) -> None:
        """`kinds`: numbers of their kinds; `flags_of`: those of each kind."""
        flags = flags_of[kinds]
        streamed, refused, completed, aborted, overflowed = (
            flags[:, list(_FLAGS).index(name)] > 0
            for name in ("streamed", "refused", "completed", "client_aborted", "overflowed")
        )
        duration, queued, first_byte = (
            np.array(columns[name], dtype=float) for name in ("duration_s", "queued_s", "first_byte_s")
        )
        amounts = np.array([columns[name] for name in _AMOUNTS], dtype=np.int64).T
        # A request that got no byte spent all of its time on an instance in prefill.
        begun = np.where(np.isnan(first_byte), duration, first_byte)
        # A response that is not streamed has its first byte at its end: its time is in neither, unless it has no output.
        # One that was refused took no time of the model.
        split = (streamed | (amounts[:, _AMOUNTS.index("output_tokens")] == 0)) & ~refused
        self.kinds = kinds
        overflow_picos = amounts[:, _AMOUNTS.index("picos")] * overflowed
        self.integers = np.column_stack((flags[:, :_COUNTED], amounts, overflow_picos))
        self.seconds = np.nan_to_num(np.where(split, (begun - queued, duration - first_byte), 0.0)).T
        self.counted = [(completed | aborted) & ~np.isnan(first_byte), completed]
        """For each histogram, the requests that are in it."""
        self.buckets = [buckets_of(np.nan_to_num(values)) for values in (first_byte, duration)]

    def of(self, which: NDArray[np.bool_]) -> _Added:
        """That of some of the requests."""
        part = copy(self)
        part.kinds, part.integers, part.seconds = self.kinds[which], self.integers[which], self.seconds[which]
        part.counted = [counted[which] for counted in self.counted]
        part.buckets = [buckets[which] for buckets in self.buckets]
        return part


class _Table:
    """The rows of one dimension and hour."""

    def __init__(self, dimension: str, hour: int, stored: Sequence[HourlyRow]) -> None:
        self._dimension, self._hour = dimension, hour
        self._name_of = _NAMES[dimension]
        self._names: Numbers[str] = Numbers()
        self._of_kinds = np.zeros(0, dtype=np.int64)
        """Numbers of the names of kinds, by the kinds' numbers; -1: not asked for yet."""
        self._integers = np.zeros((len(stored), len(INTEGERS)), dtype=np.int64)
        self._seconds = np.zeros((len(stored), len(SECONDS)))
        self._histograms = np.zeros((len(stored), len(HISTOGRAMS), BUCKETS), dtype=np.int64)
        for row in stored:
            number = self._names[row[2]]
            self._integers[number] = row[_FIRST_SUM:_FIRST_SECONDS]
            self._seconds[number] = row[_FIRST_SECONDS:_FIRST_HISTOGRAM]
            self._histograms[number] = [merged([data]) for data in row[_FIRST_HISTOGRAM:]]

    def forget_kinds(self) -> None:
        self._of_kinds = self._of_kinds[:0]

    def add(self, added: _Added, known: Sequence[Kind]) -> Iterator[HourlyRow]:
        """The rows that change. `known`: all kinds, by number."""
        if new := len(known) - len(self._of_kinds):
            self._of_kinds = np.concatenate((self._of_kinds, np.full(new, -1)))
        for kind in np.unique(added.kinds[self._of_kinds[added.kinds] < 0]).tolist():
            self._of_kinds[kind] = self._names[self._name_of(known[kind])]
        numbers = self._of_kinds[added.kinds]
        self._grow(len(self._names))
        _add(self._integers, numbers, added.integers)
        _add(self._seconds, numbers, added.seconds)
        flat = self._histograms.reshape(-1)
        for which, (counted, buckets) in enumerate(zip(added.counted, added.buckets, strict=True)):
            rows = numbers[counted] * len(HISTOGRAMS) + which
            np.add.at(flat, rows * BUCKETS + buckets[counted], 1)
        return self._rows(np.unique(numbers))

    def _rows(self, numbers: Integers) -> Iterator[HourlyRow]:
        names = list(self._names)
        integers, seconds = self._integers[numbers].tolist(), self._seconds[numbers].tolist()
        histograms = each_to_bytes(self._histograms[numbers].reshape(-1, BUCKETS))
        for row, number in enumerate(numbers.tolist()):
            first = row * len(HISTOGRAMS)
            yield (
                self._dimension, self._hour, names[number], *integers[row], *seconds[row],
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
