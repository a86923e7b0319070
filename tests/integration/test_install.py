"""scripts/install and scripts/uninstall, run below a folder: pip installs releases from small wheels."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALL, UNINSTALL = ROOT / "scripts" / "install", ROOT / "scripts" / "uninstall"
# An environment with pip is made in 4 s on a slow machine that does nothing else.
INSTALL_S = 300
UNIT = "etc/systemd/system/numa-launcher.service"

SCRIPT = """
import sys, time
from pathlib import Path
def main():
    if len(sys.argv) > 1:  # a daemon: says that it runs, and imports the rest when it is told to
        Path(sys.argv[1]).touch()
        while Path(sys.argv[1]).exists():
            time.sleep(0.02)
    from launcher import later
    print(later.VERSION)
"""


def make_wheel(folder: Path, version: str, *, files: int = 0, mib: int = 0, needs: str = "") -> Path:
    """A minimal numa-launcher, optionally with more files or one large file."""
    folder.mkdir(exist_ok=True)
    info = f"numa_launcher-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: numa-launcher\nVersion: {version}\nProvides-Extra: command\n"
    inside = {
        "launcher/__init__.py": SCRIPT,
        "launcher/later.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": metadata + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nnuma-launcher = launcher:main\n",
        f"{info}/RECORD": "",
    } | {f"launcher/more/f{number}.py": "x = 1\n" for number in range(files)}
    with zipfile.ZipFile(
        folder / f"numa_launcher-{version}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED
    ) as wheel:
        for name, text in inside.items():
            wheel.writestr(name, text)
        if mib:
            wheel.writestr("launcher/large", bytes(mib << 20))
    return folder


class Host:
    """A folder used as /, and the installer run on it."""

    def __init__(self, top: Path, wheels: Path, python: Path) -> None:
        """`python`: makes the environments of releases."""
        self.top, self.wheels, self.python = top, wheels, python
        self.prefix = top / "opt" / "numa-launcher"
        self.command = top / "usr" / "local" / "bin" / "numa-launcher"
        self.daemons: list[subprocess.Popen[str]] = []

    def words(self, version: str, **how: object) -> list[str]:
        wheels = make_wheel(self.wheels / version, version, **how)  # type: ignore[arg-type]
        return [str(INSTALL), "--without-vllm", "--root", str(self.top), "--wheels", str(wheels)]

    def run(self, *words: str, umask: int = 0o022, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=INSTALL_S, umask=umask, cwd=cwd,
            stdin=subprocess.DEVNULL, env=environment(self.python),
        )  # fmt: skip

    def install(
        self, version: str, *more: str, umask: int = 0o022, **how: object
    ) -> subprocess.CompletedProcess[str]:
        return self.run(*self.words(version, **how), *more, umask=umask)

    def roll_back(self) -> subprocess.CompletedProcess[str]:
        return self.run(str(INSTALL), "--root", str(self.top), "--rollback")

    def version(self) -> str:
        """The version that a new process runs."""
        return self.run(str(self.command)).stdout.strip()

    def releases(self) -> list[str]:
        """Versions of all releases, complete or not."""
        return sorted(
            re.sub(r"-\d{8}T\d{6}Z$", "", path.name) for path in (self.prefix / "releases").iterdir()
        )

    def daemon(self) -> subprocess.Popen[str]:
        """A process that runs from the current release."""
        up = self.top / "up"
        daemon = subprocess.Popen([self.command, str(up)], stdout=subprocess.PIPE, text=True)
        self.daemons.append(daemon)
        deadline = time.monotonic() + INSTALL_S
        while not up.exists():
            assert time.monotonic() < deadline
            assert daemon.poll() is None
            time.sleep(0.02)
        return daemon

    def ended(self, daemon: subprocess.Popen[str]) -> str:
        """The version that it imports when it ends."""
        (self.top / "up").unlink()
        return daemon.communicate(timeout=INSTALL_S)[0].strip()


PYTHON = Path(sys.executable).resolve()
# `python -m venv --clear FOLDER` as a copy: ensurepip unpacks the same pip each time, for seconds.
COPYING = """#!/usr/bin/env bash
set -e
[[ "$*" == "-m venv --clear "* ]] || exec {python} "$@"
rm -rf "$4"
mkdir -p "$(dirname "$4")"
cp -a {venv} "$4"
sed -i "s|{venv}|$4|g" "$4"/pyvenv.cfg "$4"/bin/pip* "$4"/bin/[aA]ctivate*
"""


def environment(python: Path = PYTHON) -> dict[str, str]:
    """The environment, with a Python that can create virtual environments."""
    return os.environ | {"PYTHON": str(python), "PIP_NO_COMPILE": "1"}


@pytest.fixture(scope="module")
def copying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that makes new environments by copying one. test_any_umask_and_any_working_folder has the real one."""
    folder = tmp_path_factory.mktemp("python")
    venv = folder / "venv"
    subprocess.run([PYTHON, "-m", "venv", venv], check=True, timeout=INSTALL_S)
    python = folder / "python"
    python.write_text(COPYING.format(python=PYTHON, venv=venv))
    python.chmod(0o755)
    return python


