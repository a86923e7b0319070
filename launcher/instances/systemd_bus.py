"""systemd through D-Bus: start, stop, signal and inspect units. Source: org.freedesktop.systemd1(5).

One connection, opened again when it is lost. systemd's signals wake the waiters of a unit; waiters also check
every WAKE_S, because a signal may be lost with a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Final

from dbus_fast import BusType, DBusError, Message, MessageType, Variant
from dbus_fast.aio import MessageBus
from msgspec import Struct

from launcher.base.errors import LauncherError

# systemd answers in milliseconds; a manager that is busy reloading a large system takes seconds.
CALL_S: Final = 25.0
WAKE_S: Final = 5.0
_SYSTEMD: Final = "org.freedesktop.systemd1"
_MANAGER_PATH: Final = "/org/freedesktop/systemd1"
_MANAGER: Final = f"{_SYSTEMD}.Manager"
_DBUS: Final = "org.freedesktop.DBus"
_PROPERTIES: Final = f"{_DBUS}.Properties"
UNIT_EXISTS: Final = f"{_SYSTEMD}.UnitExists"


class BusError(Exception):
    """systemd refused, or could not be reached. `name` is the D-Bus error's name."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name
        self.text = text


class UnitFacts(Struct, frozen=True):
    active: str
    """active, activating, deactivating, inactive, failed, ..."""
    has_job: bool
    main_pid: int
    """0 when there is none."""
    invocation: str
    """Hexadecimal; empty before the first start."""
    code: int
    """Of waitid(2): 1 exited, 2 killed, 3 dumped; 0 while it runs."""
    status: int
    """Exit code, or number of the signal."""
    result: str
    """success, exit-code, signal, oom-kill, timeout, ..."""
    environment: tuple[str, ...]
    started_s: float
    """When the main process was started, seconds since the epoch; 0 before."""

    @property
    def over(self) -> bool:
        """It has no process and no job."""
        return self.active in {"inactive", "failed"} and not self.has_job


def unit_path(unit: str) -> str:
    """The object path of a unit: every byte that is no letter or digit is written _xx (sd_bus_path_encode(3))."""
    escaped = "".join(
        chr(byte)
        if (chr(byte).isalpha() or (chr(byte).isdigit() and index)) and byte < 128
        else f"_{byte:02x}"
        for index, byte in enumerate(unit.encode())
    )
    return f"{_MANAGER_PATH}/unit/{escaped}"


