"""Clients that take their answers slowly: the memory that buffers for them, and when they are dropped.

A client is slow while its connection's write buffer is over its mark. More of its answer is buffered while memory is
left for it, so that the instance is free as soon as the answer is generated. Then the instance is no longer read
(back-pressure), and waits for the client.

A slow client must take `client_min_bytes_per_s`. It may take less for `client_grace_s` if others wait
for the instance that it holds up, or the memory is full; else for `client_stall_timeout_s`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Final

from launcher.config.schema import Proxy
from launcher.proxy.request.ports import SlowClient

# --- A least rate that bytes must keep, of an upload or of an answer that its client takes. ---


class Pace:
    """How far one transfer is behind its least rate. Each byte pays for its share of a second, none in advance:
    neither single bytes now and then nor a large beginning keep a connection open for ever."""

    __slots__ = ("_rate", "paid_until")

    def __init__(self, rate: int, now: float) -> None:
        """`rate` in bytes a second."""
        self._rate = rate
        self.paid_until = now  # the bytes that moved suffice up to this time

    def behind_s(self, now: float, moved: int) -> float:
        """Seconds that it is behind, after so many more bytes."""
        self.paid_until = min(now, self.paid_until + max(0, moved) / self._rate)
        return now - self.paid_until

    def excuse(self, seconds: float) -> None:
        """The peer could not move bytes for so long: we did not let it."""
        self.paid_until += seconds


SHARE: Final = 8  # one client may use an eighth of the memory

WAITING: Final = "waiting"
MEMORY: Final = "memory"
TIMEOUT: Final = "timeout"
REASONS: Final = (WAITING, MEMORY, TIMEOUT)


class _Behind:
    """One slow client, as last seen."""

    __slots__ = ("answering", "pace", "size", "unsent", "written")

    def __init__(self, client: SlowClient, rate: int, now: float) -> None:
        self.pace = Pace(rate, now)
        self.size = 0
        self.answering = client.answering
        self.written = 0 if self.answering is None else self.answering.written
        self.unsent = client.unsent

    def behind_s(self, client: SlowClient, now: float) -> float:
        answering, unsent = client.answering, client.unsent
        written = 0 if answering is None else answering.written
        moved = self.unsent - unsent
        if answering is self.answering:
            moved += written - self.written
        self.answering, self.written, self.unsent = answering, written, unsent
        return self.pace.behind_s(now, moved)


class SlowClients:
    def __init__(self, proxy: Proxy, clock: Callable[[], float]) -> None:
        self._most_bytes = proxy.slow_client_buffer_bytes
        self._rate = proxy.client_min_bytes_per_s
        self._grace_s = proxy.client_grace_s
        self._timeout_s = proxy.client_stall_timeout_s
        self._clock = clock
        self._behind: dict[SlowClient, _Behind] = {}
        self.bytes = 0  # buffered for all slow clients, as last seen
        self.given_up: Counter[str] = Counter()  # dropped clients, by reason (REASONS)

    def __len__(self) -> int:
        return len(self._behind)

    def add(self, client: SlowClient) -> None:
        if client not in self._behind:
            self._behind[client] = _Behind(client, self._rate, self._clock())

    def remove(self, client: SlowClient) -> None:
        seen = self._behind.pop(client, None)
        if seen is not None:
            self.bytes -= seen.size

    def accepts(self, client: SlowClient) -> bool:
        seen = self._behind.get(client)
        if seen is None:
            return True
        size = client.buffered
        self.bytes += size - seen.size
        seen.size = size
        return self.bytes < self._most_bytes and size < self._most_bytes / SHARE

    def tick(self, now: float, waited_for: Callable[[], Collection[str | None]]) -> None:
        """Stop reading instances whose clients hold too much memory, resume the others; drop clients that are too slow.

        `waited_for`: the models of queued requests; None among them: any model.
        """
        if not self._behind:
            return
        wanted = waited_for()
        for client, seen in tuple(self._behind.items()):
            accepts = self.accepts(client)
            answering = client.answering
            if answering is not None and (answering.holds is not None) is accepts:
                if accepts:
                    client.resume_answer()
                else:
                    client.pause_answer()
            self._judge(client, seen.behind_s(client, now), wanted)

    def excuse(self, seconds: float) -> None:
        """This process could not write to them for so long."""
        for seen in self._behind.values():
            seen.pace.excuse(seconds)

    def _judge(self, client: SlowClient, behind_s: float, wanted: Collection[str | None]) -> None:
        answering = client.answering
        held = None if answering is None else answering.holds
        if behind_s > self._timeout_s:
            self._give_up(client, TIMEOUT, f"for {self._timeout_s:g} s")
        elif behind_s <= self._grace_s:
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
