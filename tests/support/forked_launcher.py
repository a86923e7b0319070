"""`numa-launcher` as a process of its own that need not import the daemon first: one process has, and forks the others.

The import takes most of the CPU time of a start. What runs is the same from `launcher.cli.main` on; tests of the start
itself begin an interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

import launcher

# What `serve`, `fleet ingress` and `dashboard` import before they do anything.
IMPORTED = (
    "uvloop", "launcher.cli.serve", "launcher.cli.fleet", "launcher.cli.dashboard", "launcher.daemon.container_init",
    "launcher.daemon.process", "launcher.daemon.deployment", "launcher.daemon.main", "launcher.daemon.measured",
    "launcher.daemon.waiting",
)  # fmt: skip
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
MOST_BYTES = 1 << 20  # of a request: words and environment


def begin(
    words: Sequence[str],
    log: IO[bytes],
    environ: Mapping[str, str] | None = None,
    program: Sequence[str] = (),
) -> LauncherProcess | subprocess.Popen[bytes]:
    """`numa-launcher WORDS` without standard input, and with `log` for its output. `program`: the words after Python's own
    name, for another program with its verbs. An LD_PRELOAD that is not this process's own needs a new interpreter."""
    environ = os.environ if environ is None else environ
    if not program and environ.get("LD_PRELOAD") != os.environ.get("LD_PRELOAD"):
        program = ("-m", "launcher")
    if not program:
        return LauncherProcess(words, log, environ)
    argv = [sys.executable, *program, *words]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ)


class LauncherProcess:
    """A child of this process, like those of subprocess.Popen."""

    def __init__(self, words: Sequence[str], log: IO[bytes], environ: Mapping[str, str]) -> None:
        self.words = list(words)
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self.pid = _source().fork(self.words, log, environ)

    def poll(self) -> int | None:
        """Its exit code, or less than 0: the signal that ended it. None: it runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The same, once it has ended. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            end = os.pidfd_open(self.pid)
            try:
                ended, _, _ = select.select([end], [], [], timeout)
            finally:
                os.close(end)
            if not ended:
                raise subprocess.TimeoutExpired(self.words, timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Source:
    """The process that has imported everything; it ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # -P: modules beside this file have names that others have, too.
        words = [sys.executable, "-P", __file__, str(theirs.fileno())]
        path = os.pathsep.join([str(Path(launcher.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        with theirs:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": path},
            )

    def fork(self, words: Sequence[str], log: IO[bytes], environ: Mapping[str, str]) -> int:
        """The pid of a new child of this process."""
        asked = json.dumps({"words": list(words), "folder": str(Path.cwd()), "environ": dict(environ)})
        with self._lock, _adopting():
            socket.send_fds(self._link, [asked.encode()], [log.fileno()])
            pid = self._link.recv(64)
        assert pid, "the process that imports the launcher has ended; its standard error says why"
        return int(pid)


@functools.cache
def _source() -> Source:
    return Source()


def is_source(pid: int) -> bool:
    """Whether this is the process that has imported everything: it stays until the end."""
    return bool(_source.cache_info().currsize) and _source().process.pid == pid


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Whose parent ends meanwhile is this process's child."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert not prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _answer_requests(link: socket.socket) -> None:
    """Forks a process for each, until nobody can ask any more."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while True:
        asked, logs, _, _ = socket.recv_fds(link, MOST_BYTES, 1)
        if not asked:
            return
        told, tell = os.pipe()
        if not (between := os.fork()):
            between = os.getpid()
            if child := os.fork():
                os.write(tell, b"%d" % child)
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            link.detach()
            _become(*logs, **json.loads(asked))
        os.waitpid(between, 0)
        link.send(os.read(told, 64))
        for descriptor in (told, tell, *logs):
            os.close(descriptor)


def _become(log: int, words: list[str], folder: str, environ: dict[str, str]) -> NoReturn:
    """The interpreter as it begins, but for what is imported."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    time.tzset()
    sys.argv = ["numa-launcher", *words]
    from launcher.cli import main  # noqa: PLC0415  only here

    sys.exit(main())


if __name__ == "__main__":
    _answer_requests(socket.socket(fileno=int(sys.argv[1])))
