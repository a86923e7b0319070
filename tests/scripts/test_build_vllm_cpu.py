"""scripts/build-vllm-cpu: its arguments, its number of compilers, and what it would run. The build needs GitHub."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.engines.build_jobs import available_bytes, build_jobs

ROOT = Path(__file__).resolve().parents[2]


def build(*arguments: str, cxx: str = "g++") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["scripts/build-vllm-cpu", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=240,
        stdin=subprocess.DEVNULL, env={"PATH": "/usr/bin:/bin", "CXX": cxx, "TMPDIR": "/tmp"},
    )  # fmt: skip


@pytest.fixture
def compiler(tmp_path: Path) -> str:
    """A new one."""
    path = tmp_path / "g++-13"
    path.write_text("#!/bin/sh\necho 13.2.0\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "vllm/requirements/build").mkdir(parents=True)
    (tmp_path / "vllm/requirements/cpu.txt").touch()
    return tmp_path / "vllm"


def test_shellcheck_is_content() -> None:
    assert shutil.which("shellcheck"), "scripts/test installs shellcheck"
    done = subprocess.run(
        ["shellcheck", "scripts/build-vllm-cpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout


def test_help() -> None:
    done = build("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: scripts/build-vllm-cpu")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--frobnicate"], "unknown argument '--frobnicate'"),
        (["--jobs"], "--jobs needs a value"),
        (["--jobs", "0"], "--jobs '0' is not a number"),
        (["--jobs", "many"], "--jobs 'many' is not a number"),
        (["--version", "latest"], "--version 'latest' is no release"),
        (["--source", "/etc"], "'/etc' is no checkout of vLLM"),
        (["--version", "0.32.0", "--source", "/etc"], "exclude each other"),
        (["--python", "/no/such/python"], "there is no such Python"),
    ],
)
def test_refuses(arguments: list[str], said: str) -> None:
    done = build("--dry-run", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "what to do:" in done.stderr
    assert done.stdout == ""


def test_an_old_or_missing_compiler_is_refused(tmp_path: Path, source: Path) -> None:
    old = tmp_path / "g++-11"
    old.write_text("#!/bin/sh\necho 11.4.0\n")
    old.chmod(0o755)
    done = build("--source", str(source), "--python", sys.executable, "--jobs", "1", cxx=str(old))
    assert done.returncode == 2
    assert "is 11.4.0, and vLLM's kernels need 12.3 or newer" in done.stderr
    assert "does not run" in build("--dry-run", "--python", sys.executable, cxx="/no/such/g++").stderr


def test_as_many_compilers_as_memory_holds(compiler: str, source: Path) -> None:
    done = build("--dry-run", "--source", str(source), "--python", sys.executable, cxx=compiler)
    assert done.returncode == 0, done.stderr
    memory = available_bytes(Path("/proc/meminfo").read_text())
    # Memory moves while this runs.
    around = {
        build_jobs(len(os.sched_getaffinity(0)), memory + shift)
        for shift in (-(4 << 30), -(2 << 30), 0, 2 << 30, 4 << 30)
    }
    assert any(f"MAX_JOBS={jobs} " in done.stdout for jobs in around), done.stdout


def test_what_it_would_run(compiler: str) -> None:
    done = build("--dry-run", "--version", "v0.32.0", "--jobs", "3", "--python", sys.executable, cxx=compiler)
    assert done.returncode == 0, done.stderr
    assert "building with 3 compilers at once" in done.stdout
    commands = [line.removeprefix("+ ") for line in done.stdout.splitlines() if line.startswith("+ ")]
    assert commands[0].startswith("git clone --depth 1 --branch v0.32.0 ")
    assert all("/tmp/vllm-0.32.0/requirements/" in command for command in commands[1:3])
    assert commands[3].startswith("env VLLM_TARGET_DEVICE=cpu MAX_JOBS=3 ")
    assert commands[3].endswith("--wheel-dir dist-vllm /tmp/vllm-0.32.0")
    assert "+ git" not in build("--dry-run", "--jobs", "3", "--python", "/no/such").stdout
