"""What a row of the failure table promises, and whether the clients' outcomes keep it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fleet_hosts.load import End, Outcome, counts

# A stream that is cut by the death of a host ends within this time of it.
CUT_WITHIN_S = 5.0


@dataclass(slots=True)
class Row:
    """One failure, what is allowed, and what was found."""

    name: str
    begun: float
    ended: float = 0.0
    victims: frozenset[str] = frozenset()
    """Hosts and addresses of ingresses whose requests may fail, honestly; empty for what is planned or invisible."""
    fails_until: float | None = None
    """Requests that began after it may not fail (time.monotonic): the failure is known by then."""
    found: list[str] = field(default_factory=list)
    """What was measured, for the line."""
    broken: list[str] = field(default_factory=list)
    """What does not hold besides the outcomes."""

    def judge(self, outcomes: Sequence[Outcome]) -> dict[str, object]:
        """The row as a value: its counts and every bound that does not hold. `outcomes`: those that ended in its time."""
        mine = [outcome for outcome in outcomes if self.begun < outcome.ended <= self.ended]
        broken = list(self.broken)
        if not mine:
            broken.append("no request ended in its time")
        broken += [f"dishonest: {one.detail}" for one in mine if one.end is End.DISHONEST]
        broken += [
            f"{one.end}: {one.detail}"
            for one in mine
            if one.end in {End.CUT, End.TOLD, End.FAILED} and not self._allowed(one)
        ]
        late = [one.ended - self.begun for one in mine if one.end in {End.CUT, End.TOLD}]
        return {
            "name": self.name,
            "seconds": round(self.ended - self.begun, 1),
            "requests": len(mine),
            "real": sum(one.real for one in mine),
            **counts(mine),
            "last_cut_after_s": round(max(late), 2) if late else None,
            "found": self.found,
            "broken": broken,
        }

    def _allowed(self, one: Outcome) -> bool:
        """Whether the failure may have cost this request."""
        if not self.victims or (self.fails_until is not None and one.begun > self.fails_until):
            return False
        # Before the first byte nobody knows which host has a request.
        concerned = {one.host, one.ingress} & self.victims or (one.end is End.FAILED and not one.host)
        return bool(concerned) and (one.end is End.FAILED or one.ended - self.begun <= CUT_WITHIN_S)


def line(row: dict[str, object]) -> str:
    """A row of the table, for people."""
    ends = ", ".join(f"{row[end.value]} {end.value}" for end in End if row[end.value] or end is End.DISHONEST)
    cut = "" if row["last_cut_after_s"] is None else f"; the last was cut after {row['last_cut_after_s']} s"
    found, broken = row["found"], row["broken"]
    assert isinstance(found, list)
    assert isinstance(broken, list)
    told = "".join(f"; {one}" for one in found)
    verdict = "ok" if not broken else "BROKEN: " + "; ".join(broken[:4])
    asked = f"{row['requests']:>5} requests ({row['real']} vLLM)"
    return f"{row['name']:<14} {row['seconds']:>5} s  {asked}: {ends}{cut}{told}  [{verdict}]"
