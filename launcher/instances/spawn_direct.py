"""Instances as children of the daemon: development, containers, and hosts without systemd.

Each instance runs under a shim (shim.py), which guarantees that the whole process tree ends with it and
that no instance outlives the daemon, however the daemon ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from launcher.address import UnixAddress
from launcher.background import Failures, persist
from launcher.cpuset import CpuSet
from launcher.engines.base import MARK, Launch
from launcher.errors import LauncherError, reason
from launcher.instances import containers
from launcher.instances.ports import Adopted, Exit

log = logging.getLogger("launcher.instances")

TMPDIR: Final = "TMPDIR"
SHIM: Final = Path(__file__).with_name("shim.py")
# Longer lines are cut: progress bars and tracebacks of generated code have no bounds.
MAX_LINE_BYTES: Final = 8192
# For the last lines of an ended instance to arrive.
OUTPUT_END_S: Final = 2.0
# For a shim to report that it has started its instance: usually 30 ms, an interpreter without site packages.
START_S: Final = 60.0
# For processes of a killed shim to end after SIGKILL; one that takes longer sleeps in the kernel.
SWEEP_S: Final = 10.0
SWEEP_POLL_S: Final = 0.02
# Meant for the daemon only (sd_notify(3), sd_listen_fds(3)): children must not inherit it.
DAEMON_ONLY: Final = (
    "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES",
)  # fmt: skip


# Characters that a socket's name within TMPDIR may take: of the 107 of its path (unix(7)), multiprocessing's
# "/pymp-XXXXXXXX/listener-XXXXXXXX" takes 32.
TEMPORARY_BYTES: Final = 107 - 32
# The plan sets these; inherited ones would silently bind threads elsewhere. Operators set them in engine.env.
PLANNED_PREFIXES: Final = ("VLLM_CPU_", "OMP_", "KMP_", "GOMP_")


class DirectProcess:
    def __init__(self, pid: int, control: _Pipe, ended: asyncio.Task[Exit], inside: bytes | None) -> None:
        self._pid = pid
        self._control = control
        self._ended = ended
        self._inside = inside
        """The mark of the container until its main process is found; `pid` is that of the client."""

    @property
    def pid(self) -> int:
        with contextlib.suppress(OSError):  # no descriptor to read /proc with
            if self._inside is not None and (found := containers.main_pid(self._inside)) is not None:
                self._pid, self._inside = found, None
        return self._pid

    async def wait(self) -> Exit:
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        self._order(b"T")

    def kill(self) -> None:
        self._order(b"K")

    def leave(self) -> None:
        """A child does not outlive the daemon."""
        self.kill()

    def _order(self, order: bytes) -> None:
        if not self._ended.done():
            with contextlib.suppress(OSError, ValueError):  # it has just ended
                self._control.writing.write(order)


class DirectSpawner:
    """Starts instances as children. `environ` is what they inherit, `allowed` the cpus that numactl may choose from; of
    these the kernel leaves out the offline ones."""

    def __init__(self, environ: Mapping[str, str], allowed: CpuSet) -> None:
        self._environ = {
            name: value
            for name, value in environ.items()
            if name not in DAEMON_ONLY and not name.startswith(PLANNED_PREFIXES)
        }
        self._allowed = allowed
        self._tasks: set[asyncio.Task[Exit]] = set()

    async def spawn(
        self, slot: int, generation: int, launch: Launch, on_line: Callable[[str], None]
    ) -> DirectProcess:
        try:
            return await self._spawn(slot, generation, launch, on_line)
        except OSError as error:  # no folder for the socket, no process, no file descriptor, ...
            raise LauncherError(
                f"cannot start slot {slot}: {reason(error)}",
                "check the run folder, free memory, and the limits on processes and open files",
            ) from error

    async def adopt(self, slots: Mapping[int, Callable[[int], Launch]]) -> Mapping[int, Adopted]:
        """None: children do not outlive their daemon. Left-over containers are removed."""
        for launch in slots.values():
            if (container := launch(0).container) is not None:
                await containers.remove_left_over(container)
            break  # each launch names all containers of the daemon
        return {}

    async def keeps_instances(self) -> bool:
        return False

    async def close(self, *, for_good: bool) -> None: ...

    async def _spawn(
        self, slot: int, generation: int, launch: Launch, on_line: Callable[[str], None]
    ) -> DirectProcess:
        name = f"slot {slot}.{generation}"
        mark = f"{os.getpid()}.{slot}.{generation}.{os.urandom(8).hex()}"
        if launch.container is not None:
            containers.make_folders(launch.container)
        if isinstance(launch.address, UnixAddress):
            _prepare_socket(Path(launch.address.path))
        if launch.scratch is not None:
            _empty(Path(launch.scratch))
        temporary = _temporary_folder(slot, launch)
        with contextlib.ExitStack() as undo:
            control, report = _Pipe(), _Pipe()
            undo.callback(control.close)
            undo.callback(report.close)
            cpus = ",".join(str(cpu) for cpu in self._allowed)
            theirs = (control.reading.fileno(), report.writing.fileno())
            shim = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(SHIM), *map(str, theirs), cpus),
                *(containers.for_shim(launch.container), *launch.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environ | temporary | dict(launch.own_env) | {MARK: mark},
                pass_fds=theirs,
                start_new_session=True,
                # conmon notes a memory limit that was reached in a file "oom" where it stands (podman 4.3).
                cwd=launch.container.folders[0] if launch.container is not None else None,
            )
            control.reading.close()
            report.writing.close()
            reports, transport = await _reader(report.reading)
            undo.callback(transport.close)
            first = await _started_pid(reports, shim)
            # Until here, an error closes the pipes, which ends shim and instance.
            undo.pop_all()
        child = _Child(slot, shim, reports, transport, control, mark, launch, temporary.get(TMPDIR))
        ended = asyncio.create_task(child.follow(on_line), name=f"{name} output")
        self._tasks.add(ended)
        ended.add_done_callback(self._tasks.discard)
        inside = None if launch.container is None else f"{MARK}={mark}".encode()
        return DirectProcess(first, control, ended, inside)


class _Pipe:
    """Both ends of a pipe that no other child inherits."""

    def __init__(self) -> None:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        self.reading = os.fdopen(reading, "rb", buffering=0)
        self.writing = os.fdopen(writing, "wb", buffering=0)

    def close(self) -> None:
        self.reading.close()
        self.writing.close()


@dataclass(frozen=True, slots=True)
class _Child:
    slot: int
    shim: asyncio.subprocess.Process
    reports: asyncio.StreamReader
    transport: asyncio.BaseTransport
    """Of `reports`."""
    control: _Pipe
    mark: str
    launch: Launch
    temporary: str | None
    """Its own folder for temporary files, if any."""

    async def follow(self, on_line: Callable[[str], None]) -> Exit:
        """Pass on lines until the process tree has ended; return how the main process ended."""
        stdout = self.shim.stdout
        assert stdout is not None  # noqa: S101  stdout=PIPE above
        # An instance that writes into a full pipe blocks.
        output = asyncio.create_task(
            persist(lambda: _pump(stdout, on_line), self._failures("read its output")),
            name=f"output of {self.shim.pid}",
        )
        try:
            last = await persist(
                lambda: _reported_exit(self.reports, on_line), self._failures("wait for its exit")
            )
            if last is None:  # the shim itself was killed, and processes of the instance may be left
                await persist(
                    lambda: _sweep(self.shim.pid, self.mark), self._failures("kill the rest of its processes")
                )
                if self.launch.container is not None:
                    await containers.remove(self.launch.container)
            # All writers have ended, but for one that sleeps in the kernel: the deadline is for it. wait() of asyncio
            # also returns only after the last writer.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(OUTPUT_END_S):
                    await self.shim.wait()
                    await asyncio.wait({output})
        finally:
            output.cancel()
            self.control.close()
            self.transport.close()
            await asyncio.gather(output, return_exceptions=True)
        if isinstance(self.launch.address, UnixAddress):
            _remove(Path(self.launch.address.path))  # a killed instance leaves its socket
        for folder in (self.launch.scratch, self.temporary):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        ended, message = containers.ended_inside(last or Exit(None, int(signal.SIGKILL)), self.launch)
        if message is not None:
            on_line(message)
        return ended

    def _failures(self, what: str) -> Failures:
        return Failures(log, f"slot {self.slot}: {what}", slot=self.slot)


def _prepare_socket(path: Path) -> None:
    """Make the folder and remove an old socket, with which vLLM would fail with EADDRINUSE."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    path.unlink(missing_ok=True)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True, mode=0o750)


