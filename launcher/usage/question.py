"""What a report of the usage ledger is asked for, checked. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from launcher.errors import LauncherError
from launcher.printable import quoted
from launcher.usage import spans

BY: Final = ("key", "model", "instance", "overflow", "day", "hour")
_DIMENSION: Final = {"key": "key", "model": "model", "instance": "slot", "overflow": "overflow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a report is asked for. `since` and `until` as a person writes them (launcher.usage.spans)."""

    since: str = "30d"
    until: str = "now"
    by: str | None = None
    key: str | None = None
    model: str | None = None

    def check(self) -> None:
        """Raises LauncherError."""
        if self.by is not None and self.by not in BY:
            raise LauncherError(
                f"cannot report usage by '{quoted(self.by)}': no such grouping",
                f"choose one of {', '.join(BY)}",
            )
        if self.key is not None and self.model is not None:
            raise LauncherError(
                "cannot report usage of a key with a model: the ledger sums up keys and models apart",
                "give one of the two; `usage --requests` has both of each request",
            )
        name = "key" if self.key is not None else "model" if self.model is not None else None
        if name is not None and self.by in _DIMENSION and self.by != name:
            raise LauncherError(
                f"cannot report usage of a {name} by {self.by}: the ledger sums them up apart",
                "use --by day, --by hour, or `usage --requests`, which has both of each request",
            )

    @property
    def dimension(self) -> tuple[str, str | None]:
        """The dimension of the ledger's rows, and the name if only one is wanted."""
        if self.key is not None:
            return "key", self.key
        if self.model is not None:
            return "model", self.model
        return _DIMENSION.get(self.by or "", "all"), None


class Times(NamedTuple):
    """A report's time: Unix seconds."""

    since: float
    until: float

    @staticmethod
    def of(since: str, until: str, now: float, zone: ZoneInfo) -> Times:
        """Raises LauncherError."""
        found = Times(_parsed(since, now, zone), min(now, _parsed(until, now, zone)))
        if found.since >= found.until:
            raise LauncherError(
                f"cannot report usage from '{quoted(since)}' to '{quoted(until)}': "
                + ("that is in the future" if found.since >= now else "the end is not after the begin"),
                f"now it is {spans.iso(now, zone)} (usage.zone = {zone.key})",
            )
        return found


def _parsed(text: str, now: float, zone: ZoneInfo) -> float:
    try:
        return spans.parse_time(text, now, zone)
    except ValueError:
        raise LauncherError(
            f"cannot report usage of '{quoted(text)}': that is no time", f"give {spans.WANTED}"
        ) from None
