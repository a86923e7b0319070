"""What budgets and daily caps have spent, in a small file beside the usage ledger.

The ledger commits once a second. A sum in this file is replaced with each request that ends, so that a daemon that was
killed knows at its next start what it had served. The page cache keeps a write through SIGKILL; after a power cut the
ledger alone counts.

One pwrite(2) of a slot and no mmap: a store into a mapped page of a file that was truncated, or on a full disk, is a
SIGBUS that ends the process. A slot of 64 bytes never crosses a page, so that a write is whole or did not happen.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterable
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Final
from zoneinfo import ZoneInfo

from launcher.accounts.budgets import Past, StoredSum
from launcher.accounts.ledger_file import open_sums
from launcher.accounts.report_values import day_begin, days
from launcher.accounts.spending import DAY_S, KEPT_S
from launcher.base.clock import Moment
from launcher.base.database import NoDataError, is_damage
from launcher.base.database_repair import lost_at
from launcher.base.errors import reason
from launcher.base.money import picos
from launcher.base.money_limits import DailyCap, Day
from launcher.config.schema import Overflow

_LOG = logging.getLogger(__name__)

VERSION: Final = 1
SLOT_BYTES: Final = 64
_HEADER: Final = struct.Struct("<8sI52x")
_MAGIC: Final = b"NLSPENT\0"
# Digest of kind, name and unit; begin of the period (Unix time, seconds); amount; CRC-32 of all before.
_BODY: Final = struct.Struct("<16sqq")
_CHECK: Final = struct.Struct("<I28x")
_MOST: Final = (1 << 63) - 1
MAX_SLOTS: Final = 1 << 20
"""64 MiB; a longer file is none of ours."""


class SpentSlot:
    """The sum of one budget or cap. Owned by the thread that stores it."""

    def __init__(self, file: SpentFile, index: int, digest: bytes, found: tuple[int, int] | None) -> None:
        self._file = file
        self._offset = (1 + index) * SLOT_BYTES
        self._digest = digest
        self._found = found

    def amount(self, begin: int) -> int | None:
        """What the file held at its opening of the period that began at `begin`, Unix seconds. None: nothing."""
        return self._found[1] if self._found is not None and self._found[0] == begin else None

    def store(self, begin: int, amount: int) -> None:
        """Replace it. Never raises; a failure is logged once."""
        body = _BODY.pack(self._digest, begin, min(amount, _MOST))
        self._file.write(body + _CHECK.pack(zlib.crc32(body)), self._offset)


class SpentFile:
    """Slots of fixed size. One that is damaged counts as absent; a file of another format is replaced.

    It is opened, or made, for the first slot. Where it cannot be used, the ledger alone counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._complained = False
        self._descriptor: int | None = None
        self._found: dict[bytes, tuple[int, tuple[int, int]]] = {}
        """By digest: index, begin and amount."""
        self._slots: dict[bytes, SpentSlot] = {}
        self._free: list[int] = []
        self._count = 0
        self._opened = False

    @property
    def usable(self) -> bool:
        return self._descriptor is not None and not self._complained

    def slot(self, kind: str, name: str, unit: str) -> SpentSlot:
        """The slot of a budget or cap, the same for the same words: ("key", "ann", "tokens/month")."""
        if not self._opened:
            self._opened = True
            try:
                self._open()
            except OSError as error:
                self._complain(error)
                self.close()
        digest = blake2b(f"{kind}\0{name}\0{unit}".encode(), digest_size=16).digest()
        slot = self._slots.get(digest)
        if slot is None:
            known = self._found.pop(digest, None)
            index = self._unused() if known is None else known[0]
            found = None if known is None else known[1]
            self._slots[digest] = slot = SpentSlot(self, index, digest, found)
        return slot

    def _unused(self) -> int:
        if self._free:
            return self._free.pop()
        self._count += 1
        return self._count - 1

    def write(self, data: bytes, offset: int) -> None:
        """One slot, at its place."""
        if self._descriptor is None:
            return
        try:
            if os.pwrite(self._descriptor, data, offset) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a short write: the next one says why
        except OSError as error:
            self._complain(error)
        else:
            if self._complained:
                self._complained = False
                _LOG.info("sums of budgets are stored again in %s", self._path)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._descriptor = descriptor = os.open(
            self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        size = min(os.fstat(descriptor).st_size, (1 + MAX_SLOTS) * SLOT_BYTES)
        data = os.pread(descriptor, size, 0)
        header = _HEADER.pack(_MAGIC, VERSION)
        if data[:SLOT_BYTES] != header:
            if data:
                _LOG.warning(
                    "sums of budgets in %s are unreadable: the usage ledger alone counts", self._path
                )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, header, 0)
            return
        self._count = len(data) // SLOT_BYTES - 1
        for index in range(self._count):
            self._read(index, data[(1 + index) * SLOT_BYTES : (2 + index) * SLOT_BYTES])

    def _read(self, index: int, data: bytes) -> None:
        body = data[: _BODY.size]
        digest, begin, amount = _BODY.unpack(body)
        if amount < 0 or data[_BODY.size :] != _CHECK.pack(zlib.crc32(body)):
            self._free.append(index)
            return
        other = self._found.get(digest)
        if other is not None and other[1] >= (begin, amount):
            self._free.append(index)
            return
        if other is not None:
            self._free.append(other[0])
        self._found[digest] = index, (begin, amount)

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            _LOG.error(
                "cannot store the sums of budgets in %s: %s; after a crash up to a second of them is lost",
                self._path, reason(error),
            )  # fmt: skip


