"""Instances in real containers with real cpusets; the image is built from this host's Python.

podman's, or docker's with NUMA_LAUNCHER_TEST_RUNTIME=docker and dockerd installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from integration.load import Load
from support.daemon_process import FAKE_ENGINE, DaemonProcess, eventually, fake_config

from launcher.base.cpuset import CpuSet

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0, reason="only root can give containers cpusets, where cgroups are not delegated"
    ),
]

IMAGE = "localhost/numa-launcher-test:1"
PASSING = "localhost/numa-launcher-passing:1"
SECRET = "hf_this_is_no_real_token"
# Slow probes, so that the container's exit is seen before a failed probe.
QUICK = "[supervision]\nbackoff_initial_s = 0.2\nbackoff_max_s = 0.5\nprobe_interval_s = 3"

Start = Callable[..., DaemonProcess]


RUNTIME = os.environ.get("NUMA_LAUNCHER_TEST_RUNTIME", "podman")
CGROUP = {"podman": "libpod-", "docker": "/docker/"}[RUNTIME]


class Runtime:
    """A container runtime with its own store, separate from this host's containers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._dockerd: subprocess.Popen[bytes] | None = None
        self.environ = self._dockers() if RUNTIME == "docker" else self._podmans()
        with tarfile.open(folder / "image.tar", "w") as tar:
            for name in ("etc", "proc", "sys", "dev", "tmp", "run", "usr"):
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(entry)
            # Docker puts its init into /sbin, which must not be this host's then.
            links = ("/bin", "/lib", "/lib64", *(["/sbin"] if RUNTIME == "podman" else []))
            for link in filter(Path.is_symlink, map(Path, links)):
                tar.add(link, link.name)
        self("import", str(folder / "image.tar"), IMAGE)

    def _podmans(self) -> dict[str, str]:
        # podman refuses a run folder of more than 50 characters, and raises limits beyond what a container of CI has.
        folder = self._folder
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        _, processes = resource.getrlimit(resource.RLIMIT_NPROC)
        processes = 32768 if processes < 0 else min(processes, 32768)
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/root"\nrunroot = "{folder}/run"\n'
        )
        # crun knows no mixture of the two cgroup versions.
        is_v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
        (folder / "containers.conf").write_text(
            f'[containers]\ndefault_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]\n'
            f'[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "none"\nstatic_dir = "{folder}/root/libpod"\n'
            f'tmp_dir = "{folder}/run/libpod"\nvolume_path = "{folder}/volumes"\n'
            + ("" if is_v2 else 'runtime = "runc"\n')
        )
        return {
            "CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf",
            "CONTAINERS_CONF": f"{folder}/containers.conf",
        }

    def _dockers(self) -> dict[str, str]:
        folder = self._folder
        listens = f"unix://{folder}/docker.sock"
        with (folder / "dockerd.log").open("wb") as log:
            self._dockerd = subprocess.Popen(
                ["dockerd", "--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=vfs",
                 f"--host={listens}", f"--pidfile={folder}/pid", f"--data-root={folder}/root",
                 f"--exec-root={folder}/run"],
                stdout=log, stderr=log,
            )  # fmt: skip
        eventually((folder / "docker.sock").exists, what=f"dockerd, see {folder}/dockerd.log")
        return {"DOCKER_HOST": listens}

    def __call__(self, *words: str) -> str:
        done = subprocess.run(
            [RUNTIME, *words],
            check=False, capture_output=True, text=True, timeout=600, env=os.environ | self.environ,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def containers(self) -> set[str]:
        """Names of all containers, in any state."""
        return set(self("ps", "--all", "--format={{.Names}}").split())

    def end(self) -> None:
        """Removes everything."""
        if left := self.containers():
            self("rm", "--force", *left)
        if self._dockerd is None:
            self("image", "rm", "--all", "--force")
        else:
            self._dockerd.terminate()
            self._dockerd.wait(60)
            netns = self._folder / "run" / "netns" / "default"  # it leaves this mounted
            subprocess.run(["umount", str(netns)], check=True)
        shutil.rmtree(self._folder)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    found = Runtime(Path(tempfile.mkdtemp(prefix="nl-", dir="/tmp")))
    yield found
    found.end()


def volumes() -> list[str]:
    """Mounts for Python and the fake engine."""
    folders = {Path(sys.prefix), Path(sys.base_prefix), FAKE_ENGINE.parent}
    outside = sorted(str(folder) for folder in folders if not folder.is_relative_to("/usr"))
    return [f"--volume={folder}:{folder}:ro" for folder in ("/usr", *outside)]


@pytest.fixture
def start(runtime: Runtime, tmp_path: Path) -> Iterator[Start]:
    """Starts daemons with containers; each is stopped at the end and must leave no container."""
    token = tmp_path / "token"
    token.write_text(SECRET)
    running: list[DaemonProcess] = []

    def begin(
        *arguments: str,
        instances: int = 2,
        options: tuple[str, ...] = (),
        image: str = IMAGE,
        python: str = sys.executable,
        folder: Path = tmp_path,
    ) -> DaemonProcess:
        config = fake_config(*arguments, instances=instances).replace(f'"{sys.executable}"', f'"{python}"')
        config += f'runtime = "{RUNTIME}"\nimage = "{image}"\nhf_token_file = "{token}"\n'
        config += f"runtime_args = {json.dumps([*volumes(), *options])}\n{QUICK}\n"
        running.append(DaemonProcess(folder, config, runtime.environ))
        return running[-1]

    yield begin
    for daemon in running:
        if daemon.process.returncode is None:
            daemon.end()
    assert runtime.containers() == set()


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def client_of(daemon: DaemonProcess, slot: int) -> psutil.Process:
    """The runtime's client process of a slot; its parent is the shim."""
    name = f"--name=numa-launcher-slot{slot}-"
    (found,) = (
        child
        for child in psutil.Process(daemon.process.pid).children(recursive=True)
        if any(word.startswith(name) for word in child.cmdline()) and child.name() == RUNTIME
    )
    return found


def command_lines() -> str:
    words = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words.append(entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return "\n".join(words)


def back(daemon: DaemonProcess, slot: int, generation: int) -> dict[str, Any]:
    """Waits until a later generation of a slot is ready."""
    found: dict[str, Any] = eventually(
        lambda: (s := daemon.slot(slot))["generation"] > generation and s["state"] == "ready" and s,
        what=f"slot {slot} back, see {daemon.log}",
    )
    return found


def main_process(daemon: DaemonProcess, slot: int) -> psutil.Process:
    """A ready slot's: the daemon looks for it in intervals, so it can be found after the instance is ready."""
    return psutil.Process(eventually(lambda: daemon.slot(slot)["pid"], what="its main process to be found"))


def test_two_slots_in_containers(start: Start, runtime: Runtime) -> None:
    daemon = start("--token-s", "0.03", "--children", "2")
    slots = daemon.wait_ready(2)["slots"]
    assert len(runtime.containers()) == 2
    for slot in slots:
        # The slot's process is the container's, not the client's; the kernel confines all of it to the slot.
        main = main_process(daemon, slot["slot"])
        assert status_of(main.pid)["NSpid"].split()[-1] == "1"
        processes = [main, *main.children(recursive=True)]
        assert len(processes) == 4, "an init, the engine, and two children of its"
        for process in processes:
            found = status_of(process.pid)
            assert CpuSet.parse(found["Cpus_allowed_list"]) == CpuSet.parse(slot["cpus"])
            assert found["Mems_allowed_list"] == slot["membind"] or not slot["membind"]
            assert CGROUP in Path(f"/proc/{process.pid}/cgroup").read_text()
        # A process cannot leave its cpus: the cpuset confines it, not its own affinity.
        elsewhere = CpuSet(os.sched_getaffinity(0)) - CpuSet.parse(slot["cpus"])
        if elsewhere:
            with pytest.raises(OSError, match="Invalid argument"):
                os.sched_setaffinity(processes[-1].pid, set(elsewhere))
        environ = Path(f"/proc/{processes[1].pid}/environ").read_text()
        assert f"HF_TOKEN={SECRET}" in environ
        verified = eventually(
            lambda number=slot["slot"]: daemon.slot(number)["verified"], what="a look at it"
        )
        assert (verified["ok"], verified["processes"]) == (True, 4), verified
    assert SECRET not in command_lines()
    with Load(daemon.url, "fake", workers=8) as load:
        for number in ("0", "1"):
            done = daemon.cli("restart", number)
            assert done.returncode == 0, done.stderr
        eventually(lambda: load.tally.completed > 50, what="answers")
    assert load.tally.failures == []
    requests = daemon.status()["requests"]
    assert requests["accepted"] == requests["completed"] == load.tally.completed
    daemon.end()
    assert runtime.containers() == set()


@pytest.mark.long
def test_killed_processes_leave_no_container(start: Start, runtime: Runtime) -> None:
    daemon = start("--children", "2")
    daemon.wait_ready(2)
    names = runtime.containers()
    for victim, slot in (("client", 0), ("shim", 1), ("engine", 0)):
        before = daemon.slot(slot)
        main = main_process(daemon, slot)
        processes = [main, *main.children(recursive=True)]
        client = client_of(daemon, slot)
        shim = client.parent()
        assert shim is not None
        {"client": client, "shim": shim, "engine": processes[1]}[victim].kill()
        after = back(daemon, slot, before["generation"])
        assert after["last_cause"]["name"] == "killed-by-operator", victim
        assert not any(process.is_running() for process in processes), victim
        assert runtime.containers() == names, victim
    daemon.descendants()
    # Only the daemon is killed: the shims remove their containers.
    daemon.process.kill()
    daemon.process.wait()
    eventually(lambda: runtime.containers() == set(), what="the shims to remove all containers")
    daemon.nothing_left()


def test_the_next_daemon_removes_containers_left_behind(start: Start, runtime: Runtime) -> None:
    daemon = start("--children", "2", instances=1)
    daemon.wait_ready(1)
    main, shim = main_process(daemon, 0), client_of(daemon, 0).ppid()
    # Both at once, as systemd kills a unit, so that neither sees the other one exit.
    for name in (signal.SIGSTOP, signal.SIGKILL):
        for pid in (daemon.process.pid, shim):
            os.kill(pid, name)
    daemon.process.wait()
    assert len(runtime.containers()) == 1
    assert main.is_running(), "the container goes on"
    again = start("--children", "2", instances=1, folder=daemon.folder)
    again.wait_ready(1)
    assert not main.is_running()
    assert len(runtime.containers()) == 1


@pytest.mark.long
def test_a_container_at_its_memory_limit(start: Start) -> None:
    daemon = start(options=("--memory=96m", "--memory-swap=96m"))
    daemon.wait_ready(2)
    # The kernel reports the victim's pid, which is known from the first probe of an instance on.
    eventually(lambda: daemon.slot(0)["verified"], what="a look at it")
    daemon.post(0, "/fault", {"kind": "eat 400"})
    after = back(daemon, 0, 1)
    assert after["last_cause"]["name"] == "cgroup-oom", after["last_cause"]
    assert daemon.slot(1)["generation"] == 1, "its neighbour has memory of its own"


def test_a_command_missing_in_the_image(start: Start) -> None:
    daemon = start(python="no-such-engine", instances=1)
    slot = eventually(
        lambda: daemon.status() and (s := daemon.slot(0))["state"] == "failed" and s, what="failed"
    )
    assert slot["last_cause"]["name"] == "command-not-found", slot["last_cause"]
    assert slot["restarts"] == 0


def test_a_missing_image(start: Start, runtime: Runtime) -> None:
    daemon = start(image=PASSING)
    assert daemon.process.wait(60) == 2, "refused before anything starts"
    assert f"{RUNTIME} pull {PASSING}" in daemon.log.read_text()
    # Removed while the daemon runs: the next start reports it and is not retried endlessly.
    runtime("tag", IMAGE, PASSING)
    daemon = start(image=PASSING, folder=daemon.folder)
    daemon.wait_ready(2)
    runtime("rmi", PASSING)
    assert daemon.cli("restart", "0").returncode == 1
    slot = daemon.slot(0)
    assert (slot["state"], slot["last_cause"]["name"]) == ("failed", "image-missing")
    assert daemon.slot(1)["state"] == "ready"