@pytest.fixture
def host(tmp_path: Path, copying: Path) -> Iterator[Host]:
    (tmp_path / "top").mkdir()
    (tmp_path / "wheels").mkdir()
    made = Host(tmp_path / "top", tmp_path / "wheels", copying)
    yield made
    for daemon in made.daemons:
        daemon.kill()
        daemon.communicate()


def closed_to_others(folder: Path) -> list[str]:
    """Files and folders that other users cannot read or enter."""
    wanted = {True: 0o005, False: 0o004}
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if not path.is_symlink() and path.stat().st_mode & wanted[path.is_dir()] != wanted[path.is_dir()]
    ]


@pytest.mark.long
def test_any_umask_and_any_working_folder(host: Host, tmp_path: Path) -> None:
    """All users can run it and nobody else reads the log. sudo keeps the working folder: nothing is imported from there."""
    for name in ("pip", "venv", "ensurepip", "sitecustomize", "launcher"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'hit')!r}, 'w')\n")
    done = subprocess.run(
        host.words("1.0"), cwd=tmp_path, env=environment() | {"PYTHONPATH": str(tmp_path)}, umask=0o077,
        capture_output=True, text=True, check=False, timeout=INSTALL_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert host.version() == "1.0"
    assert not (tmp_path / "hit").exists()
    ours = {"opt/numa-launcher/install.log", "opt/numa-launcher/index.txt", "etc/numa-launcher/secrets"}
    assert {*closed_to_others(host.top)} == ours
    assert stat.S_IMODE((host.prefix / "install.log").stat().st_mode) == 0o600
    assert host.command.readlink() == host.prefix / "current/venv/bin/numa-launcher"

    # Uninstall removes numa-launcher's files and keeps others.
    host.command.unlink()
    host.command.write_text("another program")
    (host.top / "etc/numa-launcher/config.toml").write_text("mine")
    done = host.run(str(UNINSTALL), "--root", str(host.top))
    assert done.returncode == 0, done.stderr
    left = [path for path in host.top.rglob("*") if path.is_file() or path.is_symlink()]
    assert sorted(left) == sorted([host.command, host.top / "etc/numa-launcher/config.toml"])
    for _ in range(2):
        done = host.run(str(UNINSTALL), "--root", str(host.top), "--purge")
        assert done.returncode == 0, done.stderr
        assert [path for path in host.top.rglob("*") if path.is_file()] == [host.command]


def test_upgrade_and_rollback(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that cannot be compiled runs the sources."""
    with monkeypatch.context() as patch:
        patch.setenv("NUMA_LAUNCHER_COMPILE", "1")
        done = host.install("1.0")  # there is no mypy among the wheels
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not compiled, the Python sources run: see " in done.stdout
    assert host.roll_back().returncode == 2
    assert host.version() == "1.0"
    daemon = host.daemon()

    done = host.install("2.0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert host.version() == "2.0"
    assert host.ended(daemon) == "1.0", "what runs goes on with its own release"

    (host.top / UNIT).write_text("of 2.0")
    for version in ("1.0", "2.0"):
        done = host.roll_back()
        assert done.returncode == 0, done.stderr
        assert host.version() == version
    assert (host.top / UNIT).read_text() == (ROOT / "systemd/numa-launcher.service").read_text()

    (previous,) = (host.prefix / "releases").glob("1.0-*")
    (previous / "venv/bin/python").unlink()
    done = host.roll_back()
    assert done.returncode == 2
    assert "cannot be imported" in done.stderr
    assert host.version() == "2.0"


def test_rollback_without_a_previous_release(host: Host) -> None:
    done = host.roll_back()
    assert done.returncode == 2
    assert done.stderr.startswith("cannot install: there is no previous release\n  what to do: ")


@pytest.mark.long
def test_failed_and_killed_upgrades_change_nothing(host: Host) -> None:
    assert host.install("1.0").returncode == 0
    before = tree(host.top)

    lacking, broken = host.words("2.0", needs="no-such-package-at-all>=1"), host.words("2.1")
    (wheel,) = (host.wheels / "2.1").iterdir()
    wheel.write_bytes(wheel.read_bytes()[:-200])
    for words in (lacking, broken):
        done = host.run(*words)
        assert done.returncode == 1
        assert "what to do: " in done.stderr
        assert tree(host.top) == before

    words = host.words("3.0", files=4000)
    log = host.prefix / "install.log"
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env=environment(host.python),
    ) as killed:  # fmt: skip
        deadline = time.monotonic() + INSTALL_S
        while "numa_launcher-3.0" not in log.read_text():  # pip has begun
            assert killed.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(killed.pid, signal.SIGKILL)
    assert host.releases() == ["1.0", "3.0"], "half of one is there"
    assert host.version() == "1.0"
    assert host.roll_back().returncode == 2, "half of one is none"

    done = host.install("3.0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "never completed, removed" in done.stdout
    assert host.version() == "3.0"
    assert host.releases() == ["1.0", "3.0"]


def tree(top: Path) -> dict[str, str]:
    """All files but logs: targets of links, modification times of files."""
    return {
        str(path.relative_to(top)): str(path.readlink()) if path.is_symlink() else str(path.stat().st_mtime_ns)
        for path in top.rglob("*")
        if (path.is_symlink() or path.is_file()) and path.name not in {"install.log", "index.txt", ".lock"}
        and "__pycache__" not in path.parts
    }  # fmt: skip


@pytest.mark.long
def test_old_releases_are_removed_when_unused(host: Host) -> None:
    for version in ("1.0", "2.0"):
        assert host.install(version, "--keep", "1").returncode == 0
        if version == "1.0":
            daemon = host.daemon()
    done = host.install("3.0", "--keep", "1")
    assert "is kept: processes run from it" in done.stdout
    assert host.releases() == ["1.0", "2.0", "3.0"]
    assert host.ended(daemon) == "1.0"
    assert host.install("4.0", "--keep", "1").returncode == 0
    assert host.releases() == ["3.0", "4.0"], "the current one, and the one to go back to"


@pytest.mark.release
def test_rollback_to_the_former_layout(host: Host) -> None:
    """One environment changed in place, with a unit that names it."""
    old = host.prefix / "venv"
    wheels = make_wheel(host.wheels / "0.1", "0.1")
    subprocess.run([sys.executable, "-m", "venv", old], check=True, timeout=INSTALL_S)
    subprocess.run([old / "bin/pip", "install", "-q", "--no-index", "--find-links", wheels, "numa-launcher"],
                   check=True, timeout=INSTALL_S)  # fmt: skip
    (host.top / UNIT).parent.mkdir(parents=True)
    (host.top / UNIT).write_text("PATH=/opt/numa-launcher/venv/bin")
    host.command.parent.mkdir(parents=True)
    host.command.symlink_to(old / "bin/numa-launcher")
    daemon = host.daemon()

    done = host.install("1.0", "--keep", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert host.version() == "1.0"
    assert host.releases() == ["1.0", "old-layout"]
    assert "current/venv/bin" in (host.top / UNIT).read_text()
    assert host.ended(daemon) == "0.1"

    assert host.roll_back().returncode == 0
    assert host.version() == "0.1"
    assert (host.top / UNIT).read_text() == "PATH=/opt/numa-launcher/venv/bin"

    for version in ("2.0", "3.0"):
        assert host.install(version, "--keep", "1").returncode == 0
    assert host.releases() == ["2.0", "3.0"]
    assert old.readlink() == Path("current/venv"), "configurations that name it go on"
    assert host.version() == "3.0"


def test_concurrent_installations_are_refused(host: Host) -> None:
    host.prefix.mkdir(parents=True)
    with (host.prefix / ".lock").open("w") as lock:
        done = subprocess.run(
            ["flock", "-n", str(lock.name), *host.words("1.0")], capture_output=True, text=True, check=False, timeout=60
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("cannot install: another installation is running\n")


@pytest.fixture
def small_disk(host: Host) -> Iterator[Host]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk: run scripts/test integration as root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m,mode=755", "tmpfs", host.top], check=True)
    yield host
    subprocess.run(["umount", host.top], check=True)


def test_a_full_disk_keeps_the_old_release(small_disk: Host) -> None:
    host = small_disk
    done = host.install("1.0")
    assert done.returncode == 0, done.stdout + done.stderr
    before = tree(host.top)
    done = host.install("2.0", mib=128)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert tree(host.top) == before
    assert host.version() == "1.0"
