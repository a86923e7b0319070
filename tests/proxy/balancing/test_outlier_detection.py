"""Ejection, half-open return, slow start, stragglers."""

from __future__ import annotations

from proxy.balancing.builders import ticket

from launcher.proxy.balancing.outlier_detection import ENOUGH, OutlierDetection


def test_so_many_failures_in_a_row_eject_and_a_good_end_forgives() -> None:
    health = OutlierDetection()
    assert not health.failed(0.0, 3, 10.0)
    assert not health.failed(0.0, 3, 10.0)
    health.succeeded()
    assert not health.failed(0.0, 3, 10.0)
    assert not health.failed(0.0, 3, 10.0)
    assert health.failed(1.0, 3, 10.0)
    assert not health.admits(10.9)


def test_after_the_pause_one_request_tries_it() -> None:
    health = OutlierDetection()
    health.eject(5.0)
    assert not health.admits(4.9)
    assert health.admits(5.0)
    trial, other = ticket(), ticket()
    health.bound(trial)
    assert not health.admits(5.1)
    health.left(other)
    assert not health.admits(5.1)
    health.left(trial)
    assert health.admits(5.2)
    assert health.failed(5.3, 3, 10.0)
    assert not health.admits(15.2)
    assert health.admits(15.3)
    health.succeeded()
    assert health.admits(15.4)
    assert not health.half_open


def test_a_fresh_one_gets_its_share_bit_by_bit() -> None:
    health = OutlierDetection()
    assert health.share(0.0, 20.0) == 1.0
    health.ready_since = 100.0
    assert health.share(100.0, 20.0) == 0.1
    assert health.share(110.0, 20.0) == 0.5
    assert health.share(120.0, 20.0) == 1.0
    assert health.ready_since is None


def test_a_straggler_is_told_once_and_its_recovery_too() -> None:
    health = OutlierDetection()
    health.slowness.add(3.0)
    assert not health.judge(1.0)
    for _ in range(ENOUGH):
        health.slowness.add(3.0)
    assert not health.judge(0.0)
    assert health.judge(1.0)
    assert health.straggler
    assert not health.judge(1.0)
    for _ in range(500):
        health.slowness.add(1.0)
    assert health.judge(1.0)
    assert not health.straggler
