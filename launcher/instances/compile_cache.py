"""The slots' compile caches: one folder per slot; siblings of its kind start from a copy of it.

The folders of a stack of versions lie below its name (Stack.fingerprint), so code compiled for one never meets another;
each has a stamp, written when an engine has become ready with it, that names what it was compiled for
(engines.base.CompileCache).

Those of one kind that find nothing compiled compile together: the folder is a link to a shared one until the engine is
ready, then a copy of it. Inductor locks each kernel while it is compiled and takes one that is
there (torch/_inductor/codecache.py, _worker_compile_cpp, 2.13), as the ranks of one vLLM do: the first that needs it
compiles it, the others wait for it. The lock of one that dies goes with it. Blocking: called in threads.

What is done to files is done by cache_files, with the rights of the instances' user.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from launcher.base.errors import reason
from launcher.engines.base import Launch
from launcher.instances import cache_files
from launcher.instances.cache_files import Order

log = logging.getLogger("launcher.instances")

# For an order in another process: a cache of some GB is copied in a minute.
WORK_S: Final = 600.0


class CompileCaches:
    """Implements ports.Caches for launches that have a CompileCache.

    `become` is a command that runs the command after it as the instances' user; empty where they are our children."""

    def __init__(self, wall: Callable[[], float] = time.time, become: tuple[str, ...] = ()) -> None:
        self._wall = wall
        self._become = become
        self._lock = threading.Lock()
        """One thread at a time changes links and shared folders."""

    def prepare(self, slot: int, launch: Launch) -> None:
        self._do("prepare", slot, launch)

    def purge(self, slot: int, launch: Launch) -> None:
        self._do("purge", slot, launch)

    def keep(self, slot: int, launch: Launch) -> None:
        self._do("keep", slot, launch)

    def _do(self, action: str, slot: int, launch: Launch) -> None:
        if (cache := launch.cache) is None:
            return
        order = Order(action, slot, cache.folder, cache.kind, cache.compiles, self._wall())

        def say(level: int, text: str) -> None:
            log.log(level, "%s", text, extra={"slot": slot})

        with self._lock:
            if self._become:
                _elsewhere(self._become, order, say)
            else:
                cache_files.act(order, say)


def _elsewhere(become: tuple[str, ...], order: Order, say: cache_files.Say) -> None:
    """Execute an order in a process of the instances' user; a failure is a warning.

    The module's text is passed by a pipe: that user may not be able to read the folder of this program."""
    python = str(Path(sys.executable).resolve())
    try:
        done = subprocess.run(
            [*become, python, "-I", "-S", "-", cache_files.to_argument(order)],
            input=Path(cache_files.__file__).read_bytes(), capture_output=True, check=False, timeout=WORK_S, cwd="/",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        why = reason(error) if isinstance(error, OSError) else f"not done after {WORK_S:.0f} s"
        say(
            logging.WARNING, f"slot {order.slot}: cannot {order.action} its compile cache: {become[0]}: {why}"
        )
        return
    for line in done.stdout.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError):
            level, text = json.loads(line)
            say(level, text)
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [
            f"exit code {done.returncode}"
        ]
        say(logging.WARNING, f"slot {order.slot}: cannot {order.action} its compile cache: {last[0]}")
