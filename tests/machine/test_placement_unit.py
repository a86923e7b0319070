"""Whose unit a process is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.machine.placement import is_instance_of, is_system_service, unit_of


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("0::/system.slice/numa-launcher.service\n", "numa-launcher.service"),
        ("1:name=x:/a.service\n0::/system.slice/b.service\n", "b.service"),
        ("0::/user.slice/user-0.slice/user@0.service/app.slice/x.service\n", None),
        ("0::/user.slice/user-0.slice/session-1.scope\n", None),
        ("0::/docker/0123\n", None),
        ("", None),
    ],
)
def test_the_unit_is_the_last_of_the_path(tmp_path: Path, text: str, unit: str | None) -> None:
    (tmp_path / "cgroup").write_text(text)
    assert unit_of(tmp_path) == unit


def test_no_process_no_unit(tmp_path: Path) -> None:
    assert unit_of(tmp_path) is None


def test_instances_are_ours(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/numa.slice/numa-launcher.slice/numa-launcher-slot3.service\n")
    assert is_instance_of("numa-launcher.service", tmp_path)
    assert not is_instance_of("another.service", tmp_path)
    assert not is_instance_of(None, tmp_path)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("4:memory:/system.slice/a.service\n1:name=systemd:/system.slice/a.service\n0::/\n", True),
        ("1:name=systemd:/system.slice/a.service\n0::/system.slice/a.service\n", True),
        ("0::/system.slice/a.service\n", True),
        ("4:memory:/system.slice/a.service\n1:name=systemd:/\n", False),
        ("1:name=systemd:/user.slice/user-0.slice/user@0.service/x.service\n", False),
    ],
)
def test_a_system_service_under_any_version_of_cgroups(tmp_path: Path, text: str, is_one: bool) -> None:
    (tmp_path / "cgroup").write_text(text)
    assert is_system_service(tmp_path) == is_one
