"""Instances as children of the daemon: development, containers, and hosts without systemd.

Each instance runs under a shim (shim.py), which guarantees that the whole tree ends with it and
that no instance outlives the daemon, whatever ends the daemon.
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

# A line longer than this is cut: progress bars and tracebacks of generated code know no bounds.
MAX_LINE_BYTES: Final = 8192

# For the last lines of a dead instance to arrive.
OUTPUT_END_S: Final = 2.0

# For a shim to say that it has started its instance: an interpreter without site packages, so 30 ms or so.
START_S: Final = 60.0

# For what a killed shim left to be gone after SIGKILL; what takes longer sleeps in the kernel.
SWEEP_S: Final = 10.0
SWEEP_POLL_S: Final = 0.02

# What systemd tells the daemon alone (sd_notify(3), sd_listen_fds(3): children are not to inherit it).
DAEMON_ONLY: Final = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
)


# Characters that a socket's name within TMPDIR may take: of the 107 of its path (unix(7)), multiprocessing's
# "/pymp-XXXXXXXX/listener-XXXXXXXX" takes 32.
TEMPORARY_BYTES: Final = 107 - 32

# The plan decides these; what the daemon's own environment says of them would bind threads elsewhere in silence.
# An operator's word on them is engine.env.
PLANNED_PREFIXES: Final = ("VLLM_CPU_", "OMP_", "KMP_", "GOMP_")


class DirectProcess:
    """An instance under its shim."""

    def __init__(self, pid: int, control: _Pipe, ended: asyncio.Task[Exit], inside: bytes | None) -> None:
        self._pid = pid
        self._control = control
        self._ended = ended
        self._inside = inside
        """The mark of the container that `pid` is a client of, until its own main process is found."""

    @property
    def pid(self) -> int:
        """The engine's main process; a container's client while the container is not there yet."""
        with contextlib.suppress(OSError):  # no descriptor to read /proc with
            if self._inside is not None and (found := containers.main_pid(self._inside)) is not None:
                self._pid, self._inside = found, None
        return self._pid

    async def wait(self) -> Exit:
        """Return when the tree is gone."""
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        """SIGTERM to the main process."""
        self._order(b"T")

    def kill(self) -> None:
        """SIGKILL to the whole tree."""
        self._order(b"K")

    def leave(self) -> None:
        """A child does not outlive the daemon."""
        self.kill()

    def _order(self, order: bytes) -> None:
        if not self._ended.done():
            with contextlib.suppress(OSError, ValueError):  # it ended this moment
                self._control.writing.write(order)


class DirectSpawner:
    """Starts instances as children. `environ` is what they inherit; `allowed` the cpus numactl may choose from
    (those that are offline when an instance starts are left out of them by the kernel)."""

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
        """Start `launch`. Raises LauncherError when its shim can't be started."""
        try:
            return await self._spawn(slot, generation, launch, on_line)
        except OSError as error:  # no folder for the socket, no process, no file descriptor, ...
            raise LauncherError(
                f"cannot start slot {slot}: {reason(error)}",
                "check the run folder, free memory, and the limits on processes and open files",
            ) from error

    async def adopt(self, slots: Mapping[int, Callable[[int], Launch]]) -> Mapping[int, Adopted]:
        """Nothing: children do not outlive their daemon, and containers that did are removed."""
        for launch in slots.values():
            if (container := launch(0).container) is not None:
                await containers.remove_left_over(container)
            break  # all of one daemon's
        return {}

    async def keeps_instances(self) -> bool:
        """Never."""
        return False

    async def close(self, *, for_good: bool) -> None:
        """Nothing is held."""

    async def _spawn(
        self, slot: int, generation: int, launch: Launch, on_line: Callable[[str], None]
    ) -> DirectProcess:
        name = f"slot {slot}.{generation}"
        mark = f"{os.getpid()}.{slot}.{generation}.{os.urandom(8).hex()}"
        if launch.container is not None:
            containers.make_folders(launch.container)
        if isinstance(launch.address, UnixAddress):
            _make_way(Path(launch.address.path))
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
            words, transport = await _reader(report.reading)
            undo.callback(transport.close)
            first = await _first_word(words, shim)
            # From here on end of file is not ours to give; before, it ended shim and instance.
            undo.pop_all()
        instance = _Life(slot, shim, words, transport, control, mark, launch, temporary.get(TMPDIR))
        ended = asyncio.create_task(instance.follow(on_line), name=f"{name} output")
        self._tasks.add(ended)
        ended.add_done_callback(self._tasks.discard)
        inside = None if launch.container is None else f"{MARK}={mark}".encode()
        return DirectProcess(first, control, ended, inside)


