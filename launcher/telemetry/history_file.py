"""The file of the history: of fixed size, one process at a time, read and written at places.

All of its space is allocated when it is made. pread(2) and pwrite(2), no mmap: on a full disk, or in a file that
somebody truncated, a store into a mapped page is a SIGBUS, which ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import stat
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec

from launcher.base.errors import LauncherError, reason
from launcher.telemetry.history_columns import KEPT, STATES, Row, SlotValues
from launcher.telemetry.quantiles import BUCKETS

# --- A row as bytes at fixed places, with a checksum: a row that was written in part counts as absent. ---

MOST_SLOTS: Final = 80
"""Of a row; those with the highest numbers beyond are not recorded."""

# CRC-32 of all that follows, number of slots, recorded seconds, end of the step in ms.
_HEAD: Final = struct.Struct("<IHHq")
_CHECK_BYTES: Final = 4
# Places of the host's values, some of them unused: a column that is added needs no new file.
HOST_PLACES: Final = 22
_HOST: Final = struct.Struct(f"<{HOST_PLACES}d")
_UNUSED_PLACES: Final = (math.nan,) * (HOST_PLACES - len(KEPT))
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
                _HOST.pack(*(math.nan if value is None else value for value in row.host), *_UNUSED_PLACES),
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


# --- Rows at places that follow from their time: row and place of a step are known without an index.
#
# A row is found where its time says, and counts only if it holds that time: rows of an earlier turn of the ring, rows that a
# process killed meanwhile wrote in part, and rows from before the clock was set are gaps.

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


_MAGIC: Final = b"NLHISTORY\0"
_VERSION: Final = 1
SUFFIX: Final = ".bin"
_REMEDY: Final = "name a file on a local disk with space for 8 MB in [telemetry] history_path"


class HistoryFile:
    """Raises LauncherError where the file cannot be used. A broken one is renamed, and a new one begins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.moved_to: Path | None = None
        """Where a broken file has been moved to."""
        try:
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._descriptor = self._opened()
        except OSError as error:
            raise LauncherError(f"cannot keep the history in '{path}': {reason(error)}", _REMEDY) from None

    def _opened(self) -> int:
        for _ in range(2):
            descriptor = _open(self._path)
            try:
                found = self._usable(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            if found:
                return descriptor
            os.close(descriptor)
        raise OSError(errno.EBUSY, "another program replaces it")

    def _usable(self, descriptor: int) -> bool:
        """Whether this is the file of the history, made if it was empty; False once a broken one has been renamed."""
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LauncherError(
                f"cannot keep the history in '{self._path}': another daemon uses it",
                "end that daemon, or name another file in [telemetry] history_path",
            ) from None
        header = os.pread(descriptor, HEADER_BYTES, 0)
        if header == _header() and facts.st_size == FILE_BYTES:
            return True
        # New, or a process was killed while it made it.
        if facts.st_size in (0, FILE_BYTES) and not any(header):
            _make(descriptor)
            return True
        if not header.startswith(_MAGIC) and self._path.suffix != SUFFIX:
            raise LauncherError(
                f"cannot keep the history in '{self._path}': it is another program's file", _REMEDY
            )
        self.moved_to = _aside(self._path)
        return False

    @property
    def replaced(self) -> bool:
        """The file was removed, or there is another one of its name."""
        try:
            there = self._path.stat()
        except OSError:
            return True
        return not os.path.samestat(there, os.fstat(self._descriptor))

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, offset)

    def write(self, offset: int, data: bytes) -> None:
        if os.pwrite(self._descriptor, data, offset) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a short write: the next one says why

    def close(self) -> None:
        """An answer may still want to read: it gets EBADF, and not another file of the same number."""
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)


def _open(path: Path) -> int:
    # O_NONBLOCK: a FIFO of that name is refused instead of waited for.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o600)


def _make(descriptor: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, FILE_BYTES)
        os.pwrite(descriptor, _header(), 0)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)  # what could be had of a full disk
        raise


def _aside(path: Path) -> Path:
    moved = path.with_name(f"{path.name}.broken-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
    path.rename(moved)
    return moved


def _header() -> bytes:
    """The layout of the file; one with another layout is another version's."""
    text = msgspec.json.encode(
        {
            "version": _VERSION,
            "spans": [[span.name, span.step_ms, span.rows, span.format.size] for span in SPANS],
        }
    )
    return (_MAGIC + zlib.crc32(text).to_bytes(4, "little") + text).ljust(HEADER_BYTES, b"\0")
