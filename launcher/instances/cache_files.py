"""The files of compile caches: prepare them for a start, keep them after one, empty them.

The instances' user may write to their folders and may run a model's code, which could put links there. Therefore all of
this runs with that user's rights. Where the instances have a user of their own, compile_cache passes the text of this
module to a Python that runs as that user: ``python -I -S - ORDER``, ORDER in JSON; each line of its output is a log record
in JSON. It imports the standard library only.

The folder of one set of versions has slotN with ``stamp.json``, and shared folders workshop-KIND-N (see compile_cache).
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import itertools
import json
import logging
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

STAMP: Final = "stamp.json"
# A longer file is not a stamp.
STAMP_BYTES: Final = 4096
# Folders of other versions that no engine has started with for this long are removed.
FORGOTTEN_S: Final = 30 * 86400.0
# Prefix of the folders in which slots of one kind compile together.
SHARED: Final = "workshop"
# A file in a shared folder: it has a broken file, and new starts use another folder.
DAMAGED: Final = "damaged"
# Levels of folders that are copied, far more than Inductor's and vLLM's caches have; each level costs a stack frame.
MAX_DEPTH: Final = 32

Say = Callable[[int, str], None]
"""Takes a level of `logging` and a line."""


@dataclass(frozen=True)
class Order:
    """`action`: prepare, keep or purge."""

    action: str
    slot: int
    compiled: str
    """A folder below the slot's, or a link to a shared folder."""
    kind: str
    compiles: bool
    """False where the engine is configured to compile nothing."""
    now: float
    """Seconds since the epoch."""


def act(order: Order, say: Say) -> None:
    """Execute an order. A failure is only logged: the engine compiles for itself then."""
    compiled = Path(order.compiled)
    try:
        {"prepare": _prepare, "keep": _keep, "purge": _purge}[order.action](order, compiled, say)
    except (OSError, RecursionError) as error:
        what = {"prepare": "copy a", "keep": "stamp its", "purge": "empty its"}[order.action]
        why = getattr(error, "strerror", None) or "folders lie too deep"
        where = f" '{error.filename}'" if isinstance(error, OSError) and error.filename else ""
        say(logging.WARNING, f"slot {order.slot}: cannot {what} compile cache: {why}{where}")


def _prepare(order: Order, compiled: Path, say: Say) -> None:
    """Remove what was compiled for other versions or settings; copy a sibling's cache, or join its shared folder."""
    folder, found = compiled.parent, _stamped(compiled.parent)
    _forget_old_stacks(folder.parent, order.now, say)
    if found == order.kind:
        return
    if found is not None:
        say(logging.INFO, f"slot {order.slot}: compile cache of another model or other settings emptied")
        shutil.rmtree(folder, ignore_errors=True)
    source = next(_siblings(folder, order.kind), None)
    if source is not None:
        _copy(source, folder)
        say(logging.INFO, f"slot {order.slot}: compile cache copied from {source.name}")
    elif order.compiles:
        _join_shared(compiled, order.kind)
    _remove_unused_shared(compiled)


def _purge(order: Order, compiled: Path, say: Say) -> None:
    """Empty the cache of a slot. Others that compile in its shared folder continue; none joins them."""
    if compiled.is_symlink():
        with contextlib.suppress(OSError):  # the shared folder has been removed, too
            (compiled / DAMAGED).touch()
    shutil.rmtree(compiled.parent, ignore_errors=True)
    _remove_unused_shared(compiled)
    say(logging.INFO, f"slot {order.slot}: compile cache emptied")


def _keep(order: Order, compiled: Path, _say: Say) -> None:
    folder = compiled.parent
    if not folder.is_dir():
        return
    _leave_shared(compiled)
    fresh = folder / f".{STAMP}.{order.slot}"
    fresh.unlink(missing_ok=True)
    fresh.write_text(json.dumps({"kind": order.kind, "time": order.now}), encoding="utf-8")
    fresh.replace(folder / STAMP)
    _remove_unused_shared(compiled)


def _forget_old_stacks(stack: Path, now: float, say: Say) -> None:
    for other in stack.parent.iterdir() if stack.parent.is_dir() else ():
        stamps = list(other.glob(f"slot*/{STAMP}")) if other != stack and not other.is_symlink() else []
        if stamps and all(now - stamp.lstat().st_mtime > FORGOTTEN_S for stamp in stamps):
            say(logging.INFO, f"compile caches of {other.name} removed: nothing has used them for 30 days")
            shutil.rmtree(other, ignore_errors=True)


