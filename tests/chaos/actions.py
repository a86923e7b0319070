"""Operator actions and injected hangs during a chaos run, and samples of the daemon's status."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, Final

import psutil

from launcher.base.errors import LauncherError
from launcher.control.client import ControlClient

# An accepted restart has ended by then: drain_timeout_s, stop_timeout_s (main.CONFIG), a start, and crashes in between.
RESTARTED_WITHIN_S: Final = 120.0
# A hung instance is replaced by then: stall_timeout_s (main.CONFIG), four times that where cpus are starved
# (instances/progress.py), one probe, stop_timeout_s, and a busy machine.
HUNG_WITHIN_S: Final = 60.0
# (slot with vLLM's counters, slot without): first pair serves streams, second pair does not.
HANGS: Final = ((1, 7), (2, 6), (3, 7), (0, 6))
# The whole host stands still for longer than stall_timeout_s (main.CONFIG).
FREEZE_EVERY_S: Final = 45.0
FROZEN_S: Final = 7.0
LOOK_S: Final = 0.5
# More than eight slots log within HUNG_WITHIN_S.
EVENTS: Final = 1000
DESCRIPTORS_SHARE: Final = 0.9


@dataclass
class Notes:
    """The results."""

    restarts: int = 0
    failed: list[str] = field(default_factory=list)
    """Planned actions that failed."""
    hangs: list[dict[str, Any]] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    looks: int = 0
    unanswered: list[str] = field(default_factory=list)
    """Requests to the control socket or to /health over TLS without a response."""
    unwatched: list[str] = field(default_factory=list)
    """Slots that `status` reports as not watched."""
    ended_as_hung: set[tuple[int, int]] = field(default_factory=set)
    """Slot and generation of instances that the daemon ended with this cause."""
    freezes: int = 0
    health_s: list[float] = field(default_factory=list)
    """How long /health over TLS took, connection and all, without a freeze in between."""
    descriptors: dict[str, int] = field(default_factory=dict)


class Actions:
    """The actions of one run."""

    def __init__(self, daemon: psutil.Process, control: ControlClient, *, slots: int, pause_s: float) -> None:
        self._daemon = daemon
        self._control = control
        self._pause_s = pause_s
        self._frozen = False
        self._owners = [asyncio.Lock() for _ in range(slots)]
        self.notes = Notes()

    async def _status(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._control.get, "/status")

    async def _slot(self, slot: int) -> dict[str, Any]:
        found: dict[str, Any] = (await self._status())["slots"][slot]
        return found

    async def restart_all_along(self) -> None:
        """Restarts one slot after the other, without end."""
        while True:
            for slot in range(len(self._owners)):
                if not self._owners[slot].locked():
                    async with self._owners[slot]:
                        await self._restart(slot)
                await asyncio.sleep(self._pause_s)

    async def _restart(self, slot: int) -> None:
        """A refusal for too few ready slots is not a failure; a restart that does not end is."""
        try:
            before = (await self._slot(slot))["generation"]
            await asyncio.to_thread(self._control.post, f"/slots/{slot}/restart")
        except LauncherError as error:
            if "would be left ready" not in error.message:
                self.notes.failed.append(f"restart {slot}: {error.message}")
            return
        self.notes.restarts += 1
        if not await self._replaced(slot, before, RESTARTED_WITHIN_S):
            self.notes.failed.append(f"restart {slot}: not ready again within {RESTARTED_WITHIN_S} s")

    async def _replaced(self, slot: int, before: int, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            with contextlib.suppress(LauncherError):
                now = await self._slot(slot)
                if now["generation"] > before and now["state"] == "ready":
                    return True
            await asyncio.sleep(0.2)
        return False

    async def hang_now_and_then(self, until: float) -> None:
        """Hangs two instances at a time, one with streams and one without. All are replaced by `until`."""
        turn = 0
        while time.monotonic() + HUNG_WITHIN_S < until:
            async with asyncio.TaskGroup() as group:
                for slot in HANGS[turn % len(HANGS)]:
                    group.create_task(self._hang(slot), name=f"hang {slot}")
            turn += 1

    async def _hang(self, slot: int) -> None:
        async with self._owners[slot]:
            try:
                while (before := await self._slot(slot))["state"] != "ready":  # noqa: ASYNC110 - another process is polled
                    await asyncio.sleep(0.1)
                os.kill(before["pid"], signal.SIGUSR1)
            except (LauncherError, ProcessLookupError, TypeError):
                return  # it died of another fault: try again next time
            begun = time.monotonic()
            replaced = await self._replaced(slot, before["generation"], HUNG_WITHIN_S)
            took = round(time.monotonic() - begun, 1)
            self.notes.hangs.append({
                "slot": slot, "generation": before["generation"], "model": before["model"],
                "counters": slot % 2 == 0, "replaced": replaced, "took_s": took,
                "cause": await self._cause(slot, before["generation"]),
            })  # fmt: skip
            if not replaced:  # as an operator would, so that it can be used again
                with contextlib.suppress(ProcessLookupError):
                    os.kill(before["pid"], signal.SIGKILL)

    async def _cause(self, slot: int, generation: int) -> str | None:
        """The cause of this generation's end. `last_cause` may be that of a later one, which another fault ended."""
        events = (await asyncio.to_thread(self._control.get, f"/events?tail={EVENTS}"))["events"]
        its = (event["fields"] for event in events if event["fields"].get("slot") == slot)
        return next((one["cause"] for one in its if "cause" in one and one["generation"] == generation), None)

    async def freeze_host_now_and_then(self) -> None:
        """Stops the daemon and all its instances for a while, as a paused virtual machine is, without end."""
        while True:
            await asyncio.sleep(FREEZE_EVERY_S)
            all_of_them = [self._daemon, *self._daemon.children(recursive=True)]
            self.notes.freezes += 1
            self._frozen = True
            try:
                _signal(all_of_them, signal.SIGSTOP)
                await asyncio.sleep(FROZEN_S)
            finally:
                _signal(all_of_them, signal.SIGCONT)
                self._frozen = False

    async def look(self) -> None:
        """Samples status and memory, without end."""
        while True:
            self.notes.rss.append(self._daemon.memory_info().rss)
            self.notes.looks += 1
            try:
                status = await self._status()
            except LauncherError as error:
                self.notes.unanswered.append(error.message)
            else:
                for slot in status["slots"]:
                    if (slot["last_cause"] or {}).get("name") == "hung":
                        self.notes.ended_as_hung.add((slot["slot"], slot["last_cause_generation"]))
                    if why := slot["unwatched"]:
                        self.notes.unwatched.append(f"slot {slot['slot']} {slot['state']}: {why}")
            await asyncio.sleep(LOOK_S)

    async def ask_health(self, port: int) -> None:
        """Asks for /health over TLS, each time on a new connection, without end."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        while True:
            self.notes.looks += 1
            begun, freezes, frozen = time.monotonic(), self.notes.freezes, self._frozen
            try:
                async with asyncio.timeout(30):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
                    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                    said = await reader.readuntil(b"\r\n")
                    writer.transport.abort()
                if freezes == self.notes.freezes and not frozen:
                    self.notes.health_s.append(time.monotonic() - begun)
                if not said.startswith((b"HTTP/1.1 200", b"HTTP/1.1 503")):
                    self.notes.unanswered.append(f"/health: {said!r}")
            except (OSError, EOFError, TimeoutError) as error:
                self.notes.unanswered.append(f"/health: {type(error).__name__}: {error}")
            await asyncio.sleep(2)

    async def leave_few_descriptors(self, for_s: float) -> None:
        """Limits the daemon's open files to a tenth more than the most it has used so far."""
        most, deadline = 0, time.monotonic() + for_s
        while time.monotonic() < deadline:
            most = max(most, self._daemon.num_fds())
            await asyncio.sleep(0.2)
        limit = int(most / DESCRIPTORS_SHARE)
        resource.prlimit(self._daemon.pid, resource.RLIMIT_NOFILE, (limit, limit))
        self.notes.descriptors = {"open": most, "limit": limit}


def _signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
