"""The slots' compile caches: one folder a slot; what one has compiled, the others of its kind start from a copy of.

Instances that share vLLM's own cache clobber each other (vllm#24601, #18851), so VLLM_CACHE_ROOT is never shared. The
folders of a stack of versions lie below its name (engines.stack.Stack.fingerprint), so code compiled for one never meets
another; each has a stamp, written when an engine has come up with it, that says what it was compiled for.

Those of one kind that find nothing compiled compile together: TORCHINDUCTOR_CACHE_DIR is a link to a workshop until
the engine has come up, then a copy of the workshop. Inductor locks each kernel while it is compiled and takes one that is
there (torch/_inductor/codecache.py, _worker_compile_cpp, 2.13), as the ranks of one vLLM do: the first that needs it
compiles it, the others wait for it. The lock of one that dies goes with it. Blocking: called in threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from launcher.engines.base import Launch

log = logging.getLogger("launcher.instances")

STAMP: Final = "stamp.json"
# Folders of other stacks that no engine has come up with for so long are removed.
FORGOTTEN_S: Final = 30 * 86400.0

# vLLM's word for compiling nothing.
EAGER: Final = "--enforce-eager"

WORKSHOP: Final = "workshop"
# In a workshop: somebody has met a broken file in it, and whoever starts from now on uses another one.
DAMAGED: Final = "damaged"

# What tells one slot's launch from its siblings', and has no part in what is compiled.
_PLACE: Final = ("--physcpubind", "--membind", "--preferred", "--interleave", "--cpunodebind")
_OWN: Final = frozenset(
    {
        "VLLM_CACHE_ROOT",
        "VLLM_RPC_BASE_PATH",
        "TORCHINDUCTOR_CACHE_DIR",
        "VLLM_CPU_OMP_THREADS_BIND",
        "LD_PRELOAD",
    }
)


class CompileCaches:
    """Implements ports.Caches for engines that compile into TORCHINDUCTOR_CACHE_DIR and VLLM_CACHE_ROOT."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._lock = threading.Lock()
        """Links, and the workshops that they lead to, are changed by one thread at a time."""

    def prepare(self, slot: int, launch: Launch) -> None:
        """Remove what was compiled for something else; copy what a sibling has, or compile with those of its kind."""
        folder = _folder(launch)
        if folder is None:
            return
        wanted, found = _kind(launch), _stamped(folder)
        try:
            with self._lock:
                self._forget_old_stacks(folder.parent)
                if found is not None and found != wanted:
                    log.info(
                        "slot %d: its compile cache is another model's or setting's: emptied",
                        slot,
                        extra={"slot": slot},
                    )
                    shutil.rmtree(folder, ignore_errors=True)
                if found == wanted:
                    return
                source = next(_siblings(folder, wanted), None)
                if source is not None:
                    _copy(source, folder)
                    log.info("slot %d: compile cache copied from %s", slot, source.name, extra={"slot": slot})
                elif EAGER not in launch.argv:
                    _join_workshop(_compiled(launch), wanted)
                _sweep_workshops(_compiled(launch))
        except OSError as error:  # it compiles for itself then
            log.warning("slot %d: cannot copy a compile cache: %s", slot, error, extra={"slot": slot})

    def purge(self, slot: int, launch: Launch) -> None:
        """Empty a slot's. Those that compile where it did go on; nobody joins them."""
        folder = _folder(launch)
        if folder is None:
            return
        with self._lock:
            if _compiled(launch).is_symlink():
                with contextlib.suppress(OSError):  # the workshop is gone too
                    (_compiled(launch) / DAMAGED).touch()
            shutil.rmtree(folder, ignore_errors=True)
            _sweep_workshops(_compiled(launch))
        log.info("slot %d: compile cache emptied", slot, extra={"slot": slot})

    def keep(self, slot: int, launch: Launch) -> None:
        """An engine has come up with it: it becomes the slot's own, and others may start from a copy."""
        folder = _folder(launch)
        if folder is None or not folder.is_dir():
            return
        try:
            with self._lock:
                _leave_workshop(_compiled(launch))
                fresh = folder / f".{STAMP}.{slot}"
                fresh.write_text(json.dumps({"kind": _kind(launch), "time": self._wall()}), encoding="utf-8")
                fresh.replace(folder / STAMP)
                _sweep_workshops(_compiled(launch))
        except OSError as error:
            log.warning("slot %d: cannot stamp its compile cache: %s", slot, error, extra={"slot": slot})

    def _forget_old_stacks(self, stack: Path) -> None:
        for other in stack.parent.iterdir() if stack.parent.is_dir() else ():
            stamps = list(other.glob(f"slot*/{STAMP}")) if other != stack else []
            if stamps and all(self._wall() - stamp.stat().st_mtime > FORGOTTEN_S for stamp in stamps):
                log.info("compile caches of %s removed: nothing has used them for 30 days", other.name)
                shutil.rmtree(other, ignore_errors=True)


