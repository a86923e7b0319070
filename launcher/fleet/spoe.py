"""What HAProxy asks and tells, and the picker that decides: the picker on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any, Final

from launcher.fleet.loads import HostLoad
from launcher.fleet.picker import Choice, Picker
from launcher.proxy.request.beginning import read_asked

_LOG = logging.getLogger(__name__)


# --- SPOP 2.0, by which HAProxy asks another process about a request: the side that answers (HAProxy's doc/SPOE.txt,
# 3).

Value = bool | int | str | bytes | None
"""Of an argument; an address is its 4 or 16 bytes."""
Handler = Callable[[str, Mapping[str, Value]], Awaitable[Mapping[str, str]]]
"""Message name, arguments -> variables of the transaction (HAProxy puts its prefix before their names)."""

MAX_FRAME: Final = 1 << 16  # HAProxy's own limit is tune.bufsize - 4 (haproxy.cfg)
# HAProxy sends one message in a frame, with as many arguments as spoe.cfg names.
MAX_MESSAGES: Final = 16
MAX_FIELDS: Final = 64
IDLE_S: Final = 300.0  # longest wait for a frame; HAProxy closes idle connections before (timeout idle)
HELLO, DISCONNECT, NOTIFY, AGENT_HELLO, AGENT_DISCONNECT, ACK = 1, 2, 3, 101, 102, 103
_SET_VAR: Final = b"\1\3\2"  # action, number of its arguments, scope: transaction
_Messages = list[tuple[str, dict[str, Value]]]


class _EndError(Exception):
    """Ends a connection: status of the DISCONNECT frame (section 3.5; 0: as agreed) and why."""


class _Frame:
    """A cursor over one frame, without its length. Raises _EndError where it ends early."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self.kind, flags = self.take(1)[0], self.take(4)[3]
        if self.kind == 0 or not flags & 1:
            raise _EndError(10, "fragmentation is not supported")
        self.ids = self.varint(), self.varint()  # of the stream and of the frame

    def take(self, count: int) -> bytes:
        begin, self._at = self._at, self._at + count
        if self._at > len(self._data):
            raise _EndError(4, "a frame ends early")
        return self._data[begin : self._at]

    def varint(self) -> int:
        value, shift = self.take(1)[0], 4
        more = value >= 0xF0
        while more and shift < 64:
            byte = self.take(1)[0]
            value, shift, more = value + (byte << shift), shift + 7, byte >= 0x80
        return value & (1 << 64) - 1

    def text(self) -> str:
        return self.take(self.varint()).decode(errors="replace")

    def value(self) -> Value:
        head = self.take(1)[0]
        match head & 0x0F:
            case 0 | 1 as kind:
                return bool(head & 0x10) if kind else None
            case 2 | 3 | 4 | 5 as kind:
                number = self.varint()
                return number - (1 << 64) if kind in {2, 4} and number >> 63 else number
            case 6 | 7 as kind:
                return self.take(4 if kind == 6 else 16)
            case 8:
                return self.text()
            case 9:
                return self.take(self.varint())
            case kind:
                raise _EndError(4, f"a value of unknown type {kind}")

    def fields(self, count: int = -1) -> dict[str, Value]:
        """So many, or all that there are."""
        found: dict[str, Value] = {}
        read = 0
        while read != count and not (count < 0 and self.at_end):
            if read == MAX_FIELDS:
                raise _EndError(4, f"more than {MAX_FIELDS} arguments")
            name = self.text()
            found[name], read = self.value(), read + 1
        return found

    def messages(self) -> _Messages:
        found: _Messages = []
        while not self.at_end:
            if len(found) == MAX_MESSAGES:
                raise _EndError(4, f"more than {MAX_MESSAGES} messages")
            found.append((self.text(), self.fields(self.take(1)[0])))
        return found

    @property
    def at_end(self) -> bool:
        return self._at == len(self._data)


def _varint(value: int) -> bytes:
    if value < 0xF0:
        return bytes((value,))
    out, value = [value & 0x0F | 0xF0], (value - 0xF0) >> 4
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value = (value - 0x80) >> 7
    return bytes((*out, value))


def _text(text: str) -> bytes:
    return _varint(len(data := text.encode())) + data


def _field(name: str, value: str | int) -> bytes:
    return _text(name) + (b"\x08" + _text(value) if isinstance(value, str) else b"\x03" + _varint(value))


def _frame(kind: int, payload: bytes, stream: int = 0, number: int = 0) -> bytes:
    body = bytes((kind, 0, 0, 0, 1)) + _varint(stream) + _varint(number) + payload
    return len(body).to_bytes(4, "big") + body


def _hello(said: Mapping[str, Value]) -> bytes:
    versions, size = said.get("supported-versions"), said.get("max-frame-size")
    if not isinstance(versions, str) or "2.0" not in versions.replace(" ", "").split(","):
        raise _EndError(8, f"SPOP {versions!r} is not supported")
    if not isinstance(size, int):
        raise _EndError(6, "no max-frame-size")
    texts = _field("version", "2.0") + _field("capabilities", "pipelining")
    return _frame(AGENT_HELLO, texts + _field("max-frame-size", min(size, MAX_FRAME)))


async def _read(reader: asyncio.StreamReader) -> _Frame:
    async with asyncio.timeout(IDLE_S):
        if (length := int.from_bytes(await reader.readexactly(4), "big")) > MAX_FRAME:
            raise _EndError(3, f"a frame of {length} bytes")
        return _Frame(await reader.readexactly(length))


