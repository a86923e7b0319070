"""Entries as columns: the sums of a batch are computed from them, and they are what the ledger's file keeps. Pure.

Fields that are the same for many entries are a group, kept once; times and amounts are arrays. So a request costs a
microsecond, and nothing large needs to be compressed: the text of its id is a third of what remains.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from launcher.usage.entry import Entry

_T = TypeVar("_T")
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

# Of fewer entries the groups are most of the bytes, and compressing them takes little CPU time.
_COMPRESSED: Final = 64
_TOKENS: Final = 3  # columns of `amounts` before picos
_SMALL_TOKENS: Final = 2**32


class Group(NamedTuple):
    """What many entries have in common; the names are Entry's."""

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
    def of(cls, entries: Sequence[Entry]) -> Columns:
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
        """Raises ValueError (msgspec's errors are some), zlib.error."""
        # The first byte of zlib's form is 0x78, that of an array in msgpack 0x9x.
        stored = _DECODER.decode(zlib.decompress(data) if data[:1] == b"\x78" else data)
        count = len(stored.ids)
        tokens = np.frombuffer(
            stored.tokens, dtype="<u4" if len(stored.tokens) == 4 * _TOKENS * count else "<i8"
        )
        return cls(
            stored.ids, stored.groups, np.frombuffer(stored.group_of, dtype="<u2").astype(np.int64),
            np.frombuffer(stored.times, dtype="<f8").reshape(count, -1),
            np.column_stack((tokens.reshape(count, -1), np.frombuffer(stored.picos, dtype="<i8"))).astype(np.int64),
        )  # fmt: skip

    def entries(self) -> Iterator[Entry]:
        times: list[list[Any]] = np.where(np.isnan(self.times), None, self.times).tolist()  # type: ignore[call-overload]
        rows = zip(self.ids, self.group_of.tolist(), times, self.amounts.tolist(), strict=True)
        for request_id, number, (ended_at, duration_s, queued_s, first_byte_s, predicted_s), amounts in rows:
            prompt_tokens, cached_tokens, output_tokens, picos = amounts
            yield Entry(
                ended_at=ended_at, request_id=request_id, duration_s=duration_s, queued_s=queued_s,
                first_byte_s=first_byte_s, predicted_s=predicted_s, prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens, output_tokens=output_tokens, picos=picos,
                **self.groups[number]._asdict(),
            )  # fmt: skip


def check(entry: Entry) -> bool:
    """Whether an entry can be summed up, written and read again: types, whole numbers of 64 bits, texts of Unicode."""
    try:
        return [*Columns.from_bytes(Columns.of([entry]).to_bytes()).entries()] == [entry]
    except (TypeError, ValueError, OverflowError):
        return False
