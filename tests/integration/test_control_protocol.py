"""Runs every curl line of docs/control-protocol.md against a daemon."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from integration.conftest import DaemonProcess, eventually

from launcher.control.docs import ASK, SOCKET
from launcher.daemon.status import SlotStatus, Status

pytestmark = pytest.mark.timeout(900)

Start = Callable[..., DaemonProcess]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "control-protocol.md"
MOVING = {"starting", "stopping"}
# The state of a slot after each verb.
AFTER = {
    "restart": "ready", "drain": "draining", "resume": "ready", "stop": "stopped", "start": "ready", "hold": "held",
    "release": "ready", "quarantine": "draining", "verify": "ready",
}  # fmt: skip


def lines() -> list[str]:
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    first, *others = block.splitlines()
    assert first == ASK
    return others


def run(line: str, daemon: DaemonProcess) -> str:
    """Runs a line in a shell; reads only the first line of an endless response."""
    if "follow=1" in line:
        line += " | head -n 1"
    script = f"{ASK.replace(SOCKET, str(daemon.socket))}\n{line}"
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True, timeout=240)
    # curl says so when head has read enough.
    assert not done.stderr or "Failure writing output" in done.stderr
    return done.stdout


def test_every_line_of_the_page_works(start: Start) -> None:
    daemon = start(more="[supervision]\nprobe_interval_s = 0.2\nstop_timeout_s = 3\n")
    daemon.wait_ready(2)
    seen = []
    for line in lines():
        where = line.rpartition("/v1/")[2].rstrip("'").partition("?")[0]
        seen.append(where)
        if "follow=1" in line:
            # Its pipe breaks with the next line that is printed: a restart prints some.
            daemon.cli("restart", "0", "--no-wait")
        out = run(line, daemon)
        if where == "metrics":
            assert "numa_launcher_ready_instances" in out
            continue
        reply: dict[str, Any] = json.loads(out)
        assert "error" not in reply or where == "reload", reply
        word = where.rpartition("/")[2]
        match word:
            case "status":
                msgspec.convert(without_derived(reply), Status, strict=False)
            case "plan":
                assert len(reply["slots"]) == 2
            case "config":
                assert reply["control"]["socket"] == str(daemon.socket)
            case "events":
                assert len(reply["events"]) == 3
            case "logs":
                assert reply["text"] if "follow" in line else len(reply["lines"]) <= 2
                eventually(lambda: daemon.slot(0)["state"] not in MOVING, what="settled")
            case "reload":
                assert reply["stage"] == ("dry run" if "POST" in line else "none")
            case _:
                assert reply["slot"] == 0
                msgspec.convert(without_derived({"slots": [reply]})["slots"][0], SlotStatus, strict=False)
                eventually(lambda word=word: daemon.slot(0)["state"] == AFTER[word], what=word)
    assert len(seen) >= 18


def without_derived(status: dict[str, Any]) -> dict[str, Any]:
    """`verified` has fields that are worked out from the rest: nothing can be made of it."""
    for slot in status["slots"]:
        slot["verified"] = None
    return status
