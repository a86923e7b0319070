"""Clients that are behind with their answers: the memory that keeps the rest for them, and who is given up.

A client is behind while its connection's buffer is over its mark. What else comes of its answer is kept in memory
as far as there is room, so that its instance is free when the answer is made. Without room the instance is
held up, and waits for the client.

A client that is behind must take `client_min_bytes_per_s`. It may take less for `client_grace_s` where others wait
for the instance that it holds up, or where the memory is full; in all other cases for `client_stall_timeout_s`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Final, Protocol

from launcher.config.schema import Proxy

SHARE: Final = 8  # one client has this part of the memory at most

WAITING: Final = "waiting"
MEMORY: Final = "memory"
TIMEOUT: Final = "timeout"
REASONS: Final = (WAITING, MEMORY, TIMEOUT)


class Answering(Protocol):
    """A request that is being answered."""

    @property
    def written(self) -> int:
        """Bytes of its answer that its connection was given."""

    @property
    def holds(self) -> str | None:
        """The model of the instance that waits for the client; None while none does."""

    def client_paused(self) -> None:
        """The client takes no more for now."""

    def client_resumed(self) -> None:
        """It takes more, or there is room for the rest."""


class SlowClient(Protocol):
    """A connection as it is seen here."""

    @property
    def answering(self) -> Answering | None:
        """Its present request; None when all of the answer was written."""

    @property
    def buffered(self) -> int:
        """Bytes that wait in this process."""

    @property
    def unsent(self) -> int:
        """The same and what waits in the kernel."""

    def drop(self, why: str) -> None:
        """Close it; the rest of its answer is lost."""


class Pace:
    """How far somebody is behind with bytes that must move at a least rate."""

    __slots__ = ("_paid", "_rate")

    def __init__(self, rate: int, now: float) -> None:
        self._rate = rate
        self._paid = now  # up to when the bytes that moved suffice; none pay in advance

    def late_s(self, now: float, moved: int) -> float:
        """Seconds that it is behind, after so many more bytes."""
        self._paid = min(now, self._paid + max(0, moved) / self._rate)
        return now - self._paid


class _Behind:
    """What was seen of one client."""

    __slots__ = ("answering", "pace", "size", "unsent", "written")

    def __init__(self, client: SlowClient, rate: int, now: float) -> None:
        self.pace = Pace(rate, now)
        self.size = 0
        self.answering = client.answering
        self.written = 0 if self.answering is None else self.answering.written
        self.unsent = client.unsent

    def late_s(self, client: SlowClient, now: float) -> float:
        answering, unsent = client.answering, client.unsent
        written = 0 if answering is None else answering.written
        moved = self.unsent - unsent
        if answering is self.answering:
            moved += written - self.written
        self.answering, self.written, self.unsent = answering, written, unsent
        return self.pace.late_s(now, moved)


class SlowClients:
    """Owner of that memory's account."""

    def __init__(self, proxy: Proxy, clock: Callable[[], float]) -> None:
        self._most_bytes = proxy.slow_client_buffer_bytes
        self._rate = proxy.client_min_bytes_per_s
        self._grace_s = proxy.client_grace_s
        self._timeout_s = proxy.client_stall_timeout_s
        self._clock = clock
        self._behind: dict[SlowClient, _Behind] = {}
        self.bytes = 0
        """Kept for all of them, when they were last looked at."""
        self.given_up: Counter[str] = Counter()
        """By one of REASONS."""

    def __len__(self) -> int:
        """How many are behind."""
        return len(self._behind)

    def add(self, client: SlowClient) -> None:
        """It has fallen behind."""
        if client not in self._behind:
            self._behind[client] = _Behind(client, self._rate, self._clock())

    def remove(self, client: SlowClient) -> None:
        """It has caught up, or gone."""
        seen = self._behind.pop(client, None)
        if seen is not None:
            self.bytes -= seen.size

    def has_room(self, client: SlowClient) -> bool:
        """Whether more may be kept for a client that is behind."""
        seen = self._behind.get(client)
        if seen is None:
            return True
        size = client.buffered
        self.bytes += size - seen.size
        seen.size = size
        return self.bytes < self._most_bytes and size < self._most_bytes / SHARE

    def tick(self, now: float, waited_for: Callable[[], Collection[str | None]]) -> None:
        """Hold up instances where there is no more room, let them go on where there is, give up who is too slow.

        `waited_for`: the models that requests in the queue want; None: any.
        """
        if not self._behind:
            return
        wanted = waited_for()
        for client, seen in tuple(self._behind.items()):
            room = self.has_room(client)
            answering = client.answering
            if answering is not None and (answering.holds is not None) is room:
                if room:
                    answering.client_resumed()
                else:
                    answering.client_paused()
            late_s = seen.late_s(client, now)
            self._judge(client, late_s, wanted)

    def _judge(self, client: SlowClient, late_s: float, wanted: Collection[str | None]) -> None:
        answering = client.answering
        held = None if answering is None else answering.holds
        if late_s > self._timeout_s:
            self._give_up(client, TIMEOUT, f"for {self._timeout_s:g} s")
        elif late_s <= self._grace_s:
            return
        elif held is not None and (held in wanted or None in wanted):
            self._give_up(client, WAITING, f"for {self._grace_s:g} s while requests waited for its instance")
        elif self.bytes >= self._most_bytes > 0:
            self._give_up(
                client, MEMORY, f"for {self._grace_s:g} s while the memory for slow clients was full"
            )

    def _give_up(self, client: SlowClient, reason: str, why: str) -> None:
        self.given_up[reason] += 1
        client.drop(f"its client took fewer than {self._rate} bytes a second {why}")
        self.remove(client)
