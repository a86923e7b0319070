"""The first commands of the README: vLLM, run twice, and llama.cpp in a bare environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.budgets import bound
from support.ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(7200)]
ROOT = Path(__file__).parents[2]
# A run that hangs ends here. A second run takes 53 s on two idle cores; scripts/time-start measures it.
QUICKSTART_S = 3000
# The README's minute for llama.cpp, from nothing to an answer; here with the stop that follows.
FIRST_RUN_S = 60


def quickstart(*arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """One run with its wall time."""
    began = time.monotonic()
    done = subprocess.run(
        [str(ROOT / "scripts" / "quickstart"), "--once", "--port", str(free_port()), *arguments],
        check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=QUICKSTART_S,
    )  # fmt: skip
    return done, time.monotonic() - began


@pytest.mark.parametrize("run", ["once", pytest.param("again", marks=pytest.mark.release)])
def test_quickstart(run: str) -> None:
    done, took = quickstart()
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert "cannot" not in said + done.stderr
    slots = re.findall(
        r"slot (\d+): verified: (\d+) threads of (\d+) processes on cpus (\S+) \(planned (\S+)\)", said
    )
    assert len(slots) >= 1
    assert all(found == planned and int(threads) > 20 for _, threads, _, found, planned in slots)
    assert re.search(r"\[\d+ events in [\d.]+ s", said)
    assert re.search(r"endpoint +http://127\.0\.0\.1:\d+/v1", said)
    assert "stopped" in said
    print(f"{run}: {took:.0f} s")


def test_a_folder_without_a_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done, _ = quickstart("--model", str(tmp_path))
    assert done.returncode == 2
    assert "config.json" in done.stderr


COMPILER = """#!/bin/sh
echo "$0 $*" >>"$HOME/compiled"
exit 1
"""


@pytest.fixture
def bare() -> Iterator[Path]:
    """A folder with a short path: sockets are in the copy of the checkout, and their paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="qs-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.bounded
def test_llama_cpp_in_a_bare_environment(bare: Path) -> None:
    """A copy of the checkout without an environment, a home without caches, no variables, no compiler."""
    copy, home, tools = bare / "copy", bare / "home", bare / "tools"
    for folder in (copy, home, tools):
        folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("launcher", "scripts"):
        shutil.copytree(
            ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.sha256")
        )
    for name in ("cc", "gcc", "c++", "g++", "clang"):
        (tools / name).write_text(COMPILER)
        (tools / name).chmod(0o755)
    # The way to the package index is the machine's.
    network = {
        name: value for name, value in os.environ.items() if re.fullmatch(r"PIP_\w+|(?i:\w+_proxy)", name)
    }
    base = Path(sys.base_prefix) / "bin"
    began = time.monotonic()
    done = subprocess.run(
        [str(copy / "scripts/quickstart"), "--engine", "llama.cpp", "--once", "--port", str(free_port())],
        env=network | {"HOME": str(home), "PATH": f"{tools}:{base}:/usr/local/bin:/usr/bin:/bin"},
        cwd=home, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=QUICKSTART_S,
    )  # fmt: skip
    took_s = time.monotonic() - began
    print(f"llama.cpp: {took_s:.1f} s")
    log = copy / ".quickstart/install.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text() if log.exists() else "")
    said = done.stdout
    assert "cannot" not in said + done.stderr
    slots = re.findall(r"slot \d+: verified: \d+ threads of 1 process on cpus (\S+) \(planned (\S+)\)", said)
    assert slots
    assert all(found == planned for found, planned in slots)
    assert re.search(r"demo: ( [a-z]+){5}", said), "an answer in words"
    assert re.search(r"\[\d+ events in [\d.]+ s", said)
    assert "stopped" in said
    assert took_s <= bound(FIRST_RUN_S)
    assert not (home / "compiled").exists(), (home / "compiled").read_text()
    packages = {path.name for path in (copy / ".venv").glob("lib/python3*/site-packages/*")}
    assert "xllamacpp" in packages
    assert not packages & {"torch", "vllm", "systemd"}
    # Run again with its own file, and its name is the model's.
    model = shutil.copy(copy / ".quickstart/tiny-model.gguf", home / "my-model.gguf")
    again = subprocess.run(
        [str(copy / "scripts/quickstart"), "--engine=llama.cpp", "--once", "--model", model, "--port", str(free_port())],
        env={"HOME": str(home), "PATH": f"{base}:/usr/bin:/bin"},
        cwd=home, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=QUICKSTART_S,
    )  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr
    assert "is installed already" in again.stdout
    assert re.search(r"my-model: ( [a-z]+){5}", again.stdout)
