"""One measured process with its children: started, pinned, its CPU time and memory, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
END_S: Final = 5.0


class FailedError(Exception):
    """A process could not be measured; says why."""


class Process:
    """A process group of its own, its output in a file."""

    def __init__(
        self,
        argv: Sequence[str],
        log: Path,
        *,
        cpus: set[int] | None = None,
        env: Mapping[str, str] | None = None,
        pipe: bool = False,
    ) -> None:
        self.log = log
        full = [*(["taskset", "-c", ",".join(map(str, sorted(cpus)))] if cpus else []), *argv]
        with log.open("wb") as out:
            self.popen = subprocess.Popen(
                full,
                stdin=subprocess.PIPE if pipe else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else out,
                stderr=out,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self._gone: float = 0.0

    def pids(self) -> list[int]:
        """It and all that descend from it."""
        found, todo = [], [self.popen.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            with contextlib.suppress(OSError):
                for task in (PROC / str(pid) / "task").iterdir():
                    todo += [int(child) for child in (task / "children").read_text().split()]
        return found

    def cpu_s(self) -> float:
        """CPU time of it and its children so far: what /proc/PID/stat tells in hundredths, to the nanosecond.

        clock_getcpuclockid(3): the id of a process's clock is ~pid << 3 | CPUCLOCK_SCHED (2).
        """
        total = 0.0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                total += time.clock_gettime((~pid << 3) | 2)
        return total

    def rss_bytes(self) -> int:
        """Resident memory of all; what a child shares is counted once."""
        largest, others = 0, 0
        for pid in self.pids():
            with contextlib.suppress(OSError, ValueError):
                rows = (
                    line.split() for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
                )
                kb = {row[0]: int(row[1]) for row in rows}
                own = kb["Private_Clean:"] + kb["Private_Dirty:"]
                others += own
                largest = max(largest, kb["Rss:"] - own)
        return (largest + others) * 1024

    def forget_peak(self) -> None:
        """The peak of the memory is counted from now on."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                (PROC / str(pid) / "clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """The most resident memory since forget_peak, summed over all (VmHWM)."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError, IndexError):
                text = (PROC / str(pid) / "status").read_text()
                total += int(text.split("\nVmHWM:", 1)[1].split(None, 1)[0]) * 1024
        return total

    def check(self) -> None:
        """Raises FailedError when it has ended."""
        if self.popen.poll() is not None:
            raise FailedError(f"ended with {self.popen.returncode}: {self.last_words()}")

    def last_words(self) -> str:
        """The end of its output."""
        return self.log.read_text(errors="replace")[-1500:].strip()

    async def answers(self, port: int, path: str, wait_s: float, want: bytes = b"200") -> None:
        """Wait until GET `path` gives 200. Raises FailedError."""
        deadline = time.monotonic() + wait_s
        last = "no connection"
        while time.monotonic() < deadline:
            self.check()
            try:
                line = await status_line(port, path)
                if line[9:12] == want:
                    return
                last = repr(line)
            except (OSError, TimeoutError) as error:
                last = str(error) or last
            await asyncio.sleep(0.05)
        raise FailedError(f"GET {path}: {last} after {wait_s:.0f} s; {self.last_words()}")

    def end(self) -> None:
        """SIGTERM, then SIGKILL, to the whole group."""
        for number, patience in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, number)
            try:
                self.popen.wait(patience)
            except subprocess.TimeoutExpired:
                continue
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


async def status_line(port: int, path: str) -> bytes:
    """The first line of the response to GET `path`. Raises OSError, and TimeoutError after 2 s."""
    async with asyncio.timeout(2):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            writer.write(b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path.encode())
            return await reader.readline()


def free_port() -> int:
    """A port that was free a moment ago."""
    import socket  # noqa: PLC0415

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
