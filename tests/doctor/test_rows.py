"""From rows to a tier, for people and machines."""

from __future__ import annotations

import pytest

from launcher.doctor.rows import EXPECTATION, Report, to_json, to_text
from launcher.engines.checks import Row, Tier, Verdict

GOOD = Row("cpu", Verdict.OK, "fast")
SLOW = Row("tcmalloc", Verdict.WARN, "not there", "install it", Tier.DEGRADED)
BROKEN = Row("numactl", Verdict.FAIL, "not there", "install numactl", Tier.FALLBACK)


@pytest.mark.parametrize(
    ("rows", "tier", "failed", "limits"),
    [
        ((), Tier.OPTIMISED, False, ()),
        ((GOOD,), Tier.OPTIMISED, False, ()),
        ((GOOD, SLOW), Tier.DEGRADED, False, ("tcmalloc",)),
        ((BROKEN, SLOW, GOOD), Tier.FALLBACK, True, ("numactl",)),
    ],
)
def test_tier(rows: tuple[Row, ...], tier: Tier, failed: bool, limits: tuple[str, ...]) -> None:
    report = Report(rows)
    assert (report.tier, report.failed, report.limits) == (tier, failed, limits)


def test_json() -> None:
    found = to_json(Report((GOOD, SLOW)))
    assert found["tier"] == "degraded"
    assert found["expect"] == EXPECTATION[Tier.DEGRADED]
    assert (found["failed"], found["limited_by"]) == (False, ["tcmalloc"])
    assert found["rows"][1] == {
        "check": "tcmalloc", "verdict": "warn", "fact": "not there", "remedy": "install it", "tier": "degraded",
    }  # fmt: skip


def test_text() -> None:
    assert to_text(Report((GOOD, SLOW))).splitlines() == [
        "ok    cpu       fast",
        "warn  tcmalloc  not there",
        "                -> install it",
        "",
        "performance: degraded (limited by tcmalloc)",
        f"  {EXPECTATION[Tier.DEGRADED]}",
    ]
    assert to_text(Report(())).splitlines()[1] == "performance: optimised"
