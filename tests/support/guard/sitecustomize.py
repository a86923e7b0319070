"""Notes each use of this machine's folders of the service, in every Python process that a test starts: tests must not
depend on what else was run here. conftest.py puts this folder on PYTHONPATH, and fails the test."""

from __future__ import annotations

import os
import sys

FOLDERS = "NUMA_LAUNCHER_TEST_GUARDED"
"""Variable: the folders, separated by colons."""
NOTES = "NUMA_LAUNCHER_TEST_GUARD_NOTES"
"""Variable: the file of the notes, a line each."""
# Events of the audit hook (PEP 578) -> position of the path among their arguments.
_EVENTS = {
    "open": 0, "os.listdir": 0, "os.scandir": 0, "os.mkdir": 0, "os.rename": 1, "os.remove": 0, "os.rmdir": 0,
    "os.link": 1, "os.symlink": 1, "os.chmod": 0, "os.chown": 0, "sqlite3.connect": 0, "socket.connect": 1,
    "socket.bind": 1, "os.chdir": 0,
}  # fmt: skip


def install(folders: tuple[str, ...], notes: str) -> None:
    """Note uses of `folders` in the file `notes` for as long as this process runs."""
    beginnings = tuple(f"{folder}/" for folder in folders)

    def hook(event: str, args: tuple[object, ...]) -> None:
        place = _EVENTS.get(event)
        if place is None or len(args) <= place:
            return
        path = args[place]
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        elif isinstance(path, os.PathLike):
            path = os.fspath(path)
        if isinstance(path, str) and f"{path}/".removeprefix("file:").startswith(beginnings):
            descriptor = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.write(descriptor, f"{event} {path!r} by {' '.join(sys.orig_argv)[:200]}\n".encode())
            os.close(descriptor)

    sys.addaudithook(hook)


if FOLDERS in os.environ and NOTES in os.environ:
    install(tuple(os.environ[FOLDERS].split(":")), os.environ[NOTES])
