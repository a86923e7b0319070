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
from collections.abc import Callable, Collection, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Final

from msgspec import Struct

from launcher.base.address import UnixAddress
from launcher.base.background import Failures, persist
from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError, reason
from launcher.engines.base import MARK, Launch, Unwanted
from launcher.instances import container_processes
from launcher.instances.output import LineLimit, left_out_text
from launcher.instances.ports import Adopted, Exit

log = logging.getLogger("launcher.instances")

TMPDIR: Final = "TMPDIR"
SHIM: Final = Path(__file__).with_name("shim.py")
# Longer lines are cut: progress bars and tracebacks of generated code have no bounds.
MAX_LINE_BYTES: Final = 8192
# Lines of an instance that are handed on before the event loop does other work.
LINES_PER_TURN: Final = 50
# Between two reads, of at most 64 KiB each, of an instance that prints too much: it waits in its full pipe.
PAUSE_S: Final = 0.05
# For the last lines of an ended instance to arrive.
OUTPUT_END_S: Final = 2.0
# For a shim to report that it has started its instance: usually 30 ms, an interpreter without site packages.
START_S: Final = 60.0
# For processes of a killed shim to end after SIGKILL; one that takes longer sleeps in the kernel.
SWEEP_S: Final = 10.0
SWEEP_POLL_S: Final = 0.02
# Between two looks for the main process of a container that starts: each reads the environments of all processes.
FIND_S: Final = 0.5
# Between two looks whether a shim that was told to kill its instance can obey.
OBEYS_S: Final = 0.5
# Meant for the daemon only (sd_notify(3), sd_listen_fds(3)): children must not inherit it.
DAEMON_ONLY: Final = (
    "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES",
    # The collector's password, of the daemon's own traces. An engine that sends traces has it in engine.env.
    "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
)  # fmt: skip


# Characters that a socket's name within TMPDIR may take: of the 107 of its path (unix(7)), multiprocessing's
# "/pymp-XXXXXXXX/listener-XXXXXXXX" takes 32.
TEMPORARY_BYTES: Final = 107 - 32
# The plan binds threads, by the mask that they inherit and by the engine's own settings; inherited ones would silently bind
# them elsewhere. Operators set them in engine.env.
PLANNED_PREFIXES: Final = ("OMP_", "KMP_", "GOMP_")


def inherited(environ: Mapping[str, str], but: Collection[str] = ()) -> dict[str, str]:
    """The variables of the daemon that instances of any engine get; without those of `but`."""
    dropped = {*DAEMON_ONLY, *but}
    return {
        name: value
        for name, value in environ.items()
        if name not in dropped and not name.startswith(PLANNED_PREFIXES)
    }


def wanted(environ: Mapping[str, str], unwanted: Sequence[Unwanted]) -> dict[str, str]:
    """Those of `environ` that an engine's instances get."""
    return {
        name: value for name, value in environ.items() if not any(it.fits(name, value) for it in unwanted)
    }


def not_inherited(environ: Mapping[str, str], unwanted: Sequence[Unwanted]) -> tuple[str, ...]:
    """Warnings about variables that somebody set who may not know what the engine makes of them."""
    return tuple(
        each.warning.format(value=value)
        for each in unwanted
        for name, value in environ.items()
        if each.warning and each.fits(name, value)
    )


