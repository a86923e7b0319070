"""The hourly sums that a batch of entries changes, computed in numpy: a request costs a fraction of a microsecond. Pure.

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
is at its end), `queued_s` before. The histograms are launcher.accounts.latency's.

Requests whose outcome is `completed` are in the histogram of durations; in that of queued times all that an instance was
asked for. In that of first bytes are those `completed` or `client_aborted` that got one: an error, an upstream's 4xx
(`refused`) included, comes at once, and would make many of them look like low latency.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.latency import BUCKETS, buckets_of, each_to_bytes, merged

DIMENSIONS: Final = ("all", "key", "model", "slot", "overflow")
# Sums of `hourly`, in the order of its columns.
INTEGERS: Final = (
    "requests", "completed", "client_aborted", "rejected", "failed", "continued", "overflowed", "inexact",
    "prompt_tokens", "cached_tokens", "output_tokens", "picos", "overflow_picos",
)  # fmt: skip
SECONDS: Final = ("prefill_s", "decode_s", "queued_s")
HISTOGRAMS: Final = ("queued", "first_byte", "duration")
HOURLY: Final = f"""CREATE TABLE hourly (
    dimension TEXT NOT NULL, hour INTEGER NOT NULL, name TEXT NOT NULL,
    {", ".join(f"{column} INTEGER NOT NULL" for column in INTEGERS)},
    {", ".join(f"{column} REAL NOT NULL" for column in SECONDS)},
    {", ".join(f"{column} BLOB NOT NULL" for column in HISTOGRAMS)},
    PRIMARY KEY (dimension, hour, name)
) WITHOUT ROWID;"""


class DamagedSumsError(ValueError):
    """Rows of `hourly` hold nothing that was ever written."""


# --- Entries as columns: the sums of a batch are computed from them, and they are what the ledger's file keeps.
#
# Fields that are the same for many entries are a group, kept once; times and amounts are arrays. So a request costs a
# microsecond, and nothing large needs to be compressed: the text of its id is a third of what remains.

_T = TypeVar("_T")
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

# Of fewer entries the groups are most of the bytes, and compressing them takes little CPU time.
_COMPRESSED: Final = 64
_TOKENS: Final = 3  # columns of `amounts` before picos
_SMALL_TOKENS: Final = 2**32


class Group(NamedTuple):
    """Values that many entries have in common; the names are EndedRequest's."""

    key: str
    model: str
    adapter: str
    path: str
    status: int
    outcome: str
    slot: int | None
    exact: bool
    attempts: int
    continued: int
    overflow: str
    overflow_reason: str
    streamed: bool


class _Stored(msgspec.Struct, array_like=True):
    """A new field has a default and goes to the end."""

    ids: list[str]
    groups: list[Group]
    group_of: bytes  # 16 bits each
    times: bytes  # float64: ended_at, duration_s, queued_s, first_byte_s, predicted_s; NaN is None
    tokens: bytes  # prompt, cached, output: 32 bits each, or 64 where one is larger
    picos: bytes  # 64 bits each


_DECODER: Final = msgspec.msgpack.Decoder(_Stored)


class Numbers(dict[_T, int]):
    """Numbers of names or groups, in the order in which they were first asked for."""

    def __missing__(self, name: _T) -> int:
        number = self[name] = len(self)
        return number


