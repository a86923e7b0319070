"""The shim of one instance on hosts without cgroups: no process of the instance outlives it.

Run as ``python -I -S shim.py CONTROL_FD REPORT_FD CPULIST CONTAINER ARGV...`` by spawn_direct, one per
instance. It imports the standard library only and stays small (about 9 MB).

1. It is a child subreaper, so every orphan of the instance becomes its child: vLLM's EngineCore
   and workers survive a SIGKILL of their API server (vllm#55510).
2. The main process gets SIGKILL when the shim dies (PR_SET_PDEATHSIG survives exec).
3. CONTROL_FD is a pipe from the daemon: ``T`` is SIGTERM to the main process, ``K`` is SIGKILL to
   the whole tree, and end of file, after which no daemon is left, means ``K``.
4. When the main process ends, the rest of the tree is killed; then the shim reports the exit on
   REPORT_FD and exits. REPORT_FD's lines: ``pid N``, then ``exit CODE`` or ``signal N``, or ``error TEXT``.
5. CPULIST (ids joined by commas) is the affinity the main process starts with, so that numactl may
   choose from all allowed cpus even where the daemon itself is pinned to the reserved ones.
6. CONTAINER is empty, or JSON where ARGV is a container's client and the container is no child of the shim: two
   commands, one that prints how the container ended, one that kills and removes it. The second is run before
   ARGV, at ``K``, and at the end.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# For podman or docker to answer; a machine that is short of memory or disk takes seconds.
CLIENT_S = 60.0


def main() -> int:
    """Start the instance and wait for its end. Returns the shim's own exit code, 0."""
    control, report = int(sys.argv[1]), int(sys.argv[2])
    cpus = {int(cpu) for cpu in sys.argv[3].split(",") if cpu}
    last_word, remove = json.loads(sys.argv[4]) if sys.argv[4] else ([], [])
    argv = sys.argv[5:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        # uvloop, unlike subprocess, hands on whatever the daemon was given. The folder's own is closed already.
        if fd > 2 and fd not in {control, report}:
            with contextlib.suppress(OSError):
                os.close(fd)
    os.set_inheritable(control, False)
    os.set_inheritable(report, False)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # only the daemon, through the pipe, ends an instance
    _run(remove)
    shim = os.getpid()
    child = os.fork()
    if child == 0:
        _become(libc, shim, cpus, argv, report)
    status = _keep(child, control, wake_read, remove)
    _run(last_word, speaks=True)
    _run(remove)
    _kill_tree()
    code = os.waitstatus_to_exitcode(status)
    _say(report, f"exit {code}" if code >= 0 else f"signal {-code}")
    return 0


def _become(libc: ctypes.CDLL, shim: int, cpus: set[int], argv: list[str], report: int) -> NoReturn:
    """In the child: die with the shim, take the allowed cpus, default signals, exec."""
    try:
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != shim:
            os._exit(1)
        _say(report, f"pid {os.getpid()}")  # reported here, so that it precedes an error
        signal.set_wakeup_fd(-1)
        # The last two are ignored by every Python, and exec would pass that on.
        for name in ("INT", "TERM", "HUP", "CHLD", "PIPE", "XFSZ"):
            signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_DFL)
        if cpus:
            os.sched_setaffinity(0, cpus)
        os.execvp(argv[0], argv)  # noqa: S606
    except OSError as error:
        _say(report, f"error {argv[0]}: {error.strerror}")
    os._exit(127)


def _run(argv: list[str], *, speaks: bool = False) -> None:
    """Run a command to its end, or kill it when that takes too long. `speaks`: its output is the instance's."""
    if not argv:
        return
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 2) if speaks else (0, 1, 2):
            os.dup2(nothing, fd)
        with contextlib.suppress(OSError):
            os.execv(argv[0], argv)  # noqa: S606
        os._exit(127)
    deadline = time.monotonic() + CLIENT_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        select.select([], [], [], 0.01)


def _keep(child: int, control: int, wake: int, remove: list[str]) -> int:
    """Reap and obey until the main process has ended. Returns its wait status."""
    listening = [control, wake]
    while True:
        readable, _, _ = select.select(listening, [], [])
        if wake in readable:
            os.read(wake, 4096)
        if control in readable:
            order = os.read(control, 1)
            if not order:
                listening.remove(control)
            if order == b"T":
                os.kill(child, signal.SIGTERM)  # not reaped yet, so the pid is still its own
            else:
                _run(remove)
                _signal_tree()
        status = _reap(child)
        if status is not None:
            return status


def _reap(child: int) -> int | None:
    """Collect every dead child. Returns the main process's status once it is among them."""
    found: int | None = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status


def _kill_tree() -> None:
    """SIGKILL whatever is left, until nothing is. New orphans arrive here, so the loop ends."""
    while True:
        _signal_tree()
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            select.select([], [], [], 0.01)


def _signal_tree() -> None:
    """SIGKILL to every descendant, found by parent links."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    stat = file.read()
            except OSError:
                continue
            # The second field is the name in parentheses and may hold anything; the 4th is the parent.
            parents[int(name)] = int(stat[stat.rindex(b")") + 2 :].split()[1])
    # Parents first: the main process would exit with a code of its own if it saw a child die before.
    tree = generation = {os.getpid()}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation and pid not in tree}
        tree = tree | generation
        for pid in generation:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue


def _say(report: int, line: str) -> None:
    try:
        os.write(report, line.encode() + b"\n")
    except OSError:
        return  # the daemon is gone


if __name__ == "__main__":
    sys.exit(main())
