"""The slots' compile caches: one folder a slot; what one has compiled, the others of its kind start from a copy of.

Instances that share one folder clobber each other (vllm#24601, #18851). The folders of a stack of versions lie below
its name (engines.stack.Stack.fingerprint), so code compiled for one never meets another; each has a stamp, written when
an engine has come up with it, that says what it was compiled for. Blocking: called in threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from launcher.engines.base import Launch

log = logging.getLogger("launcher.instances")

STAMP: Final = "stamp.json"
# Folders of other stacks that no engine has come up with for so long are removed.
FORGOTTEN_S: Final = 30 * 86400.0

# vLLM's word for compiling nothing: nobody needs to wait for a copy of that.
EAGER: Final = "--enforce-eager"

# What tells one slot's launch from its siblings', and has no part in what is compiled.
_PLACE: Final = ("--physcpubind", "--membind", "--preferred", "--interleave", "--cpunodebind")
_OWN: Final = frozenset(
    {"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CPU_OMP_THREADS_BIND", "LD_PRELOAD"}
)


class CompileCaches:
    """Implements ports.Caches for engines that compile into TORCHINDUCTOR_CACHE_DIR and VLLM_CACHE_ROOT."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall

    def warm(self, slot: int, launch: Launch) -> bool:  # noqa: ARG002
        """Whether this start finds everything compiled: in its own folder, or in one of its kind's, or has nothing to."""
        folder = _folder(launch)
        if folder is None or EAGER in launch.argv:
            return True
        wanted = _kind(launch)
        return _stamped(folder) == wanted or next(_siblings(folder, wanted), None) is not None

    def prepare(self, slot: int, launch: Launch) -> None:
        """Remove what was compiled for something else, and copy what a sibling has."""
        folder = _folder(launch)
        if folder is None:
            return
        wanted, found = _kind(launch), _stamped(folder)
        try:
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
        except OSError as error:  # it compiles for itself then
            log.warning("slot %d: cannot copy a compile cache: %s", slot, error, extra={"slot": slot})

    def purge(self, slot: int, launch: Launch) -> None:
        """Empty a slot's."""
        folder = _folder(launch)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            log.info("slot %d: compile cache emptied", slot, extra={"slot": slot})

    def keep(self, slot: int, launch: Launch) -> None:
        """An engine has come up with it: others may start from a copy."""
        folder = _folder(launch)
        if folder is None or not folder.is_dir():
            return
        try:
            fresh = folder / f".{STAMP}.{slot}"
            fresh.write_text(json.dumps({"kind": _kind(launch), "time": self._wall()}), encoding="utf-8")
            fresh.replace(folder / STAMP)
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
