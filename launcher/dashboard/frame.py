"""What `GET /api/now` answers, from what the daemon said last. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.dashboard.changes import Changes
from launcher.verdict import Verdict, no_answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The daemon's last answers. `status` is the last known one when it does not answer now."""

    at: float | None = None
    """Time of `status`; None: the daemon has not answered yet."""
    status: dict[str, Any] | None = None
    machine: dict[str, Any] | None = None
    figures: dict[str, Any] | None = None
    verdict: Verdict | None = None
    """On `status` and `machine`."""
    trouble: tuple[str, str] | None = None
    """Why there is no newer answer, and the remedy."""


def frame(seen: Seen, changes: Changes, after: int, now: float, *, has_fleet: bool = False) -> dict[str, Any]:
    """`after`: changes of earlier events are left out."""
    return {
        "time": seen.at,
        "age_s": None if seen.at is None else max(0.0, now - seen.at),
        "version": None if seen.status is None else seen.status["version"],
        "answers": seen.trouble is None and seen.status is not None,
        "trouble": "" if seen.trouble is None else "; ".join(seen.trouble),
        "verdict": shown_verdict(_verdict(seen, now)),
        "status": seen.status,
        "machine": seen.machine,
        "figures": seen.figures,
        "changes": changes.since(after),
        "newest_event": changes.newest,
        "has_fleet": has_fleet,
    }


def shown_verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "level": verdict.level,
        "line": verdict.line,
        "problems": [
            {
                "what": problem.what, "remedy": problem.remedy, "slot": problem.slot, "host": problem.host,
                "level": problem.level, "evidence": problem.evidence,
            }
            for problem in verdict.problems
        ],
    }  # fmt: skip


def _verdict(seen: Seen, now: float) -> Verdict:
    if seen.trouble is not None:
        return no_answer(*seen.trouble, None if seen.at is None else now - seen.at)
    return seen.verdict or no_answer("the daemon has not answered yet", "", None)