def _temporary_folder(slot: int, launch: Launch) -> dict[str, str]:
    """TMPDIR for an engine that leaves files there when it is killed, in the usual folder: vLLM's `vllm_dist_*`
    (vllm/utils/network_utils.py, get_file_store_init_method, 0.32). systemd's units have PrivateTmp=.

    Empty where the operator sets TMPDIR, where socket names would be too long, and where the folder can't be made.
    Folders of an earlier daemon with the same run folder are removed first."""
    if launch.scratch is None or launch.container is not None or TMPDIR in launch.env:
        return {}
    owner = hashlib.sha256(launch.scratch.encode()).hexdigest()[:8]
    prefix = f"numa-launcher-slot{slot}-{owner}-"
    for earlier in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if earlier.lstat().st_uid == os.geteuid():
                shutil.rmtree(earlier, ignore_errors=True)
    try:
        folder = tempfile.mkdtemp(prefix=prefix)
    except OSError:  # no usable folder for temporary files: the engine reports it
        return {}
    if len(folder.encode()) > TEMPORARY_BYTES:
        Path(folder).rmdir()
        return {}
    return {TMPDIR: folder}


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


async def _reader(pipe: FileIO) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    return reader, transport


async def _started_pid(reports: asyncio.StreamReader, shim: asyncio.subprocess.Process) -> int:
    """The pid of the instance that the shim has started. Raises ChildProcessError."""
    try:
        async with asyncio.timeout(START_S):
            first = (await reports.readline()).decode(errors="replace").strip()
    except TimeoutError:
        shim.kill()
        raise ChildProcessError(f"its shim did not start the instance within {START_S:.0f} s") from None
    if not first.startswith("pid "):
        raise ChildProcessError(
            f"its shim exited with {await shim.wait()} before it had started the instance"
        )
    return int(first.removeprefix("pid "))


