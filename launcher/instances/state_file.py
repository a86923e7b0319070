"""A file with the running instances, from which the next daemon adopts them.

The file is replaced as a whole: a daemon that is killed meanwhile leaves the old file or the new one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

import msgspec

from launcher.address import Address, TcpAddress, UnixAddress
from launcher.engines.base import Launch
from launcher.host.replace_file import replace_file

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

    @classmethod
    def of(cls, slot: int, generation: int, unit: str, digested: str, address: Address) -> Self:
        """Before its unit has started."""
        path = address.path if isinstance(address, UnixAddress) else None
        port = address.port if isinstance(address, TcpAddress) else None
        return cls(slot=slot, generation=generation, unit=unit, digest=digested, socket=path, port=port)

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
    """The records of all slots, in memory and on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records = _load(path)

    @property
    def records(self) -> Mapping[int, Record]:
        return self._records

    def put(self, record: Record) -> None:
        self._records[record.slot] = record
        self._save()

    def remove(self, slot: int) -> None:
        if self._records.pop(slot, None) is not None:
            self._save()

    def _save(self) -> None:
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

    Left out, so that they restart no instance: the number of a loopback port, which each launch chooses, the values
    of secrets, and the folder of this release (scripts/releases.sh; `prefix` is this environment)."""
    port = str(launch.address.port) if isinstance(launch.address, TcpAddress) else None
    argv = [word if port is None else word.replace(port, "{port}") for word in launch.argv]
    env = {name: value for name, value in sorted(launch.env.items()) if name not in launch.secrets}
    where = launch.address.path if isinstance(launch.address, UnixAddress) else "tcp"
    text = json.dumps([argv, env, sorted(launch.secrets), where])
    release = Path(prefix).parent
    if release.parent.name == "releases":
        text = text.replace(f"{release}/", f"{release.parent.parent}/")
    return hashlib.sha256(text.encode()).hexdigest()[:32]