class _Pipe:
    """Both ends of a pipe that no other child inherits. Closing twice is no error."""

    def __init__(self) -> None:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        self.reading = os.fdopen(reading, "rb", buffering=0)
        self.writing = os.fdopen(writing, "wb", buffering=0)

    def close(self) -> None:
        """Close what is still open of it."""
        self.reading.close()
        self.writing.close()


@dataclass(frozen=True, slots=True)
class _Life:
    """What is held for one instance until its tree is gone."""

    slot: int
    shim: asyncio.subprocess.Process
    words: asyncio.StreamReader
    transport: asyncio.BaseTransport
    """Of `words`."""
    control: _Pipe
    mark: str
    launch: Launch
    temporary: str | None
    """Its folder for temporary files, where it has one of its own."""

    async def follow(self, on_line: Callable[[str], None]) -> Exit:
        """Pass lines on until the tree is gone, then say how the main process ended."""
        stdout = self.shim.stdout
        assert stdout is not None  # noqa: S101  stdout=PIPE above
        # Nobody else reads the pipe: an instance that writes into a full one stands still.
        output = asyncio.create_task(
            persist(lambda: _pump(stdout, on_line), self._failures("read its output")),
            name=f"output of {self.shim.pid}",
        )
        try:
            last = await persist(
                lambda: _last_words(self.words, on_line), self._failures("wait for its exit")
            )
            if last is None:  # the shim itself was killed, and can't vouch for the tree
                await persist(
                    lambda: _sweep(self.shim.pid, self.mark),
                    self._failures("look for what is left of its processes"),
                )
                if self.launch.container is not None:
                    await containers.remove(self.launch.container)
            # All writers are dead; the deadline is for one that sleeps in the kernel. asyncio's wait() is not over
            # before they have gone either.
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
        ended, said = containers.ended_inside(last or Exit(None, int(signal.SIGKILL)), self.launch)
        if said is not None:
            on_line(said)
        return ended

    def _failures(self, what: str) -> Failures:
        return Failures(log, f"slot {self.slot}: {what}", slot=self.slot)


def _make_way(path: Path) -> None:
    """The folder of an instance's socket, and no socket in it: an old one makes vLLM die with EADDRINUSE."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    path.unlink(missing_ok=True)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True, mode=0o750)


def _temporary_folder(slot: int, launch: Launch) -> dict[str, str]:
    """TMPDIR for an engine that leaves files there when it is killed, in the folder where they would lie otherwise: vLLM's
    `vllm_dist_*` (vllm/utils/network_utils.py, get_file_store_init_method, 0.32). systemd's units have PrivateTmp=.

    Empty where the operator names a folder, where names of sockets in ours would be too long, and where it can't be made.
    What an earlier daemon with the same run folder left, killed with its instances, goes first.
    """
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
    except OSError:  # no folder for temporary files at all: the engine says what it makes of that
        return {}
    if len(folder.encode()) > TEMPORARY_BYTES:
        Path(folder).rmdir()
        return {}
    return {TMPDIR: folder}


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


async def _reader(pipe: FileIO) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    """A stream over a pipe's reading end, and its transport, which owns the pipe from then on."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    return reader, transport


async def _first_word(words: asyncio.StreamReader, shim: asyncio.subprocess.Process) -> int:
    """The pid of the instance that the shim has started. Raises ChildProcessError."""
    try:
        async with asyncio.timeout(START_S):
            first = (await words.readline()).decode(errors="replace").strip()
    except TimeoutError:
        shim.kill()
        raise ChildProcessError(f"its shim did not start the instance within {START_S:.0f} s") from None
    if not first.startswith("pid "):
        raise ChildProcessError(
            f"its shim exited with {await shim.wait()} before it had started the instance"
        )
    return int(first.removeprefix("pid "))


async def _last_words(report: asyncio.StreamReader, on_line: Callable[[str], None]) -> Exit | None:
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
    """Cut a byte stream into lines; carriage returns of progress bars count as line ends."""
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
    """SIGKILL what a killed shim left, until nothing is left of it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SWEEP_S):
            while left := _left_behind(session, f"{MARK}={mark}".encode()):
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(SWEEP_POLL_S)


def _left_behind(session: int, mark: bytes) -> list[int]:
    """Living processes in the shim's session, or with its mark in their environment.

    Both are needed: vLLM's processes overwrite their environment (setproctitle) but stay in the
    session, others may leave the session but keep the environment they were started with.
    """
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
