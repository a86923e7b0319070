"""A short run of `scripts/chaos`: every bound holds while eight instances fail on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.main import parse, run
from chaos.verdict import readable


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seconds", [80, pytest.param(120, marks=pytest.mark.release)])
def test_nothing_is_lost(tmp_path: Path, seconds: int) -> None:
    # An instance that hangs is found within a minute: the first two begin before 20 s.
    report = run(
        parse(["--seconds", str(seconds), "--clients", "32", "--faults", "0.15", "--keep", str(tmp_path)])
    )
    print(readable(report))
    assert report["broken"] == [], readable(report)
    assert report["cut_plain_streams"] > 50 * seconds / 120
    assert report["restarts"] > 10 * seconds / 120
    assert {(one["model"], one["counters"]) for one in report["hangs"]} >= {
        ("chaos", False),
        ("whole", False),
    }
    assert report["descriptors"]["open"] > 0