@dataclass(frozen=True, slots=True)
class Columns:
    ids: Sequence[str]
    groups: Sequence[Group]
    group_of: Integers
    """The place of each entry's group."""
    times: Floats
    amounts: Integers
    """Prompt, cached and output tokens, picos."""

    @classmethod
    def of(cls, entries: Sequence[EndedRequest]) -> Columns:
        """Raises TypeError, ValueError or OverflowError for values that are none of a column."""
        groups: Numbers[tuple[Any, ...]] = Numbers()
        group_of = np.array(
            [
                groups[
                    e.key, e.model, e.adapter, e.path, e.status, e.outcome, e.slot, e.exact, e.attempts, e.continued,
                    e.overflow, e.overflow_reason, e.streamed,
                ]
                for e in entries
            ],
            dtype=np.int64,
        )  # fmt: skip
        times = [(e.ended_at, e.duration_s, e.queued_s, e.first_byte_s, e.predicted_s) for e in entries]
        amounts = [(e.prompt_tokens, e.cached_tokens, e.output_tokens, e.picos) for e in entries]
        return cls(
            [e.request_id for e in entries], [Group(*group) for group in groups], group_of,
            np.array(times, dtype=float), np.array(amounts, dtype=np.int64),
        )  # fmt: skip

    def part(self, where: slice | NDArray[np.bool_]) -> Columns:
        """The chosen entries, and the groups that these have."""
        used, group_of = np.unique(self.group_of[where], return_inverse=True)
        ids = self.ids[where] if isinstance(where, slice) else list(compress(self.ids, where))
        return Columns(
            ids, [self.groups[number] for number in used], group_of.astype(np.int64), self.times[where],
            self.amounts[where],
        )  # fmt: skip

    def to_bytes(self) -> bytes:
        tokens, picos = self.amounts[:, :_TOKENS], self.amounts[:, _TOKENS]
        small = not ((tokens < 0) | (tokens >= _SMALL_TOKENS)).any()
        data = msgspec.msgpack.encode(
            _Stored(
                list(self.ids), list(self.groups), self.group_of.astype("<u2").tobytes(),
                self.times.astype("<f8").tobytes(), tokens.astype("<u4" if small else "<i8").tobytes(),
                picos.astype("<i8").tobytes(),
            )
        )  # fmt: skip
        return zlib.compress(data, level=1) if len(self.ids) < _COMPRESSED else data

    @classmethod
    def from_bytes(cls, data: bytes) -> Columns:
        """Raises ValueError; msgspec's errors are some."""
        try:
            # The first byte of zlib's form is 0x78, that of an array in msgpack 0x9x.
            stored = _DECODER.decode(zlib.decompress(data) if data[:1] == b"\x78" else data)
        except zlib.error as error:
            raise ValueError(f"entries are damaged: {error}") from None
        count = len(stored.ids)
        tokens = np.frombuffer(
            stored.tokens, dtype="<u4" if len(stored.tokens) == 4 * _TOKENS * count else "<i8"
        )
        return cls(
            stored.ids, stored.groups, np.frombuffer(stored.group_of, dtype="<u2").astype(np.int64),
            np.frombuffer(stored.times, dtype="<f8").reshape(count, -1),
            np.column_stack((tokens.reshape(count, -1), np.frombuffer(stored.picos, dtype="<i8"))).astype(np.int64),
        )  # fmt: skip

    def entries(self) -> Iterator[EndedRequest]:
        times: list[list[Any]] = np.where(np.isnan(self.times), None, self.times).tolist()  # type: ignore[call-overload]
        rows = zip(self.ids, self.group_of.tolist(), times, self.amounts.tolist(), strict=True)
        for request_id, number, (ended_at, duration_s, queued_s, first_byte_s, predicted_s), amounts in rows:
            prompt_tokens, cached_tokens, output_tokens, picos = amounts
            yield EndedRequest(
                ended_at=ended_at, request_id=request_id, duration_s=duration_s, queued_s=queued_s,
                first_byte_s=first_byte_s, predicted_s=predicted_s, prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens, output_tokens=output_tokens, picos=picos,
                **self.groups[number]._asdict(),
            )  # fmt: skip


KEPT: Final = EndedRequest.__struct_fields__[: EndedRequest.__struct_fields__.index("streamed") + 1]
"""The fields of a request that the ledger has."""


def check(entry: EndedRequest) -> bool:
    """Whether an entry can be summed up, written and read again: types, whole numbers of 64 bits, texts of Unicode."""
    kept = EndedRequest(**{name: getattr(entry, name) for name in KEPT})
    try:
        return [*Columns.from_bytes(Columns.of([kept]).to_bytes()).entries()] == [kept]
    except (TypeError, ValueError, OverflowError):
        return False


Row = tuple[Any, ...]  # of `hourly`, in the order of its columns
Stored = Callable[[str, int], Sequence[Row]]
"""The rows that the ledger has of a dimension and an hour."""
HourOf = Callable[[float], int]

OUTCOMES: Final = ("completed", "client_aborted", "rejected", "failed")
"""Those with a sum of their own; the others of all requests are `refused`."""
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
        """The rows of `hourly` that the batch changes, with it. Raises DamagedSumsError for stored rows that are none."""
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
            stored = self._stored(dimension, hour)
            try:
                table = _Table(dimension, hour, stored)
            except (ValueError, TypeError, ArithmeticError) as error:
                raise DamagedSumsError(f"its sums of hour {hour}: {error}") from None
            self._tables[hour, dimension] = table
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
        # One that was refused took no time of the model.
        refused = np.array([group.outcome == "refused" for group in groups])[self.group_of]
        split = (streamed | (columns.amounts[:, 2] == 0)) & ~refused
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