async def _answer(frame: _Frame, messages: _Messages, writer: asyncio.StreamWriter, handle: Handler) -> None:
    payload = b""
    for name, arguments in messages:
        try:
            variables = await handle(name, arguments)
        except Exception:
            _LOG.exception("cannot answer the SPOP message %s", name)
        else:
            payload += b"".join(_SET_VAR + _field(*variable) for variable in variables.items())
    with contextlib.suppress(OSError):
        writer.write(_frame(ACK, payload, *frame.ids))
        await writer.drain()


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handle: Handler) -> None:
    """One connection of HAProxy, until either side ends it; what `handle` has not answered by then is cancelled.

    An exception of `handle` leaves its request without variables.
    """
    answers: set[asyncio.Task[None]] = set()
    greeted = checked = False
    try:
        while not checked:
            frame = await _read(reader)
            if frame.kind == HELLO:
                writer.write(_hello(said := frame.fields()))
                greeted, checked = True, bool(said.get("healthcheck"))
            elif frame.kind == DISCONNECT or not greeted:
                raise _EndError(0 if greeted else 4, "a frame before HELLO")
            elif frame.kind == NOTIFY:
                answer = _answer(frame, frame.messages(), writer, handle)
                task = asyncio.create_task(answer, name="SPOP answer")
                answers.add(task)
                task.add_done_callback(answers.discard)
            await asyncio.sleep(0)  # frames that are there already come without a turn of the loop
    except _EndError as end:
        status, why = end.args
        _LOG.log(logging.WARNING if status else logging.DEBUG, "SPOP connection closed: %s", why)
        writer.write(_frame(AGENT_DISCONNECT, _field("message", why) + _field("status-code", status)))
    except (OSError, EOFError):
        pass
    finally:
        for task in answers:
            task.cancel()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


LEAST_S: Final = 0.001  # to the next turn
STRANGERS: Final = 100  # that are logged


class Decisions(asyncio.DatagramProtocol):
    """What is held waits, time moves on."""

    def __init__(self) -> None:
        self.picker = Picker(Random().randrange)  # noqa: S311 - a choice among equals
        self.asked = 0
        self.asked_at = float("-inf")
        self.peers: frozenset[str] = frozenset()  # addresses of the ingress hosts
        self._strangers: set[str] = set()  # that were logged
        self._clock = asyncio.get_running_loop().time
        self._held: dict[str, asyncio.Future[Choice | None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def knows(self, address: str) -> bool:
        """Whether it is one of an ingress host. Another one is logged once: HAProxy may send from an address that `[ingress]
        hosts` does not name."""
        if address in self.peers:
            return True
        if address not in self._strangers and len(self._strangers) < STRANGERS:
            self._strangers.add(address)
            _LOG.warning("%s is no ingress host: what it asks and tells is ignored", address)
        return False

    async def handle(self, message: str, arguments: Mapping[str, Value]) -> Mapping[str, str]:
        """A message of HAProxy, as spop.Handler."""
        now = self._clock()
        if message == "first":
            self.picker.first(str(arguments.get("id")), _number(arguments.get("status")), now)
            self.turn()
            return {}
        self.asked, self.asked_at = self.asked + 1, now
        if (asked := read_asked(arguments)) is None:
            return {}
        choice = self.picker.offer(asked, now)
        if choice is None and asked.id not in self._held and self.picker.holds(asked.id):
            self._held[asked.id] = decided = asyncio.get_running_loop().create_future()
            self.turn()
            try:
                choice = await decided
            finally:
                if self._held.pop(asked.id, None) is not None:  # HAProxy has closed its connection
                    self.picker.ended(asked.id, 0, "C", self._clock())
        _LOG.debug("request %s: %s", asked.id, choice)
        return {} if choice is None else {"host": choice.host, "slot": str(choice.slot)}

    def datagram_received(self, data: bytes, address: tuple[Any, ...]) -> None:
        """HAProxy's log line `end ID STATUS SERVER TR TA TERMINATION`."""
        words = data.decode(errors="replace").partition("end ")[2].split()
        if len(words) == 6 and self.knows(address[0]):
            sent = words[2] != "<NOSRV>"
            self.picker.ended(words[0], _number(words[1]), words[5], self._clock(), sent=sent)
            self._decide(words[0], None)
            self.turn()

    def report(self, host: str, load: HostLoad, now: float) -> None:
        self.picker.report(host, load, now)
        self.turn()

    def lost(self, host: str) -> None:
        self.picker.lost(host)

    def turn(self) -> None:
        now = self._clock()
        for id_, choice in self.picker.turn(now):
            self._decide(id_, choice)
        for note in self.picker.notes():
            _LOG.warning("%s", note)
        if self._timer is not None:
            self._timer.cancel()
        when, loop = self.picker.next_turn(now), asyncio.get_running_loop()
        self._timer = None if when is None else loop.call_at(max(when, now + LEAST_S), self.turn)

    def _decide(self, id_: str, choice: Choice | None) -> None:
        decided = self._held.pop(id_, None)
        if decided is not None and not decided.done():
            decided.set_result(choice)


def _number(value: Value) -> int:
    try:
        return int(value or 0)
    except ValueError:
        return 0