class Systemd:
    """The system's manager. Owned by one event loop."""

    def __init__(self) -> None:
        self._bus: MessageBus | None = None
        self._connecting = asyncio.Lock()
        self._wakes: dict[str, set[asyncio.Event]] = {}
        """By the object path of a unit."""
        self._watched: set[str] = set()
        """Object paths whose signals this connection gets."""

    async def close(self) -> None:
        """End the connection. What it referenced may be forgotten by systemd."""
        bus, self._bus = self._bus, None
        if bus is not None:
            bus.disconnect()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(bus.wait_for_disconnect(), 1.0)  # type: ignore[no-untyped-call]

    async def start_transient(self, unit: str, properties: Iterable[tuple[str, str, Any]]) -> None:
        """Start a unit of these (name, D-Bus signature, value). It stays known until `forget`. Raises BusError."""
        body = [[name, Variant(signature, value)] for name, signature, value in properties]
        await self._manager("StartTransientUnit", "ssa(sv)a(sa(sv))", unit, "fail", body, [])

    async def stop(self, unit: str) -> None:
        """SIGTERM, and SIGKILL after the unit's TimeoutStopSec=. Returns at once. Raises BusError."""
        await self._manager("StopUnit", "ss", unit, "replace")

    async def kill(self, unit: str, *, whole: bool, signal: int) -> None:
        """A signal to the main process, or to the `whole` cgroup. Raises BusError."""
        await self._manager("KillUnit", "ssi", unit, "all" if whole else "main", int(signal))

    async def reset_failed(self, unit: str) -> None:
        """Forget that it failed. No error when it is not known."""
        with contextlib.suppress(BusError):
            await self._manager("ResetFailedUnit", "s", unit)

    async def hold(self, unit: str) -> None:
        """Keep the unit's properties after its end, while this connection is open. Raises BusError."""
        await self._manager("RefUnit", "s", unit)

    async def forget(self, unit: str) -> None:
        """Release what `hold` and `start_transient` keep."""
        with contextlib.suppress(BusError):
            await self._manager("UnrefUnit", "s", unit)
        await self.reset_failed(unit)

    async def list_units(self, pattern: str) -> list[str]:
        (found,) = await self._manager("ListUnitsByPatterns", "asas", [], [pattern])
        return [row[0] for row in found]

    async def facts(self, unit: str) -> UnitFacts:
        """What is known now; an unknown unit is inactive. Raises BusError."""
        path = unit_path(unit)
        of_unit = await self._properties(path, f"{_SYSTEMD}.Unit")
        of_service = await self._properties(path, f"{_SYSTEMD}.Service")
        return UnitFacts(
            active=of_unit["ActiveState"], has_job=of_unit["Job"][0] != 0, main_pid=of_service["MainPID"],
            invocation=bytes(of_unit["InvocationID"]).hex(), code=of_service["ExecMainCode"],
            status=of_service["ExecMainStatus"], result=of_service["Result"],
            environment=tuple(of_service["Environment"]), started_s=of_service["ExecMainStartTimestamp"] / 1e6,
        )  # fmt: skip

    async def job_type(self, unit: str) -> str | None:
        """What systemd is doing to a unit: "stop", "restart", "start", ...; None for nothing. Raises BusError."""
        job, path = (await self._properties(unit_path(unit), f"{_SYSTEMD}.Unit"))["Job"]
        if not job:
            return None
        return str((await self._properties(path, f"{_SYSTEMD}.Job"))["JobType"])

    async def until(self, unit: str, reached: Callable[[UnitFacts], bool]) -> UnitFacts:
        """The first facts of which `reached` holds. A systemd that can't be reached is asked again and again."""
        path, wake = unit_path(unit), asyncio.Event()
        self._wakes.setdefault(path, set()).add(wake)
        try:
            while True:
                wake.clear()
                with contextlib.suppress(BusError):
                    await self._watch(path)
                    facts = await self.facts(unit)
                    if reached(facts):
                        return facts
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(WAKE_S):
                        await wake.wait()
        finally:
            self._wakes[path].discard(wake)
            if not self._wakes[path]:
                del self._wakes[path]
                with contextlib.suppress(BusError):
                    await self._match("RemoveMatch", path)

    async def _manager(self, method: str, signature: str, *body: Any) -> list[Any]:
        return await self._call(_SYSTEMD, _MANAGER_PATH, _MANAGER, method, signature, *body)

    async def _properties(self, path: str, interface: str) -> dict[str, Any]:
        (found,) = await self._call(_SYSTEMD, path, _PROPERTIES, "GetAll", "s", interface)
        return {name: variant.value for name, variant in found.items()}

    async def _watch(self, path: str) -> None:
        await self._connected()
        if path not in self._watched:
            await self._match("AddMatch", path)
            self._watched.add(path)

    async def _match(self, method: str, path: str) -> None:
        if method == "RemoveMatch":
            if path not in self._watched:
                return
            self._watched.discard(path)
        rule = f"type='signal',sender='{_SYSTEMD}',interface='{_PROPERTIES}',path='{path}'"
        await self._call(_DBUS, "/org/freedesktop/DBus", _DBUS, method, "s", rule)

    async def _connected(self) -> MessageBus:
        async with self._connecting:
            if self._bus is None or not self._bus.connected:
                self._watched.clear()
                self._bus = None
                try:
                    async with asyncio.timeout(CALL_S):
                        bus = await MessageBus(bus_type=BusType.SYSTEM).connect()
                except (OSError, DBusError, EOFError, ValueError) as error:  # TimeoutError is an OSError
                    raise BusError("unreachable", str(error) or type(error).__name__) from error
                bus.add_message_handler(self._heard)
                self._bus = bus
                await _ask(
                    bus,
                    Message(destination=_SYSTEMD, path=_MANAGER_PATH, interface=_MANAGER, member="Subscribe"),
                )
            return self._bus

    def _heard(self, message: Message) -> bool:
        if message.message_type is MessageType.SIGNAL:
            for wake in self._wakes.get(message.path or "", ()):
                wake.set()
        return False

    async def _call(
        self, to: str, path: str, interface: str, member: str, signature: str, *body: Any
    ) -> list[Any]:
        message = Message(
            destination=to, path=path, interface=interface, member=member, signature=signature,
            body=list(body),
        )  # fmt: skip
        return await _ask(await self._connected(), message)


async def _ask(bus: MessageBus, message: Message) -> list[Any]:
    try:
        async with asyncio.timeout(CALL_S):
            reply = await bus.call(message)
    except (OSError, EOFError, DBusError) as error:
        raise BusError("unreachable", str(error) or f"no answer to {message.member}") from error
    if reply is None:
        raise BusError("unreachable", f"no answer to {message.member}")
    if reply.message_type is MessageType.ERROR:
        text = str(reply.body[0]) if reply.body else f"{message.member} failed"
        raise BusError(reply.error_name or "unknown", text)
    return list(reply.body)


def cannot_reach(error: BusError) -> LauncherError:
    return LauncherError(
        f"cannot use systemd: {error.text}",
        'see `systemctl status dbus`; supervision.spawner = "direct" works without systemd',
    )
