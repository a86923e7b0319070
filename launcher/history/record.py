"""A row as bytes at fixed places, with a checksum: a row that was written in part counts as absent. Pure."""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from typing import Final

from launcher.history.columns import KEPT, STATES, Row, SlotValues
from launcher.history.first_tokens import BUCKETS

MOST_SLOTS: Final = 80
"""Of a row; those with the highest numbers beyond are not recorded."""

# CRC-32 of all that follows, number of slots, recorded seconds, end of the step in ms.
_HEAD: Final = struct.Struct("<IHHq")
_CHECK_BYTES: Final = 4
# Places of the host's values, some of them unused: a column that is added needs no new file.
HOST_PLACES: Final = 22
_HOST: Final = struct.Struct(f"<{HOST_PLACES}d")
_UNUSED: Final = (math.nan,) * (HOST_PLACES - len(KEPT))
_STREAMS: Final = struct.Struct(f"<{BUCKETS}H")
# Slot, state, in flight, KV usage, CPU, tokens per second: whole numbers of small units.
_SLOT: Final = struct.Struct("<HBxHHHxxI")
_NO_STREAMS: Final = bytes(_STREAMS.size)
_NONE_16: Final = 0xFFFF
_NONE_32: Final = 0xFFFFFFFF
_TENTHS: Final = 10
_SHARE: Final = 10_000


@dataclass(frozen=True, slots=True)
class Format:
    """Which parts a row has beside the host's values."""

    slots: bool
    streams: bool
    """Counts of first tokens."""

    @property
    def size(self) -> int:
        """Bytes of the longest row."""
        return self._before_slots + self.slots * MOST_SLOTS * _SLOT.size

    @property
    def _before_slots(self) -> int:
        return _HEAD.size + _HOST.size + self.streams * _STREAMS.size

    def encode(self, row: Row) -> bytes:
        slots = sorted(row.slots)[:MOST_SLOTS] if self.slots else ()
        rest = b"".join(
            (
                _HEAD.pack(0, len(slots), row.seconds, row.ms)[_CHECK_BYTES:],
                _HOST.pack(*(math.nan if value is None else value for value in row.host), *_UNUSED),
                _pack_streams(row) if self.streams else b"",
                *map(_pack_slot, slots),
            )
        )
        return zlib.crc32(rest).to_bytes(_CHECK_BYTES, "little") + rest

    def decode(self, data: bytes, *, slots: bool = True) -> Row | None:
        """With or without its slots. None where the bytes do not begin with a whole row."""
        if len(data) < self._before_slots:
            return None
        check, count, seconds, ms = _HEAD.unpack_from(data)
        begin = self._before_slots
        end = begin + count * _SLOT.size
        view = memoryview(data)
        if count > MOST_SLOTS or len(data) < end or zlib.crc32(view[_CHECK_BYTES:end]) != check:
            return None
        return Row(
            ms,
            seconds,
            tuple(
                None if math.isnan(value) else value
                for value in _HOST.unpack_from(data, _HEAD.size)[: len(KEPT)]
            ),
            tuple(map(_read_slot, _SLOT.iter_unpack(view[begin:end]))) if slots else (),
            _streams_of(data[begin - _STREAMS.size : begin]) if self.streams else {},
        )


def _pack_streams(row: Row) -> bytes:
    if not row.first_tokens:
        return _NO_STREAMS
    return _STREAMS.pack(*(min(row.first_tokens.get(bucket, 0), _NONE_16) for bucket in range(BUCKETS)))


def _streams_of(data: bytes) -> dict[int, int]:
    if data == _NO_STREAMS:
        return {}
    return {bucket: count for bucket, count in enumerate(_STREAMS.unpack(data)) if count}


def _pack_slot(values: SlotValues) -> bytes:
    return _SLOT.pack(
        values.slot,
        STATES.index(values.state) + 1 if values.state in STATES else 0,
        _scaled(values.in_flight, _TENTHS, _NONE_16),
        _scaled(values.kv_usage, _SHARE, _NONE_16),
        _scaled(values.cpu_busy, _SHARE, _NONE_16),
        _scaled(values.tokens_per_s, _TENTHS, _NONE_32),
    )


def _scaled(value: float | None, by: int, none: int) -> int:
    return none if value is None else max(0, min(none - 1, round(value * by)))


def _read_slot(values: tuple[int, int, int, int, int, int]) -> SlotValues:
    slot, state, in_flight, kv, cpu, tokens = values
    return SlotValues(
        slot,
        STATES[state - 1] if 0 < state <= len(STATES) else None,
        None if tokens == _NONE_32 else tokens / _TENTHS,
        None if in_flight == _NONE_16 else in_flight / _TENTHS,
        None if kv == _NONE_16 else kv / _SHARE,
        None if cpu == _NONE_16 else cpu / _SHARE,
    )