# --- The daily caps of overflow endpoints at the daemon's start: what each endpoint has cost today. ---

_DAY_S: Final = 86400
_SUM: Final = (
    "SELECT sum(picos) FROM hourly WHERE dimension = 'overflow' AND name = ? AND hour >= ? AND hour < ?"
)


def day_in(zone: ZoneInfo) -> Callable[[float], Day]:
    """The day around a Unix time, from midnight to midnight of the zone."""

    def day_of(now: float) -> Day:
        begin = day_begin(now, zone)
        # From noon of the next day: a day may have 25 hours.
        return Day(begin, day_begin(begin + _DAY_S * 3 // 2, zone))

    return day_of


def make_caps(
    endpoints: Iterable[Overflow],
    path: Path,
    zone: ZoneInfo,
    now: Moment,
    stored: Callable[[str, str, str], StoredSum],
    *,
    currency: str = "USD",
    allow_unknown: bool = False,
) -> dict[str, DailyCap]:
    """The caps by the endpoint's name, on the day that the clock was set from, if it was. `path`: of the usage ledger,
    before it is opened for writing, which moves a broken file aside. `stored`: the slot of a kind, name and unit in the file
    of sums. `allow_unknown`: requests go there even where neither knows what it has cost today."""
    day_of = day_in(zone)
    day = day_of(now.steady)
    caps = {}
    for endpoint in endpoints:
        if endpoint.max_per_day is None:
            continue
        name = endpoint.endpoint
        slot = stored("overflow", name, "day")
        spent, why = _spent(path, name, day, now.wall)
        kept = slot.amount(day.begins)
        if kept is not None:
            spent = max(spent or 0, kept)
        elif spent is None:
            _LOG.error(
                "cannot tell what overflow endpoint %s has cost today: %s; until midnight it gets %s",
                name, why, "requests as if that were nothing" if allow_unknown else "no requests",
                extra={"endpoint": name},
            )  # fmt: skip
            spent = 0 if allow_unknown else None
        caps[name] = DailyCap(
            picos(endpoint.max_per_day), day_of, now, spent=spent, record=slot, currency=currency
        )
    return caps


def read_again(caps: Iterable[str], path: Path, zone: ZoneInfo, now: float) -> dict[str, int]:
    """What these endpoints have cost on the day around `now`, as far as the ledger knows. An endpoint of which that was not
    known got no requests since the daemon's start."""
    day = day_in(zone)(now)
    found = {name: _spent(path, name, day, now)[0] for name in caps}
    return {name: spent for name, spent in found.items() if spent is not None}


def _spent(path: Path, name: str, day: Day, now: float) -> tuple[int | None, str]:
    """What the ledger knows; None, and why, where it does not know all."""
    lost = lost_at(path, now)
    if lost is not None and lost >= day.begins:
        return None, "an earlier ledger was unreadable and was moved aside"
    try:
        with contextlib.closing(open_sums(path)) as reader:
            [amount] = reader.execute(_SUM, (name, *day)).fetchone()
            return int(amount or 0), ""
    except NoDataError:
        return 0, ""
    except Exception as error:
        return None, str(error)


# --- What the usage ledger says of the keys' spending before the daemon's start. ---

_SUMS: Final = """
SELECT name, sum(prompt_tokens + output_tokens), sum(picos) FROM hourly
WHERE dimension = 'key' AND hour >= ? AND hour < ? AND name != '' GROUP BY name
"""


def read_past(path: Path, zone: ZoneInfo, now: float, also: float | None = None) -> Past:
    """The sums of each key and day around `now` and `also`, Unix times. To be read before the ledger is opened for writing,
    which moves a broken file aside. Never raises: what cannot be read is unknown, whatever the reason."""
    try:
        with contextlib.closing(open_sums(path)) as reader:
            return Past(_rows(reader, zone, {now, also or now}), lost_at(path, now))
    except NoDataError:
        return Past(lost_at=lost_at(path, now))
    except Exception as error:
        return Past(lost_at=now, why=str(error), unreadable=True, damaged=is_damage(error))


def _rows(
    reader: sqlite3.Connection, zone: ZoneInfo, times: Iterable[float]
) -> list[tuple[str, float, int, int]]:
    # One statement for each day.
    ends: dict[int, int] = {}
    for now in times:
        ends |= pairwise(days(int(now - KEPT_S), int(now) + 2 * DAY_S, zone))
    return [
        (name, float(begin), int(tokens), int(picos))
        for begin, following in sorted(ends.items())
        for name, tokens, picos in reader.execute(_SUMS, (begin, following))
    ]
