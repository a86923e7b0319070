"""The report of `doctor`: its rows as text and JSON, and the resulting performance tier. Pure."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from launcher.engines.checks import Row, Tier, Verdict

_TIERS: Final = tuple(Tier)
EXPECTATION: Final = {
    Tier.OPTIMISED: "the engine's best kernels for this processor, and each instance's memory on its own node, "
    "as in the published multi-instance measurements",
    Tier.DEGRADED: "works, but more slowly than this machine allows: see the listed checks",
    Tier.FALLBACK: "suitable for trials only: see the listed checks",
}


class Report(Struct, frozen=True):
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