def _folder(launch: Launch) -> Path | None:
    """The slot's folder, by the two variables that point into it; None where they do not lie in one."""
    compiled, root = launch.env.get("TORCHINDUCTOR_CACHE_DIR"), launch.env.get("VLLM_CACHE_ROOT")
    if compiled is None or root is None or Path(compiled).parent != Path(root).parent:
        return None
    folder = Path(compiled).parent
    return folder if folder.name.startswith("slot") else None


def _compiled(launch: Launch) -> Path:
    """Where Inductor compiles: a folder, or a link to a workshop."""
    return Path(launch.env["TORCHINDUCTOR_CACHE_DIR"])


def _kind(launch: Launch) -> str:
    """Names what is compiled: the engine's arguments and settings, and the number of threads of each rank."""
    words, skip = [], False
    command = launch.argv if launch.container is None else launch.container.command
    argv = command[3:] if Path(command[0]).name == "taskset" else command  # taskset -c LIST
    for word in argv:
        if skip or word.startswith(_PLACE):
            skip = False
        elif word in {"--uds", "--port"}:
            skip = True
        else:
            words.append(word)
    settings = sorted((k, v) for k, v in launch.env.items() if k not in _OWN and k not in launch.secrets)
    threads = [_count(cpus) for cpus in launch.env.get("VLLM_CPU_OMP_THREADS_BIND", "").split("|")]
    return hashlib.sha256(json.dumps([words, settings, threads]).encode()).hexdigest()[:32]


def _count(cpus: str) -> int:
    """Cpus of a list such as 0-3,8. What is no list (auto, nobind) counts as none."""
    total = 0
    with contextlib.suppress(ValueError):
        for part in cpus.split(","):
            first, _, last = part.partition("-")
            total += int(last or first) - int(first) + 1
    return total


def _stamped(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / STAMP).read_text(encoding="utf-8"))["kind"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _siblings(folder: Path, wanted: str) -> Iterator[Path]:
    """Folders of other slots that hold what is wanted."""
    for other in sorted(folder.parent.glob("slot*")) if folder.parent.is_dir() else ():
        if other != folder and _stamped(other) == wanted:
            yield other


def _copy(source: Path, folder: Path) -> None:
    """The whole folder or nothing, the stamp with it: half of a copy would never be completed."""
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        shutil.copytree(
            source, fresh, symlinks=True, ignore=shutil.ignore_patterns("*.lock", "*.tmp", ".stamp*")
        )
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _join_workshop(compiled: Path, wanted: str) -> None:
    """What earlier starts left there is used: compiling a large model again takes minutes."""
    stack = compiled.parent.parent
    shops = (stack / f"{WORKSHOP}-{wanted}-{number}" for number in itertools.count())
    shop = next(shop for shop in shops if not (shop / DAMAGED).exists())
    if compiled.is_symlink():
        compiled.unlink()
    shutil.rmtree(compiled, ignore_errors=True)
    shop.mkdir(parents=True, exist_ok=True)
    compiled.parent.mkdir(exist_ok=True)
    compiled.symlink_to(Path("..", shop.name))


def _leave_workshop(compiled: Path) -> None:
    """With a copy of what is ready there."""
    if not compiled.is_symlink():
        return
    fresh = compiled.with_name(f".{compiled.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        shutil.copytree(compiled.resolve(), fresh, symlinks=True, ignore=_unfinished)
        compiled.unlink()
        fresh.rename(compiled)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _sweep_workshops(compiled: Path) -> None:
    """Remove those that no slot's link leads to any more."""
    stack = compiled.parent.parent
    used = {link.readlink().name for link in stack.glob(f"slot*/{compiled.name}") if link.is_symlink()}
    for shop in stack.glob(f"{WORKSHOP}-*"):
        if shop.name not in used:
            shutil.rmtree(shop, ignore_errors=True)


def _unfinished(folder: str, names: list[str]) -> set[str]:
    """What is not worth copying: locks, and kernels that another one is compiling at this moment."""
    found = set(shutil.ignore_patterns("*.lock", "*.tmp", DAMAGED)(folder, names))
    locks = Path(folder).parent / "locks"
    return found | {name for name in names if name.endswith(".so") and _held(locks / f"{name[:-3]}.lock")}


def _held(lock: Path) -> bool:
    """Whether a process holds Inductor's lock (torch/utils/_filelock.py: flock)."""
    with contextlib.suppress(FileNotFoundError), lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
