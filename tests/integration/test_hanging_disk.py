"""A daemon whose state folder lies on a disk that hangs: requests are served, it is said, and a restart serves, too."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.daemon_process import SOON_S, DaemonProcess, eventually
from support.ledger_file import entries

from launcher.accounts.ledger_file import open_reader

LIBRARY = Path(__file__).parents[1] / "support" / "hanging_disk.c"
# Bound on control requests; other jobs may use the cpus.
STATUS_S = 2.0
GROWTH_BYTES = 64 << 20
FOREVER = 1e12


@pytest.mark.long
def test_a_state_folder_that_hangs(start: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    library, hangs, state = tmp_path / "hanging.so", tmp_path / "hangs", tmp_path / "d0" / "state"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, LIBRARY, "-ldl"], check=True)
    daemon = start(
        more=f'[audit]\npath = "{state}/audit"\n',
        environ={"LD_PRELOAD": str(library), "HANGS_BELOW": f"{state}", "HANGS_WHILE": str(hangs)},
    )
    daemon.wait_ready(2)
    assert all(daemon.answers() for _ in range(20))
    eventually(lambda: entries_of(state) == 20)
    assert not problems(daemon)
    before = memory(daemon)

    hangs.touch()
    asked, began = 0, time.monotonic()
    while len(problems(daemon)) < 2:  # of ledger and audit trail
        assert daemon.answers()
        asked += 1
        assert time.monotonic() - began < SOON_S
    assert asked > 5
    # The daemon looks at its sinks now and then: the log is later than the status.
    eventually(lambda: "a write takes longer than 5 s" in daemon.log.read_text(), what="the line of the log")
    for _ in range(200):
        assert daemon.answers()
    assert memory(daemon) - before < GROWTH_BYTES

    daemon.process.kill()  # its threads wait for the disk
    daemon.process.wait(SOON_S)
    daemon.nothing_left()
    daemon.restart()
    daemon.wait_ready(2)
    assert daemon.answers()
    assert problems(daemon)

    hangs.unlink()
    eventually(lambda: not problems(daemon))
    eventually(lambda: entries_of(state) >= 21)

    hangs.touch()
    assert problems(daemon) == []  # a thread reads today's requests
    daemon.end()


def problems(daemon: DaemonProcess) -> list[Any]:
    """Warnings of `status`, which answers in time, about the disk."""
    began = time.monotonic()
    warnings = daemon.status()["warnings"]
    assert time.monotonic() - began < STATUS_S
    return [text for text in warnings if "see whether its disk answers" in text]


def memory(daemon: DaemonProcess) -> int:
    return int(psutil.Process(daemon.process.pid).memory_info().rss)


def entries_of(state: Path) -> int:
    with closing(open_reader(state / "usage" / "usage.db")) as reader:
        return len(list(entries(reader, 0, FOREVER)))
