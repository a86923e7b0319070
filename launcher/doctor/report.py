"""The findings of `doctor` and what follows from them. No effects."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final


class Verdict(StrEnum):
    """Of one row."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Tier(StrEnum):
    """What performance to expect, best first."""

    OPTIMISED = "optimised"
    DEGRADED = "degraded"
    FALLBACK = "fallback"


_TIERS: Final = tuple(Tier)

EXPECTATION: Final = {
    Tier.OPTIMISED: "the engine's best kernels for this processor, and every instance's memory on its own node: "
    "what the published multi-instance measurements had",
    Tier.DEGRADED: "it serves, slower than this machine can: see the rows that say so",
    Tier.FALLBACK: "good for a trial at most: see the rows that say so",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was looked at."""

    check: str
    """Stable kebab-case name, for machines and docs."""
    verdict: Verdict
    fact: str
    remedy: str = ""
    """One line; empty when there is nothing to do."""
    tier: Tier = Tier.OPTIMISED
    """The best that is still possible with this."""


@dataclass(frozen=True, slots=True)
class Report:
    """All rows, and the tier that they leave."""

    rows: tuple[Row, ...]

    @property
    def tier(self) -> Tier:
        """That of the worst row."""
        return max((row.tier for row in self.rows), key=_TIERS.index, default=Tier.OPTIMISED)

    @property
    def failed(self) -> bool:
        """Whether something has to be changed before `serve` can work."""
        return any(row.verdict is Verdict.FAIL for row in self.rows)

    @property
    def limits(self) -> tuple[str, ...]:
        """The checks that keep the tier from being better."""
        best = self.tier
        return tuple(row.check for row in self.rows if row.tier is best and best is not Tier.OPTIMISED)


def to_json(report: Report) -> dict[str, Any]:
    """`doctor --json`."""
    return {
        "tier": report.tier.value,
        "expect": EXPECTATION[report.tier],
        "limited_by": list(report.limits),
        "failed": report.failed,
        "rows": [
            {
                "check": row.check,
                "verdict": row.verdict.value,
                "fact": row.fact,
                "remedy": row.remedy,
                "tier": row.tier.value,
            }
            for row in report.rows
        ],
    }


def to_text(report: Report) -> str:
    """For a person: one line for each row, remedies below theirs."""
    width = max((len(row.check) for row in report.rows), default=0)
    lines = []
    for row in report.rows:
        lines.append(f"{row.verdict:<4}  {row.check:<{width}}  {row.fact}")
        if row.remedy:
            lines.append(f"      {'':<{width}}  -> {row.remedy}")
    because = f" (limited by {', '.join(report.limits)})" if report.limits else ""
    return "\n".join([*lines, "", f"performance: {report.tier}{because}", f"  {EXPECTATION[report.tier]}"])
