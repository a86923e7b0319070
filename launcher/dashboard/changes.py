"""What changed: the daemon's events, those that belong together folded into one item. Pure.

A killed engine makes six events in 60 ms, and more until its slot is ready again: they are one item, with the cause and
its remedy. An operator's command is one item with what followed from it. So is a reload, and a time with drift.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import Struct, field

from launcher.control.verdict import duration

Event = Mapping[str, Any]

# Items that are kept, and that a page gets at first.
KEPT: Final = 500
FIRST: Final = 150
# Events of one cause come within this time, in any order.
SETTLE_S: Final = 2.0
# From the first effect of a command to its answer.
_ANSWERED_S: Final = 0.5
# A message that is repeated within this time is counted.
REPEATED_S: Final = 300.0
# Events kept of one item: its first and its last ones.
_FIRST_EVENTS: Final = 20
_LAST_EVENTS: Final = 20
_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
# Nothing follows by itself.
_ENDS: Final = frozenset({"ready", "stopped", "failed", "held"})
_OUTCOME: Final = {
    "starting": ", starting", "draining": ", draining", "stopping": ", stopping", "backoff": ", in back-off",
    "failed": ", failed", "stopped": ", stopped", "held": ", held",
}  # fmt: skip
_SHOWN: Final = ("generation", "state", "verb", "evidence")
_ROLLOUT: Final = "launcher.rollout"


class _Item(Struct):
    """One thing that happened."""

    key: str
    """What it is about: a slot, the reload, drift, or one message."""
    first: Event
    title: str
    level: str = "info"
    slot: int | None = None
    cause: str | None = None
    remedy: str | None = None
    user: str | None = None
    state: str = ""
    """The slot's, after the last event."""
    ended: bool = False
    events: list[Event] = field(default_factory=list)
    count: int = 0
    newest: int = 0
    """Number of its newest event."""
    until: float = 0.0

    def add(self, event: Event) -> None:
        self.count += 1
        self.newest, self.until = max(self.newest, event["number"]), max(self.until, event["time"])
        self.events.append(_shown(event))
        if len(self.events) > _FIRST_EVENTS + _LAST_EVENTS:
            del self.events[_FIRST_EVENTS]
        self.level = max(self.level, event["level"], key=_LEVELS.index)

    def shown(self) -> dict[str, Any]:
        return {
            "number": self.first["number"], "time": self.first["time"], "until": self.until, "level": self.level,
            "slot": self.slot, "title": self.title + self._outcome(), "cause": self.cause, "remedy": self.remedy,
            "user": self.user, "events": self.events,
        }  # fmt: skip

    def _outcome(self) -> str:
        if self.state == "ready":
            again = "again " if self.cause else ""
            return f", ready {again}after {duration(self.until - self.first['time'])}"
        if self.slot is None and self.key not in {"reload", "drift"} and self.count > 1:
            return f" ({self.count} times)"
        return _OUTCOME.get(self.state, "")


class Changes:
    """Items, oldest first."""

    def __init__(self) -> None:
        self._items: deque[_Item] = deque(maxlen=KEPT)
        self._last: dict[str, _Item] = {}
        """The last item by key."""
        self.newest = 0
        """Number of the newest event."""

    def add(self, events: Iterable[Event]) -> None:
        new = [event for event in events if event["number"] > self.newest]
        for event in sorted(new, key=_begins):
            self.newest = max(self.newest, event["number"])
            self._fold(event)

    def since(self, after: int) -> list[dict[str, Any]]:
        """The items with an event of a higher number, oldest first; of all of them (0) the last ones."""
        found = [item.shown() for item in self._items if item.newest > after]
        return found if after else found[-FIRST:]

    def _fold(self, event: Event) -> None:
        fields, slot = event["fields"], slot_of(event)
        key = _key(event, slot)
        item = self._last.get(key)
        if item is None or not _belongs(event, item):
            item = _Item(key, event, _title(event, slot), slot=slot)
            self._items.append(item)
            self._last[key] = item
            if len(self._last) > 2 * KEPT:  # messages differ without end
                self._last = {kept.key: kept for kept in self._items}
        item.add(event)
        item.cause = item.cause or fields.get("cause")
        if fields.get("cause") or _is_command(event):
            item.title = _title(event, slot)
        item.remedy = item.remedy or fields.get("remedy")
        item.user = item.user or user_of(event)
        if key.startswith("slot "):
            item.state = fields.get("state") or item.state
            item.ended = not item.state or item.state in _ENDS
        elif key == "reload":
            item.ended = event["logger"].startswith(_ROLLOUT) and "audit" in fields
        elif key == "drift":
            item.ended = not fields["drift"]


def _shown(event: Event) -> Event:
    """What the page shows of an event: the first view has hundreds."""
    fields = {name: event["fields"][name] for name in _SHOWN if event["fields"].get(name)}
    found = {name: event[name] for name in ("number", "time", "level", "message")}
    return {**found, "fields": fields} if fields else found


def _begins(event: Event) -> float:
    """A command is logged once it is answered, after its first effects."""
    return float(event["time"]) - (_ANSWERED_S if _is_command(event) else 0.0)


def _is_command(event: Event) -> bool:
    return "audit" in event["fields"] and not event["logger"].startswith(_ROLLOUT)


def _key(event: Event, slot: int | None) -> str:
    fields = event["fields"]
    if event["logger"].startswith(_ROLLOUT) or fields.get("verb") == "reload":
        return "reload"
    if slot is not None:
        return f"slot {slot}"
    return "drift" if "drift" in fields else f"{event['logger']} {event['message']}"


def _belongs(event: Event, item: _Item) -> bool:
    """Whether an event is part of the last item about the same."""
    fields, later_s = event["fields"], float(event["time"]) - item.until
    is_soon = later_s <= SETTLE_S
    if _is_command(event):  # of what its first effects began
        return item.slot is not None and item.user is None and item.cause is None and is_soon
    if fields.get("cause"):
        # A further failure is another item, also in a crash loop.
        return item.cause is None and (is_soon or item.state == "starting")
    if item.key in {"reload", "drift"} or item.slot is not None:
        return not item.ended or is_soon
    return later_s <= REPEATED_S


def slot_of(event: Event) -> int | None:
    """The slot that an event is about."""
    found = event["fields"].get("slot")
    if isinstance(found, str) and found.isascii() and found.isdecimal():
        return int(found)  # of a daemon from before an upgrade
    return found if isinstance(found, int) else None


def user_of(event: Event) -> str | None:
    """Who asked for it."""
    found: str | None = event["fields"].get("user") or event["fields"].get("peer_user")
    return found


def _title(event: Event, slot: int | None) -> str:
    fields, message = event["fields"], str(event["message"])
    if (audit := fields.get("audit")) and fields.get("verb"):
        what = fields["verb"] if slot is None else f"slot {slot}: {fields['verb']}"
        user = user_of(event)
        by = f" by {user}" if user else ""
        # "POST /v1/slots/7/drain by ada (uid 1000, pid 7): 404: cannot use slot '7': no such slot"
        why = message.partition(f": {fields.get('status')}: ")[2] or message
        return f"{what}{by}" if audit == "done" else f"{what}{by} {audit}: {why}"
    if remedy := fields.get("remedy"):
        message = message.removesuffix(f"; {remedy}")
    if fields.get("state") and not fields.get("cause"):
        # "slot 2: stopped -> starting": the outcome says it.
        return f"slot {slot}"
    return message