def _stamped(folder: Path) -> str | None:
    try:
        fd = os.open(folder / STAMP, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            return str(json.loads(file.read(STAMP_BYTES))["kind"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _siblings(folder: Path, wanted: str) -> Iterator[Path]:
    for other in sorted(folder.parent.glob("slot*")) if folder.parent.is_dir() else ():
        if other != folder and not other.is_symlink() and _stamped(other) == wanted:
            yield other


def _copy(source: Path, folder: Path) -> None:
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        _copy_tree(source, fresh, lambda _folder, names: _matching(names, "*.lock", "*.tmp", ".stamp*"))
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _copy_tree(
    source: Path, target: Path, left_out: Callable[[Path, list[str]], set[str]], depth: int = 0
) -> None:
    """Folders, files and links as they are, links never followed; neither sockets nor pipes nor devices.

    Of a mode the permissions alone (& 0777): under RestrictSUIDSGID= nothing gets a set-group-ID bit by chmod, and in
    a folder that has one the kernel gives it to new folders by itself (inode(7))."""
    if depth > MAX_DEPTH:
        raise RecursionError
    target.mkdir(mode=0o700 | stat.S_IMODE(source.lstat().st_mode) & 0o777)
    names = [entry.name for entry in os.scandir(source)]
    for name in set(names) - left_out(source, names):
        one, copy = source / name, target / name
        mode = one.lstat().st_mode
        if stat.S_ISLNK(mode):
            copy.symlink_to(one.readlink())
        elif stat.S_ISDIR(mode):
            _copy_tree(one, copy, left_out, depth + 1)
        elif stat.S_ISREG(mode):
            _copy_file(one, copy)


def _copy_file(source: Path, target: Path) -> None:
    fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as old, target.open("xb") as new:
        shutil.copyfileobj(old, new, 1 << 20)
        facts = os.fstat(fd)
        os.fchmod(new.fileno(), stat.S_IMODE(facts.st_mode) & 0o777)
        new.flush()
        os.utime(new.fileno(), ns=(facts.st_atime_ns, facts.st_mtime_ns))


def _join_shared(compiled: Path, wanted: str) -> None:
    """Files of earlier starts are used: compiling a large model takes minutes."""
    stack = compiled.parent.parent
    folders = (stack / f"{SHARED}-{wanted}-{number}" for number in itertools.count())
    shared = next(shared for shared in folders if not (shared / DAMAGED).exists())
    if compiled.is_symlink():
        compiled.unlink()
    shutil.rmtree(compiled, ignore_errors=True)
    shared.mkdir(parents=True, exist_ok=True)
    compiled.parent.mkdir(exist_ok=True)
    compiled.symlink_to(Path("..", shared.name))


def _leave_shared(compiled: Path) -> None:
    if not compiled.is_symlink():
        return
    shared = compiled.parent.parent / compiled.readlink().name
    fresh = compiled.with_name(f".{compiled.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        _copy_tree(shared, fresh, _unfinished)
        compiled.unlink()
        fresh.rename(compiled)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _remove_unused_shared(compiled: Path) -> None:
    stack = compiled.parent.parent
    used = {link.readlink().name for link in stack.glob(f"slot*/{compiled.name}") if link.is_symlink()}
    for shared in stack.glob(f"{SHARED}-*"):
        if shared.name not in used:
            shutil.rmtree(shared, ignore_errors=True)


def _unfinished(folder: Path, names: list[str]) -> set[str]:
    """Not copied: locks, and kernels that are being compiled."""
    found = _matching(names, "*.lock", "*.tmp", DAMAGED)
    locks = folder.parent / "locks"
    return found | {name for name in names if name.endswith(".so") and _held(locks / f"{name[:-3]}.lock")}


def _matching(names: list[str], *patterns: str) -> set[str]:
    return {name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)}


def _held(lock: Path) -> bool:
    """Whether a process holds Inductor's lock (torch/utils/_filelock.py: flock)."""
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return False


def to_argument(order: Order) -> str:
    """The ORDER argument of another process."""
    return json.dumps(asdict(order))


def main() -> int:
    """In the process that runs as the instances' user."""
    act(Order(**json.loads(sys.argv[1])), lambda level, text: print(json.dumps([level, text]), flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
