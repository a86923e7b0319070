"""What scripts/install and scripts/uninstall say; tests/integration and tests/vm run them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNITS = (
    "numa-launcher.service",
    "numa-launcher.socket",
    "numa-launcher-control.socket",
    "numa-launcher.slice",
    "numa-launcher-dashboard.service",
    "numa-launcher-ray.service",
    "numa-launcher-ingress.service",
)


# What man and the shells look for below /usr/local/share.
SHELL_FILES = {
    "numa-launcher.1": "man/man1/numa-launcher.1",
    "numa-launcher.bash": "bash-completion/completions/numa-launcher",
    "_numa-launcher": "zsh/site-functions/_numa-launcher",
    "numa-launcher.fish": "fish/vendor_completions.d/numa-launcher.fish",
}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ((), "numa-launcher[vllm]"),
        (("--without-vllm",), "numa-launcher[command]"),
        (("--fleet",), "numa-launcher[vllm,fleet]"),
    ],
)
def test_a_dry_run_says_what_would_be_done(more: tuple[str, ...], what: str) -> None:
    done = run("scripts/install", "--dry-run", *more)
    assert done.returncode == 0, done.stderr
    assert f"would install {what} from {ROOT}" in done.stdout
    assert (
        ("haproxy" in done.stdout)
        == ("write /etc/numa-launcher/fleet.toml" in done.stdout)
        == bool("--fleet" in more)
    )
    for unit in UNITS:
        assert f"/etc/systemd/system/{unit}" in done.stdout
    for file in SHELL_FILES.values():
        assert f"/usr/local/share/{file}" in done.stdout


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--wheel",), "unknown argument '--wheel'"),
        (("--wheels",), "--wheels needs a folder"),
        (("--keep", "0"), "--keep needs a number from 1 to 99, not '0'"),
        (("--keep",), "--keep needs a number from 1 to 99, not ''"),
        (("--root", "/nowhere"), "--root needs a folder, not '/nowhere'"),
        (("--wheels", "/nowhere"), "there is no wheel of numa-launcher in '/nowhere'"),
    ],
)
def test_install_refuses(words: tuple[str, ...], why: str) -> None:
    done = run("scripts/install", *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"cannot install: {why}\n  what to do: ")


def test_compiling_is_asked_for_by_0_or_1() -> None:
    environment = {**os.environ, "NUMA_LAUNCHER_COMPILE": "yes"}
    done = subprocess.run(
        ["scripts/install", "--dry-run"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("cannot install: NUMA_LAUNCHER_COMPILE is 'yes', not 0 or 1\n")


def test_uninstall_takes_what_install_puts() -> None:
    done = run("scripts/uninstall", "--dry-run", "--purge")
    assert done.returncode == 0, done.stderr
    for path in (*(f"/etc/systemd/system/{unit}" for unit in UNITS), "/usr/lib/sysusers.d/numa-launcher.conf",
                 "/usr/lib/tmpfiles.d/numa-launcher.conf", "/opt/numa-launcher", "/etc/numa-launcher",
                 *(f"/usr/local/share/{file}" for file in SHELL_FILES.values())):  # fmt: skip
        assert path in done.stdout
    assert {path.name for path in (ROOT / "configs" / "shell").iterdir()} == SHELL_FILES.keys()
    installs = (ROOT / "scripts" / "releases.sh").read_text()
    for file, where in SHELL_FILES.items():
        assert f'"configs/shell/{file}:$share/{where}"\n' in installs
    assert {path.name for path in (ROOT / "systemd").iterdir()} == {*UNITS, "sysusers.conf", "tmpfiles.conf"}
