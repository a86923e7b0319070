"""Locks that end with the process that holds them, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from launcher.errors import LauncherError, RefusedError, reason

# In the abstract namespace (unix(7)): one for all users of the machine, and gone with its process.
_MACHINE: Final = "\0numa-launcher-tune"
_REMEDY: Final = "wait until it has ended, or stop it with Ctrl-C"


@contextlib.contextmanager
def only_run(path: Path) -> Iterator[None]:
    """One `tune` per state folder: the lock of the file at `path`. Raises LauncherError."""
    with _open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = path.read_text(errors="replace").strip()
            raise RefusedError(
                f"cannot tune: another tune (pid {pid}) uses '{path.parent}'", _REMEDY
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
        file.flush()
        yield


@contextlib.contextmanager
def only_engines() -> Iterator[None]:
    """One `tune` with engines per machine, whatever its state folder. Raises RefusedError."""
    with socket.socket(socket.AF_UNIX) as held:
        try:
            held.bind(_MACHINE)
        except OSError:
            raise RefusedError(
                "cannot tune: another tune measures engines on this machine", _REMEDY
            ) from None
        yield


@contextlib.contextmanager
def until_unlocked(path: Path) -> Iterator[IO[bytes]]:
    """Holds the lock of a file for a program that waits for it (flock(1)). Raises LauncherError."""
    with _open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def unlock(file: IO[bytes]) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("ab")
    except OSError as error:
        raise LauncherError(
            f"cannot open '{path}': {reason(error)}",
            "choose a folder that you may write to, with --state-dir",
        ) from None
