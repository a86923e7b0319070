"""How long each slot had a ready instance, and how long that one had work: sums over all its generations. Pure."""

from __future__ import annotations

from typing import NamedTuple

from launcher.proxy.balancing.demand import InstanceId


class Occupied(NamedTuple):
    """Seconds of one slot since the proxy's start."""

    ready_s: float  # its instance could be asked, or was being drained
    busy_s: float  # of these, at least one request was on it


class _Stopwatch:
    """Seconds per slot. It runs for an instance from `start` to `stop`; a repeated call of either changes nothing."""

    def __init__(self) -> None:
        self._sums: dict[int, float] = {}
        self._since: dict[InstanceId, float] = {}

    def start(self, key: InstanceId, now: float) -> None:
        self._since.setdefault(key, now)

    def stop(self, key: InstanceId, now: float) -> None:
        since = self._since.pop(key, None)
        if since is not None:
            self._sums[key[0]] = self._sums.get(key[0], 0.0) + now - since

    def read(self, now: float) -> dict[int, float]:
        sums = dict(self._sums)
        for (slot, _), since in self._since.items():
            sums[slot] = sums.get(slot, 0.0) + now - since
        return sums


class Occupancy:
    """Told of an instance's first and last request at a time, never of a token. `now`: the event loop's time."""

    def __init__(self) -> None:
        self._ready = _Stopwatch()
        self._busy = _Stopwatch()

    def added(self, key: InstanceId, now: float) -> None:
        self._ready.start(key, now)

    def removed(self, key: InstanceId, now: float) -> None:
        """The instance is gone, with whatever was on it."""
        self._ready.stop(key, now)
        self._busy.stop(key, now)

    def busy(self, key: InstanceId, now: float) -> None:
        """Its first request came."""
        self._busy.start(key, now)

    def idle(self, key: InstanceId, now: float) -> None:
        """Its last request left."""
        self._busy.stop(key, now)

    def read(self, now: float) -> dict[int, Occupied]:
        """By slot; neither sum ever falls."""
        busy = self._busy.read(now)
        return {
            slot: Occupied(ready_s, busy.get(slot, 0.0)) for slot, ready_s in self._ready.read(now).items()
        }
