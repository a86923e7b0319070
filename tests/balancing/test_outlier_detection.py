"""Ejection, half-open return, stragglers."""

from __future__ import annotations

import pytest

from launcher.balancing.outlier_detection import ENOUGH, OutlierDetection


def admits(outliers: OutlierDetection, now: float) -> bool:
    outliers.end_pause(now)
    return outliers.admits


def test_failures_in_a_row_eject_unless_a_success_is_between() -> None:
    outliers = OutlierDetection()
    assert not outliers.failed(0.0, 3, 10.0)
    assert not outliers.failed(0.0, 3, 10.0)
    outliers.succeeded()
    assert not outliers.failed(0.0, 3, 10.0)
    assert not outliers.failed(0.0, 3, 10.0)
    assert outliers.failed(1.0, 3, 10.0)
    assert not admits(outliers, 10.9)


def test_after_the_pause_a_single_request_tries_it() -> None:
    outliers = OutlierDetection()
    outliers.eject(5.0)
    assert not admits(outliers, 4.9)
    assert admits(outliers, 5.0)
    trial, other = 1, 2
    outliers.bound(trial)
    assert not admits(outliers, 5.1)
    outliers.left(other)
    assert not admits(outliers, 5.1)
    outliers.left(trial)
    assert admits(outliers, 5.2)
    assert outliers.failed(5.3, 3, 10.0)
    assert not admits(outliers, 15.2)
    assert admits(outliers, 15.3)
    outliers.succeeded()
    assert admits(outliers, 15.4)
    assert not outliers.half_open


def test_a_straggler_and_its_recovery_are_each_reported_once() -> None:
    outliers = OutlierDetection()
    outliers.slowness.add(3.0)
    assert not outliers.judge(1.0)
    for _ in range(ENOUGH):
        outliers.slowness.add(3.0)
    assert not outliers.judge(0.0)
    assert outliers.judge(1.0)
    assert outliers.straggler
    assert outliers.weight == pytest.approx(1 / 3)
    assert not outliers.judge(1.0)
    for _ in range(500):
        outliers.slowness.add(1.0)
    assert outliers.judge(1.0)
    assert not outliers.straggler
    assert outliers.weight == 1.0
