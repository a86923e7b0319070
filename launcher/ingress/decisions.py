"""What HAProxy asks and tells, and the picker that decides: the picker on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from random import Random
from typing import Any, Final

from launcher.ingress.loads import HostLoad
from launcher.ingress.picker import Choice, Picker
from launcher.ingress.spop import Value
from launcher.proxy.request.beginning import read_asked

LEAST_S: Final = 0.001  # to the next turn
STRANGERS: Final = 100  # that are logged
_LOG = logging.getLogger(__name__)


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
