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
        (("--engine", "llama.cpp"), "numa-launcher[llama-cpp]"),
    ],
)
def test_a_dry_run_says_what_would_be_done(tmp_path: Path, more: tuple[str, ...], what: str) -> None:
    # Below a folder: what an upgrade would install depends on the release that this machine has.
    done = run("scripts/install", "--dry-run", "--root", str(tmp_path), *more)
    assert done.returncode == 0, done.stderr
    assert f"would install {what} from {ROOT}" in done.stdout
    assert (
        ("haproxy" in done.stdout)
        == (f"write {tmp_path}/etc/numa-launcher/fleet.toml" in done.stdout)
        == bool("--fleet" in more)
    )
    for unit in UNITS:
        assert f"{tmp_path}/etc/systemd/system/{unit}" in done.stdout
    for file in SHELL_FILES.values():
        assert f"{tmp_path}/usr/local/share/{file}" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--wheel",), "unknown argument '--wheel'"),
        (("--wheels",), "--wheels needs a folder"),
        (("--engine", "llamacpp"), "--engine 'llamacpp' is no engine of this script"),
        (("--engine",), "--engine '' is no engine of this script"),
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


@pytest.mark.parametrize("var", ["var", "data/var"])
def test_purge_leaves_mounts(tmp_path: Path, var: str) -> None:
    """A model store that is mounted below our folders: its files stay, its mounts are named, all else goes. So where /var is
    a symbolic link to a larger disk: mountinfo has no such paths."""
    top, store = tmp_path / "top", tmp_path / "store"
    state, cache = top / var / "lib/numa-launcher", top / var / "cache/numa-launcher"
    if var != "var":
        top.mkdir()
        (top / "var").symlink_to(var)
    models = state / "huggingface" / "hub [1]"
    for folder in (
        models,
        cache,
        state / "usage",
        top / "opt/numa-launcher",
        top / "etc/numa-launcher/secrets",
        store,
    ):
        folder.mkdir(parents=True)
    (store / "weights").write_text("shared")
    (state / "usage" / "ledger.sqlite").touch()
    (state / "huggingface" / "token\nof two lines").touch()
    # The cache is a mount itself; both are binds of a folder on the same file system, so with the same device number.
    script = (
        f'mount --bind "{store}" "{models}" && mount --bind "{store}" "{cache}" && '
        f'scripts/uninstall --purge --dry-run --root "{top}" && test -e "{state}/usage/ledger.sqlite" && '
        f'scripts/uninstall --purge --root "{top}"'
    )
    private = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--map-root-user", "--mount")
    done = run(*private, "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert (store / "weights").read_text() == "shared"
    assert [path for path in top.rglob("*") if path.is_file()] == []
    assert models.is_dir()
    assert cache.is_dir()
    assert sorted(path.name for path in state.iterdir()) == ["huggingface"]
    assert not (top / "etc/numa-launcher").exists()
    for mount in (models, cache):
        assert done.stdout.count(f"left: {mount} is a mount") == 2


def test_of_a_link_in_place_of_a_folder_only_the_link_is_removed(tmp_path: Path) -> None:
    top, disk = tmp_path / "top", tmp_path / "disk"
    disk.mkdir()
    (disk / "weights").touch()
    (top / "var/lib").mkdir(parents=True)
    link = top / "var/lib/numa-launcher"
    link.symlink_to(disk)
    done = run("scripts/uninstall", "--purge", "--root", str(top))
    assert done.returncode == 0, done.stderr
    assert f"left: {link} is a link to {disk}" in done.stdout
    assert not link.is_symlink()
    assert (disk / "weights").exists()


def test_help_names_what_purge_removes() -> None:
    text = run("scripts/uninstall", "--help").stdout
    assert "usage ledger" in text
    assert "mount" in text