class DirectProcess:
    def __init__(self, pid: int, child: _Child, ended: asyncio.Task[Exit], inside: bytes | None) -> None:
        self._pid = pid if inside is None else None
        self._child = child
        self._ended = ended
        self._obeys: asyncio.TimerHandle | None = None
        """The next look whether the shim can obey."""
        self._finding = (
            None if inside is None else asyncio.create_task(self._find(inside), name="main process")
        )
        """Looks for a container's main process: the child here is the client, which is neither pinned nor the engine."""

    @property
    def pid(self) -> int | None:
        return self._pid

    async def _find(self, mark: bytes) -> None:
        while not self._ended.done():
            with contextlib.suppress(OSError):  # no descriptor to read /proc with
                if (found := await asyncio.to_thread(container_processes.main_pid, mark)) is not None:
                    self._pid = found
                    return
            await asyncio.sleep(FIND_S)

    async def wait(self) -> Exit:
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        self._order(b"T")

    def kill(self) -> None:
        self._order(b"K")
        if self._obeys is None:
            self._look()

    def leave(self) -> None:
        """A child does not outlive the daemon."""
        self.kill()

    def _order(self, order: bytes) -> None:
        if not self._ended.done():
            with contextlib.suppress(OSError, ValueError):  # it has just ended
                self._child.control.writing.write(order)

    def _look(self) -> None:
        """A shim that a signal has stopped reads no order. Its end kills the main process, and `follow` kills the rest."""
        if self._ended.done() or self._child.shim.returncode is not None:
            return
        self._obeys = asyncio.get_running_loop().call_later(OBEYS_S, self._look)
        if _is_stopped(shim := self._child.shim.pid):
            log.error(
                "slot %d: its shim (process %d) is stopped by a signal (SIGSTOP, or a debugger) and cannot end the "
                "instance: SIGKILL to the shim and its process tree",
                self._child.slot, shim, extra={"slot": self._child.slot},
            )  # fmt: skip
            with contextlib.suppress(ProcessLookupError):
                self._child.shim.kill()


class DirectSpawner:
    """Starts instances as children. `environ` is what they inherit, `allowed` the cpus that numactl may choose from; of
    these the kernel leaves out the offline ones."""

    def __init__(self, environ: Mapping[str, str], allowed: CpuSet) -> None:
        self._environ = inherited(environ)
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
                await container_processes.remove_left_over(container)
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
            container_processes.make_folders(launch.container)
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
                *(container_processes.for_shim(launch.container), *launch.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=wanted(self._environ, launch.unwanted) | temporary | dict(launch.own_env) | {MARK: mark},
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
        return DirectProcess(first, child, ended, inside)


class _Pipe:
    """Both ends of a pipe that no other child inherits."""

    def __init__(self) -> None:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        self.reading = os.fdopen(reading, "rb", buffering=0)
        self.writing = os.fdopen(writing, "wb", buffering=0)

    def close(self) -> None:
        self.reading.close()
        self.writing.close()


class _Child(Struct, frozen=True):
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
                    await container_processes.remove(self.launch.container)
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
        ended, message = container_processes.ended_inside(
            last or Exit(None, int(signal.SIGKILL)), self.launch
        )
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
    """Split a byte stream into lines; carriage returns of progress bars end lines, too. An instance that prints without
    end is read slowly, and most of its lines are left out."""
    clock = asyncio.get_running_loop().time
    limit, rest = LineLimit[bytes](clock()), b""
    while (chunk := await _read(stream, PAUSE_S if limit.holding else None)) != b"":
        *lines, rest = (rest + (chunk or b"")).replace(b"\r", b"\n").split(b"\n")
        rest = rest[:MAX_LINE_BYTES]
        await _tell(*limit.take(lines, clock()), on_line)
        if limit.holding:
            await asyncio.sleep(PAUSE_S)
    await _tell(*limit.rest(), on_line)
    await _tell(0, (rest,), on_line)


async def _read(stream: asyncio.StreamReader, within_s: float | None) -> bytes | None:
    """None: nothing came in time. Empty: it has ended."""
    try:
        async with asyncio.timeout(within_s):
            return await stream.read(65536)
    except TimeoutError:
        return None


async def _tell(left_out: int, lines: Sequence[bytes], on_line: Callable[[str], None]) -> None:
    if left_out:
        on_line(left_out_text(left_out))
    for piece in range(0, len(lines), LINES_PER_TURN):
        for line in lines[piece : piece + LINES_PER_TURN]:
            if line.strip():
                on_line(line[:MAX_LINE_BYTES].decode(errors="replace").rstrip())
        # Also after the last piece: the next read may find its bytes there and not wait.
        await asyncio.sleep(0)


async def _sweep(session: int, mark: str) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SWEEP_S):
            while left := _left_behind(session, f"{MARK}={mark}".encode()):
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(SWEEP_POLL_S)


def _is_stopped(pid: int) -> bool:
    """Whether a signal or a tracer has stopped a process (proc(5))."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return stat[stat.rindex(b")") + 2 :][:1] in {b"T", b"t"}
    return False


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
