"""A short run of `scripts/chaos`: every bound holds while eight instances fail on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.main import parse, run
from chaos.verdict import readable


@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_nothing_is_lost_in_two_minutes(tmp_path: Path) -> None:
    report = run(parse(["--seconds", "120", "--clients", "32", "--faults", "0.15", "--keep", str(tmp_path)]))
    print(readable(report))
    assert report["broken"] == [], readable(report)
    assert report["cut_plain_streams"] > 50
    assert report["restarts"] > 10
    assert {(one["model"], one["counters"]) for one in report["hangs"]} >= {
        ("chaos", False),
        ("whole", False),
    }
    assert report["descriptors"]["open"] > 0
