"""The rows of `doctor`, of host and engine, and the resulting performance tier. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Tier(StrEnum):
    """Expected performance, best first."""

    OPTIMISED = "optimised"
    DEGRADED = "degraded"
    FALLBACK = "fallback"


_TIERS: Final = tuple(Tier)
EXPECTATION: Final = {
    Tier.OPTIMISED: "the engine's best kernels for this processor, and each instance's memory on its own node, "
    "as in the published multi-instance measurements",
    Tier.DEGRADED: "works, but more slowly than this machine allows: see the listed checks",
    Tier.FALLBACK: "suitable for trials only: see the listed checks",
}


@dataclass(frozen=True, slots=True)
class Row:
    check: str
    """Stable name in kebab case."""
    verdict: Verdict
    fact: str
    remedy: str = ""
    """One line; empty when no action is needed."""
    tier: Tier = Tier.OPTIMISED
    """The best tier that is possible with this result."""


def ok(check: str, fact: str, remedy: str = "") -> Row:
    return Row(check, Verdict.OK, fact, remedy)


def warn(check: str, fact: str, remedy: str, tier: Tier = Tier.OPTIMISED) -> Row:
    return Row(check, Verdict.WARN, fact, remedy, tier)


def fail(check: str, fact: str, remedy: str) -> Row:
    return Row(check, Verdict.FAIL, fact, remedy, Tier.FALLBACK)


@dataclass(frozen=True, slots=True)
class Report:
    rows: tuple[Row, ...]

    @property
    def tier(self) -> Tier:
        return max((row.tier for row in self.rows), key=_TIERS.index, default=Tier.OPTIMISED)

    @property
    def failed(self) -> bool:
        """Whether `serve` cannot work without a change."""
        return any(row.verdict is Verdict.FAIL for row in self.rows)

    @property
    def limits(self) -> tuple[str, ...]:
        """The checks that determine a tier below optimised."""
        best = self.tier
        return tuple(row.check for row in self.rows if row.tier is best and best is not Tier.OPTIMISED)


def to_json(report: Report) -> dict[str, Any]:
    """The output of `doctor --json`."""
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
    """One line per row, with its remedy below."""
    width = max((len(row.check) for row in report.rows), default=0)
    lines = []
    for row in report.rows:
        lines.append(f"{row.verdict:<4}  {row.check:<{width}}  {row.fact}")
        if row.remedy:
            lines.append(f"      {'':<{width}}  -> {row.remedy}")
    because = f" (limited by {', '.join(report.limits)})" if report.limits else ""
    return "\n".join([*lines, "", f"performance: {report.tier}{because}", f"  {EXPECTATION[report.tier]}"])
