"""The service around a tuning run, with a recorded systemd. tests/vm/test_tune.py has the real one."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.fake_operations import Backstage, FakeOperations

from launcher.base.errors import LauncherError, RefusedError
from launcher.measure.tune.service import SERVICE, UNITS, Service, claim_cores


class FakeSystemd:
    """systemctl and systemd-run: units and what was called."""

    def __init__(self, active: Sequence[str], lock: Path, *, guard_works: bool = True) -> None:
        self.units = dict.fromkeys(UNITS, "inactive") | dict.fromkeys(active, "active")
        self.calls: list[str] = []
        self.fails: str | None = None
        self._lock = lock
        self._guard_works = guard_works
        self._guard: list[str] = []

    def run(self, argv: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
        verb = argv[0] if argv[0] != "systemctl" else argv[1]
        self.calls.append(verb)
        if verb == self.fails:
            return subprocess.CompletedProcess(argv, 1, "", "Access denied\nmore\n")
        match verb:
            case "show":
                self._look_at_lock()
                out = "\n".join(f"Id={unit}\nActiveState={state}\n" for unit, state in self.units.items())
                return subprocess.CompletedProcess(argv, 0, out, "")
            case "systemd-run":
                self._guard = [unit for unit in UNITS if unit in argv]
            case "stop" | "start":
                state = "inactive" if verb == "stop" else "activating"
                self.units |= {unit: state for unit in argv if unit in UNITS}
        return subprocess.CompletedProcess(argv, 0, "", "")

    def _look_at_lock(self) -> None:
        """The guard: flock(1) waits for the lock, then starts the units."""
        if not (self._guard and self._guard_works):
            return
        with self._lock.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        self.units |= dict.fromkeys(self._guard, "activating")
        self._guard = []


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "service.lock"


def service(systemd: FakeSystemd, tmp_path: Path) -> Service:
    return Service(systemd.run, booted=tmp_path)


@pytest.mark.parametrize("active", [[SERVICE], ["numa-launcher.socket"], list(UNITS)])
def test_an_active_unit_is_refused_with_the_remedy(tmp_path: Path, lock: Path, active: list[str]) -> None:
    systemd = FakeSystemd(active, lock)
    with pytest.raises(RefusedError, match=active[0]) as refused:
        claim_cores(service(systemd, tmp_path), [], stop=False, lock=lock)
    assert "--stop-service" in refused.value.remedy
    assert systemd.calls == ["show"]


def test_the_guard_waits_before_anything_is_stopped(tmp_path: Path, lock: Path) -> None:
    systemd = FakeSystemd(UNITS, lock)
    with claim_cores(service(systemd, tmp_path), [], stop=True, lock=lock):
        assert systemd.calls == ["show", "systemd-run", "stop", "stop"]
        assert set(systemd.units.values()) == {"inactive"}
    assert set(systemd.units.values()) == {"activating"}


def test_only_what_was_active_is_started_again(tmp_path: Path, lock: Path) -> None:
    systemd = FakeSystemd([SERVICE], lock)
    with claim_cores(service(systemd, tmp_path), [], stop=True, lock=lock):
        pass
    assert systemd.units == {**dict.fromkeys(UNITS, "inactive"), SERVICE: "activating"}


def test_an_error_within_starts_the_service_again(tmp_path: Path, lock: Path) -> None:
    systemd = FakeSystemd([SERVICE], lock)
    with pytest.raises(KeyboardInterrupt), claim_cores(service(systemd, tmp_path), [], stop=True, lock=lock):
        raise KeyboardInterrupt
    assert systemd.units[SERVICE] == "activating"


def test_a_guard_that_was_stopped_by_hand_is_replaced(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.measure.tune.service._RESTORE_S", 0.0)
    systemd = FakeSystemd([SERVICE], lock, guard_works=False)
    with claim_cores(service(systemd, tmp_path), [], stop=True, lock=lock):
        pass
    assert systemd.units[SERVICE] == "activating"
    assert systemd.calls[-1] == "start"


def test_without_a_guard_the_service_is_not_stopped(tmp_path: Path, lock: Path) -> None:
    systemd = FakeSystemd([SERVICE], lock)
    systemd.fails = "systemd-run"
    with (
        pytest.raises(LauncherError, match="Access denied") as failed,
        claim_cores(service(systemd, tmp_path), [], stop=True, lock=lock),
    ):
        raise AssertionError("not reached")
    assert "root" in failed.value.remedy
    assert systemd.units[SERVICE] == "active"


def test_a_stop_that_fails_starts_the_service_again(tmp_path: Path, lock: Path) -> None:
    systemd = FakeSystemd([SERVICE], lock)
    systemd.fails = "stop"
    with (
        pytest.raises(LauncherError, match=f"cannot stop {SERVICE}: Access denied"),
        claim_cores(service(systemd, tmp_path), [], stop=True, lock=lock),
    ):
        raise AssertionError("not reached")
    assert systemd.units[SERVICE] != "inactive"


def test_nothing_is_asked_without_systemd(tmp_path: Path, lock: Path) -> None:
    systemd = FakeSystemd([SERVICE], lock)
    with claim_cores(Service(systemd.run, booted=tmp_path / "none"), [], stop=True, lock=lock):
        assert systemd.calls == []


@pytest.mark.parametrize("stop", [True, False])
def test_a_daemon_that_is_no_service_is_refused(tmp_path: Path, lock: Path, stop: bool) -> None:
    systemd = FakeSystemd([], lock)
    with Backstage(str(tmp_path / "c.sock"), FakeOperations()) as daemon:
        with pytest.raises(RefusedError, match=r"a numa-launcher daemon \(pid \d+\)") as refused:
            claim_cores(
                service(systemd, tmp_path), [str(tmp_path / "none"), daemon.path], stop=stop, lock=lock
            )
        assert SERVICE in refused.value.remedy
    assert "stop" not in systemd.calls


def test_sockets_of_an_active_service_are_not_connected_to(tmp_path: Path, lock: Path) -> None:
    """systemd would start the service."""
    systemd = FakeSystemd([SERVICE], lock)
    with (
        Backstage(str(tmp_path / "c.sock"), FakeOperations()) as daemon,
        claim_cores(service(systemd, tmp_path), [daemon.path], stop=True, lock=lock),
    ):
        assert systemd.units[SERVICE] == "inactive"
