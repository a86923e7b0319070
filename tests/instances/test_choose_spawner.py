"""Which spawner a daemon uses, on captured hosts: files of /proc, /run and /sys below a folder."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.config.schema import Config
from launcher.instances.choose_spawner import choose_spawner
from launcher.instances.ports import Spawner
from launcher.instances.spawn_direct import DirectSpawner
from launcher.instances.spawn_systemd import SystemdSpawner

SERVICE = "/system.slice/numa-launcher.service"
V1 = "".join(
    f"{number}:{name}:{SERVICE}\n"
    for number, name in enumerate(("devices", "memory", "cpu,cpuacct", "name=systemd"), 2)
)
# Per layout: /proc/self/cgroup, and where the unified hierarchy's own file lies.
HOSTS = {
    # RHEL 8, with its kernel's defaults: the unified hierarchy has a line in proc, and is not mounted.
    "v1": (f"{V1}0::/\n", None),
    "v1-old-kernel": (V1, None),
    # Debian 10, Ubuntu 20.04.
    "hybrid": (f"{V1}0::{SERVICE}\n", "sys/fs/cgroup/unified/cgroup.controllers"),
    "v2": (f"0::{SERVICE}\n", "sys/fs/cgroup/cgroup.controllers"),
}


def host(folder: Path, cgroup: str, controllers: str | None, *, systemd: bool = True) -> Path:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(cgroup)
    (folder / "sys/fs/cgroup").mkdir(parents=True)
    if controllers is not None:
        (folder / controllers).parent.mkdir(parents=True, exist_ok=True)
        (folder / controllers).write_text("cpuset cpu memory\n")
    if systemd:
        (folder / "run/systemd/system").mkdir(parents=True)
    return folder


def choose(root: Path, **sections: Any) -> Spawner:
    # A user and group that every Debian has.
    config = msgspec.convert(
        {"models": [{"name": "m", "path": "m"}], "systemd": {"user": "daemon"}} | sections, Config
    )
    return choose_spawner(config, {}, CpuSet.parse("0"), root / "state", lambda _slot: None, root=root)


@pytest.fixture(autouse=True)
def _root_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


@pytest.mark.parametrize("name", ["v1", "v1-old-kernel", "hybrid"])
def test_a_service_on_cgroup_v1_does_not_start_engines_as_root_unasked(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        LauncherError, match=r"^cannot start instances as systemd units: .*cgroup v1"
    ) as caught:
        choose(host(tmp_path, *HOSTS[name]))
    assert "systemd.unified_cgroup_hierarchy=1" in caught.value.remedy
    assert 'supervision.spawner = "direct"' in caught.value.remedy


@pytest.mark.parametrize("name", HOSTS)
def test_the_direct_spawner_can_be_asked_for_by_name(tmp_path: Path, name: str) -> None:
    spawner = choose(host(tmp_path, *HOSTS[name]), supervision={"spawner": "direct"})
    assert isinstance(spawner, DirectSpawner)


@pytest.mark.parametrize("name", ["v1", "v1-old-kernel", "hybrid"])
def test_units_by_name_are_refused_there_too(tmp_path: Path, name: str) -> None:
    with pytest.raises(LauncherError, match=r"^cannot use supervision.spawner = 'systemd': .*cgroup v1"):
        choose(host(tmp_path, *HOSTS[name]), supervision={"spawner": "systemd"})


def test_units_where_all_is_there(tmp_path: Path) -> None:
    assert isinstance(choose(host(tmp_path, *HOSTS["v2"])), SystemdSpawner)


def test_a_service_without_the_instances_user_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="there is no user and group 'nobody-has-it'"):
        choose(host(tmp_path, *HOSTS["v2"]), systemd={"user": "nobody-has-it"})


@pytest.mark.parametrize(
    ("cgroup", "systemd", "runtime"),
    [
        (f"{V1}0::/\n", False, "host"),  # a container on such a host
        ("2:memory:/user.slice\n1:name=systemd:/user.slice/user-0.slice/session-1.scope\n", True, "host"),
        ("1:name=systemd:/user.slice/user-0.slice/user@0.service/x.service\n", True, "host"),
        (V1, True, "podman"),
    ],
)
def test_elsewhere_they_are_its_children_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cgroup: str, systemd: bool, runtime: str
) -> None:
    caplog.set_level(logging.INFO)
    engine = {"runtime": runtime} if runtime == "host" else {"runtime": runtime, "image": "vllm"}
    spawner = choose(host(tmp_path, cgroup, None, systemd=systemd), engine=engine)
    assert isinstance(spawner, DirectSpawner)
    assert "instances are the daemon's children: " in caplog.text


def test_an_ordinary_user_is_no_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert isinstance(choose(host(tmp_path, *HOSTS["v1"])), DirectSpawner)


def test_without_the_reader_of_the_journal_there_are_no_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "systemd", None)
    with pytest.raises(LauncherError, match="the package systemd-python is not installed") as refused:
        choose(host(tmp_path, *HOSTS["v2"]))
    assert "pip install systemd-python" in refused.value.remedy