async def _reported_exit(report: asyncio.StreamReader, on_line: Callable[[str], None]) -> Exit | None:
    ended: Exit | None = None
    async for raw in report:
        word, _, rest = raw.decode(errors="replace").strip().partition(" ")
        match word:
            case "exit":
                ended = Exit(code=int(rest), signal=None)
            case "signal":
                ended = Exit(code=None, signal=int(rest))
            case _:
                on_line(f"numa-launcher: cannot execute {rest}")
    return ended


async def _pump(stream: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
    """Split a byte stream into lines; carriage returns of progress bars end lines, too."""
    rest = b""
    while chunk := await stream.read(65536):
        *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            if line.strip():
                on_line(line[:MAX_LINE_BYTES].decode(errors="replace").rstrip())
        rest = rest[:MAX_LINE_BYTES]
    if rest.strip():
        on_line(rest.decode(errors="replace").rstrip())


async def _sweep(session: int, mark: str) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SWEEP_S):
            while left := _left_behind(session, f"{MARK}={mark}".encode()):
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(SWEEP_POLL_S)


def _left_behind(session: int, mark: bytes) -> list[int]:
    """Processes in the shim's session, or with its mark in their environment.

    Both are needed: vLLM's processes overwrite their environment (setproctitle) but stay in the session, others may
    leave the session but keep the environment they were started with."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            stat = (entry / "stat").read_bytes()
            state, _, _, in_session, *_ = stat[stat.rindex(b")") + 2 :].split()
            if state in {b"Z", b"X"}:
                continue
            if int(in_session) == session or mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found
