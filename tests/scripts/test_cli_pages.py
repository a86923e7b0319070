"""The manual page and the completions, as man and real shells take them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_operations import Backstage, FakeOperations, slot_status
from support.terminal import Terminal

from launcher.cli import VERBS

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "configs" / "shell"
PAGE = FILES / "numa-launcher.1"


@pytest.fixture(autouse=True, scope="module")
def _programs() -> None:
    for program in ("man", "mandoc", "zsh", "fish"):
        assert shutil.which(program), f"there is no {program}: scripts/test installs it"


def test_they_are_fresh(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts" / "cli_pages.py"), str(tmp_path)], check=True)
    for file in tmp_path.iterdir():
        assert (FILES / file.name).read_text() == file.read_text(), f"{file.name} is stale: run scripts/docs"
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in FILES.iterdir()}


# --- man ------------------------------------------------------------------------------------------


def test_man_shows_every_verb_and_has_nothing_to_say() -> None:
    done = subprocess.run(
        ["man", "--warnings", "-l", str(PAGE)], check=True, capture_output=True, text=True,
        env=os.environ | {"MANWIDTH": "80", "LC_ALL": "C.UTF-8", "MANROFFOPT": "-c", "MAN_KEEP_FORMATTING": ""},
    )  # fmt: skip
    assert done.stderr == ""
    for verb in VERBS:
        assert f"numa-launcher {verb}" in done.stdout
    for heading in ("NAME", "SYNOPSIS", "VERBS", "EXIT STATUS", "ENVIRONMENT", "FILES", "SEE ALSO"):
        assert f"\n{heading}\n" in done.stdout
    assert "--deadline S" in done.stdout


def test_mandoc_has_nothing_to_say() -> None:
    done = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "warning", str(PAGE)], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


# --- shells ---------------------------------------------------------------------------------------


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A daemon with three slots, our command in the PATH, and no start-up files of anybody."""
    operations = FakeOperations(slots={n: slot_status(n) for n in (0, 1, 12)})
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    command = bin_folder / "numa-launcher"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m launcher "$@"\n')
    command.chmod(0o755)
    with Backstage(str(tmp_path / "c.sock"), operations) as daemon:
        yield {
            "NUMA_LAUNCHER_SOCKET": daemon.path, "PATH": f"{bin_folder}:{os.environ['PATH']}", "HOME": str(tmp_path),
            "PS1": "READY> ", "ENV": "", "BASH_SILENCE_DEPRECATION_WARNING": "1",
        }  # fmt: skip


# What is typed before Tab, and the line that comes of it.
TYPED = [
    ("numa-launcher quar\t", "numa-launcher quarantine"),
    ("numa-launcher drain --dead\t", "numa-launcher drain --deadline"),
    ("numa-launcher hold 0 --fo\t", "numa-launcher hold 0 --force"),
    ("numa-launcher restart 12\t", "numa-launcher restart 12"),
    ("numa-launcher why 1\t\t", "12"),
    ("numa-launcher plan --color al\t", "numa-launcher plan --color always"),
    ("numa-launcher key rev\t", "numa-launcher key revoke"),
]


def completes(terminal: Terminal) -> None:
    """One shell for all: zsh takes seconds to collect its completions."""
    for step, (typed, completed) in enumerate(TYPED):
        terminal.type(f"clear; echo STEP''{step}\r")
        terminal.shows(f"STEP{step}")
        terminal.type(typed)
        terminal.shows(completed)
        terminal.type("\x15")
    terminal.type("exit\r")
    assert terminal.ended() == 0


def test_bash(environ: dict[str, str]) -> None:
    with Terminal(["bash", "--norc", "--noprofile", "-i"], 100, 24, environ) as terminal:
        terminal.shows("READY>")
        terminal.type(f"source {FILES / 'numa-launcher.bash'}\r")
        completes(terminal)


def test_zsh(environ: dict[str, str], tmp_path: Path) -> None:
    with Terminal(["zsh", "-f", "-i"], 100, 24, environ) as terminal:
        terminal.shows("READY>")
        terminal.type(f"fpath=({FILES} $fpath); autoload -Uz compinit; compinit -u -d {tmp_path / 'dump'}\r")
        completes(terminal)


def test_zsh_asks_the_daemon_only_to_complete_a_slot() -> None:
    """An expansion that is not escaped runs each time zsh loads the file: at every Tab, once for each verb."""
    expansions = re.findall(r"(.)\$\(numa-launcher", (FILES / "_numa-launcher").read_text())
    assert expansions
    assert set(expansions) == {"\\"}


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("numa-launcher quar", ["quarantine"]),
        ("numa-launcher restart ", ["0", "1", "12"]),
        ("numa-launcher drain 0 --dead", ["--deadline"]),
        ("numa-launcher plan --color ", ["auto", "always", "never"]),
    ],
)
def test_fish(environ: dict[str, str], typed: str, offered: list[str]) -> None:
    done = subprocess.run(
        ["fish", "--no-config", "-c", f'source {FILES / "numa-launcher.fish"}; complete -C "{typed}"'],
        check=True, capture_output=True, text=True, env=os.environ | environ,
    )  # fmt: skip
    assert done.stderr == ""
    assert [line.partition("\t")[0] for line in done.stdout.splitlines()] == offered


def test_the_slots_for_scripts(environ: dict[str, str]) -> None:
    done = subprocess.run(
        ["numa-launcher", "status", "--slots"],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | environ,
    )
    assert done.stdout == "0\n1\n12\n"
