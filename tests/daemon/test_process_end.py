"""The end of a process whose threads hang, by what its exit code and standard error say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.daemon_process import SOON_S, fake_config

# `serve` itself, but for the daemon, which reads a pipe in a thread and ends.
PROGRAM = """
import asyncio, os, sys
from pathlib import Path
from launcher import cli
from launcher.base.errors import LauncherError
from launcher.daemon import main, process

process.END_S = float(os.environ["END_S"])
pipe, how = sys.argv.pop(1), sys.argv.pop(1)

async def serve(*_, **__):
    reading = asyncio.create_task(asyncio.to_thread(Path(pipe).read_text))
    await asyncio.sleep(0.1)
    if how == "refused":
        raise LauncherError("cannot serve: it is used", "use another")
    if how == "mistake":
        raise ZeroDivisionError("by zero")
    if how == "read":
        await reading

main.serve = serve
sys.exit(cli.main())
"""
LATE = "a thread that reads a disk does not end within 0.2 s: the daemon ends without it"


def ended(tmp_path: Path, how: str, pipe: Path, end_s: float = 0.2) -> tuple[int, str]:
    config = tmp_path / "config.toml"
    config.write_text(fake_config(instances=1) + f'[control]\nsocket = "{tmp_path}/c.sock"\n')
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, pipe, how, "serve", "-c", config],
        env=os.environ | {"STATE_DIRECTORY": str(tmp_path / "state"), "END_S": str(end_s)},
        check=False, capture_output=True, text=True, timeout=SOON_S,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("well", 0, []),
        ("refused", 2, ["cannot serve: it is used", "use another"]),
        ("mistake", 1, ["Traceback (most recent call last):", "ZeroDivisionError: by zero"]),
    ],
)
def test_a_thread_that_hangs_is_not_waited_for(tmp_path: Path, how: str, code: int, said: list[str]) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    found, text = ended(tmp_path, how, pipe)
    assert found == code, text
    lines = text.splitlines()
    late = next(number for number, line in enumerate(lines) if LATE in line)
    after = lines[late + 1 :]
    assert [after[0], after[-1]] == said if said else after == []


@pytest.mark.parametrize(("how", "code"), [("read", 0), ("refused", 2)])
def test_threads_that_end_are_nothing_to_say(tmp_path: Path, how: str, code: int) -> None:
    (file := tmp_path / "file").write_text("x")
    found, text = ended(tmp_path, how, file, SOON_S)
    assert (found, "does not end within" in text) == (code, False), text
