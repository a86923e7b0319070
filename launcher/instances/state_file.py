"""A file with the running instances, from which the next daemon adopts them.

The file is replaced as a whole: a daemon that is killed meanwhile leaves the old file or the new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final, Self

import msgspec

from launcher.base.address import Address, TcpAddress, UnixAddress
from launcher.base.errors import reason
from launcher.base.files import replace_file
from launcher.base.redaction import is_secret, is_secret_name
from launcher.engines.base import Launch
from launcher.instances.unit import secrets_text

log = logging.getLogger("launcher.instances")

VERSION: Final = 1


class Record(msgspec.Struct, frozen=True, kw_only=True):
    slot: int
    generation: int
    unit: str
    digest: str
    """`digest` of its launch."""
    socket: str | None = None
    port: int | None = None
    """Where it listens: a path, or a port of the loopback address."""
    pid: int = 0
    """0 and an empty `invocation`: the daemon ended before systemd had reported them."""
    invocation: str = ""
    started: float = 0.0
    """Seconds since the epoch."""
    model: str | None = None
    """`ModelFiles.to_text` of its model; None: unknown."""

    @classmethod
    def of(cls, slot: int, generation: int, unit: str, digested: str, launch: Launch) -> Self:
        """Before its unit has started."""
        address, files = launch.address, launch.files
        path = address.path if isinstance(address, UnixAddress) else None
        port = address.port if isinstance(address, TcpAddress) else None
        return cls(
            slot=slot, generation=generation, unit=unit, digest=digested, socket=path, port=port,
            model=None if files is None else files.to_text(),
        )  # fmt: skip

    def with_unit(self, pid: int, invocation: str, started: float) -> Self:
        """With what systemd reports about its running unit."""
        return msgspec.structs.replace(self, pid=pid, invocation=invocation, started=started)

    @property
    def address(self) -> Address:
        if self.socket is not None:
            return UnixAddress(self.socket)
        return TcpAddress("127.0.0.1", self.port or 0)


class _File(msgspec.Struct, kw_only=True):
    version: int
    instances: tuple[Record, ...]


class StateFile:
    """The records of all slots, in memory and on disk. The disk is written in threads: it may stall."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records = _load(path)
        self._lock = threading.Lock()
        """One thread at a time writes; what it writes is the newest."""

    @property
    def records(self) -> Mapping[int, Record]:
        return self._records

    async def put(self, record: Record) -> None:
        self._records[record.slot] = record
        await asyncio.to_thread(self._save)

    async def remove(self, slot: int) -> None:
        if self._records.pop(slot, None) is not None:
            await asyncio.to_thread(self._save)

    def _save(self) -> None:
        with self._lock:
            body = msgspec.json.encode(_File(version=VERSION, instances=tuple(self._records.values())))
            replace_file(self.path, msgspec.json.format(body) + b"\n")


def _load(path: Path) -> dict[int, Record]:
    """Empty for a missing or unreadable file: no instance is adopted then."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        log.warning("cannot read the state file '%s': %s; running instances are restarted", path, error)
        return {}
    if found.version != VERSION:
        log.warning(
            "state file '%s' has version %d, not %d; running instances are restarted",
            path,
            found.version,
            VERSION,
        )
        return {}
    return {record.slot: record for record in found.instances}


def digest(launch: Launch, prefix: str = sys.prefix) -> str:
    """Identifies a launch: command, environment without secrets, kind of address.

    Left out, so that they restart no instance: what `Launch.settled` leaves out, the values of secrets, and
    the folder of this release (scripts/releases.sh; `prefix` is this environment)."""
    argv, settings = launch.settled
    # A value that is only not known to be harmless restarts an instance all the same when it changes.
    secrets = {
        name for name in launch.secrets if is_secret_name(name) or is_secret(name, launch.env.get(name, ""))
    }
    env = {name: value for name, value in sorted(settings.items()) if name not in secrets}
    where = launch.address.path if isinstance(launch.address, UnixAddress) else "tcp"
    text = json.dumps([argv, env, sorted(secrets), where])
    release = Path(prefix).parent
    if release.parent.name == "releases":
        text = text.replace(f"{release}/", f"{release.parent.parent}/")
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# --- A folder that only root may read: the running instances, for the next daemon, and secrets for units that start.


class StateFolder:
    """A full disk prevents no start: the next daemon then restarts the instance. The folder is made when needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = StateFile(path / "instances.json")

    @property
    def records(self) -> Mapping[int, Record]:
        return self._file.records

    async def remember(self, record: Record) -> None:
        """Record a running instance; if it can't be written now, it is written with the next one."""
        try:
            await self._file.put(record)
        except OSError as error:
            log.warning(
                "cannot write '%s': %s; a daemon that starts now would restart slot %d",
                self._file.path, reason(error), record.slot, extra={"slot": record.slot},
            )  # fmt: skip

    async def forget(self, slot: int) -> None:
        try:
            await self._file.remove(slot)
        except OSError as error:  # harmless: a record is compared with its unit before an adoption
            log.warning("cannot write '%s': %s", self._file.path, reason(error))

    @contextlib.asynccontextmanager
    async def secrets(self, slot: int, values: Mapping[str, str]) -> AsyncIterator[str | None]:
        """An EnvironmentFile= with `values` until systemd has read it; None without values. Raises OSError."""
        if not values:
            yield None
            return
        path = self.path / f"slot{slot}.env"
        await asyncio.to_thread(replace_file, path, secrets_text(values))
        try:
            yield str(path)
        finally:
            path.unlink(missing_ok=True)


# --- The held slots, for the next daemon. The file is replaced as a whole. ---


class HeldFile:
    """Slot numbers, in memory and in a file that exists only while a slot is held."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.lost = ""
        """Why the file of an earlier daemon could not be read; empty where it could, or none is there."""
        try:
            self._slots = _load_held(path)
        except (OSError, ValueError, TypeError) as error:
            self._slots = frozenset()
            why = reason(error) if isinstance(error, OSError) else "it is damaged"
            self.lost = (
                f"cannot read '{path}': {why}; slots that were held are started (numa-launcher hold SLOT)"
            )
            log.warning("%s", self.lost)

    @property
    def slots(self) -> frozenset[int]:
        return self._slots

    async def note(self, slot: int, *, held: bool) -> None:
        """Record whether a slot is held. A file that can't be written is only logged."""
        self.lost = ""  # an operator holds or releases: the file is written again
        slots = self._slots | {slot} if held else self._slots - {slot}
        if slots == self._slots:
            return
        self._slots = slots
        try:
            await asyncio.to_thread(self._save)
        except OSError as error:
            log.warning(
                "slot %d: cannot write '%s': %s; the next daemon will not know that it is %sheld",
                slot, self._path, reason(error), "" if held else "no longer ", extra={"slot": slot},
            )  # fmt: skip

    def _save(self) -> None:
        with self._lock:
            if self._slots:
                replace_file(self._path, json.dumps(sorted(self._slots)).encode("ascii"))
            else:
                self._path.unlink(missing_ok=True)


def _load_held(path: Path) -> frozenset[int]:
    """Empty without a file. Raises OSError, ValueError or TypeError for one that cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        return frozenset()
    return frozenset(int(slot) for slot in found)
