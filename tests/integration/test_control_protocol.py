"""Runs every curl line of docs/control-protocol.md against a daemon."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.daemon_process import DaemonProcess, eventually

from launcher.accounts.cost import CostReport
from launcher.accounts.report_values import UsageReport, UsageRequests
from launcher.accounts.timeline import Timeline
from launcher.control.protocol_page import ASK, SOCKET
from launcher.daemon.machine import MachineStatus
from launcher.daemon.status import SlotStatus, Status

pytestmark = pytest.mark.timeout(900)

Start = Callable[..., DaemonProcess]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "control-protocol.md"
REPORTS = {"usage": UsageReport, "requests": UsageRequests, "cost": CostReport, "req-1": Timeline}
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


@contextlib.contextmanager
def printing(daemon: DaemonProcess) -> Iterator[None]:
    """Slot 0 prints a line now and then: the pipe of a line that follows breaks with the one after the first."""
    eventually(lambda: daemon.slot(0)["state"] == "ready", what="slot 0 ready")
    enough = threading.Event()

    def say() -> None:
        while not enough.wait(0.2):
            daemon.post(0, "/fault", {"kind": "say more"})

    sayer = threading.Thread(target=say)
    sayer.start()
    try:
        yield
    finally:
        enough.set()
        sayer.join()


def test_every_line_of_the_page_works(start: Start) -> None:
    daemon = start(more="[supervision]\nprobe_interval_s = 0.2\nstop_timeout_s = 3\n[cost]\nhourly = 0.79\n")
    daemon.wait_ready(2)
    usage_is_reported(daemon)
    seen = []
    for line in lines():
        where = line.rpartition("/v1/")[2].rstrip("'").partition("?")[0]
        seen.append(where)
        with printing(daemon) if "follow=1" in line else contextlib.nullcontext():
            out = run(line, daemon)
        if where == "metrics":
            assert "numa_launcher_ready_instances" in out
            continue
        reply: dict[str, Any] = json.loads(out)
        assert "error" not in reply or where == "reload", reply
        check(line, where.rpartition("/")[2], reply, daemon)
    assert len(seen) >= 20
    daemon.end()
    usage_is_in_the_file(daemon)


def check(line: str, word: str, reply: dict[str, Any], daemon: DaemonProcess) -> None:
    match word:
        case "status":
            msgspec.convert(without_derived(reply), Status, strict=False)
        case "plan" | "topology" | "machine" | "measurements" | "config":
            check_plan(word, reply, daemon)
        case "history":
            assert reply["columns"][0] == "requests_per_s"
        case "events":
            assert len(reply["events"]) == 3
        case "logs":
            assert reply["text"] if "follow" in line else len(reply["lines"]) <= 2
        case "usage" | "requests" | "cost" | "req-1":
            msgspec.convert(reply, REPORTS[word])
        case "budgets":
            assert reply == {"budgets": []}
        case "elsewhere":
            assert reply == {"taken": 0, "ignored": []}
        case "reload":
            assert reply["stage"] == ("dry run" if "POST" in line else "none")
        case _:
            assert reply["slot"] == 0
            msgspec.convert(without_derived({"slots": [reply]})["slots"][0], SlotStatus, strict=False)
            eventually(lambda word=word: daemon.slot(0)["state"] == AFTER[word], what=word)


def check_plan(word: str, reply: dict[str, Any], daemon: DaemonProcess) -> None:
    match word:
        case "plan":
            assert len(reply["slots"]) == 2
        case "measurements":
            assert reply == {"measurements": []}
        case "topology":
            assert {cpu for core in reply["cores"] for cpu in core["cpus"]} >= os.sched_getaffinity(0)
        case "machine":
            msgspec.convert(reply, MachineStatus)
            assert len([share for share in reply["busy"] if share is not None]) >= len(
                os.sched_getaffinity(0)
            )
            assert [(slot["slot"], slot["misplaced"]) for slot in reply["slots"]] == [(0, []), (1, [])]
        case "config":
            assert reply["control"]["socket"] == str(daemon.socket)


def usage_is_reported(daemon: DaemonProcess) -> None:
    """What a client counted, in the ledger and in the daemon's reports of it, as soon as the response has ended."""
    tokens = Counter[str]()
    for _ in range(2):
        body = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
        _, text = daemon.ask("/v1/chat/completions", body, X_Request_Id="req-1")
        tokens.update(json.loads(text)["usage"])
    report = json.loads(daemon.cli("usage", "--by", "model", "--since", "today", "--json").stdout)
    (row,) = report["rows"]
    assert (row["name"], row["requests"], row["estimated"]) == ("fake", 2, 0)
    assert (row["prompt_tokens"], row["output_tokens"]) == (
        tokens["prompt_tokens"],
        tokens["completion_tokens"],
    )
    assert row["first_byte_p50_s"] > 0
    listed = daemon.cli("usage", "--requests")
    assert listed.stdout.count(" completed ") == 2, listed
    status = eventually(lambda: (found := daemon.status())["usage"] and found)
    assert (status["usage"]["requests"], status["usage"]["output_tokens"]) == (2, tokens["completion_tokens"])
    # `status` does not wait for a ledger whose reading takes longer than a moment.
    eventually(lambda: "today: 2 requests, " in daemon.cli("status").stdout)


def usage_is_in_the_file(daemon: DaemonProcess) -> None:
    """After the daemon's end."""
    words = ("usage", "--by", "instance", "--json", "-c", str(daemon.config))
    environ = os.environ | {"STATE_DIRECTORY": str(daemon.folder / "state")}
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *words], check=True, capture_output=True, text=True, env=environ
    )
    report = json.loads(done.stdout)
    assert report["total"]["requests"] == 2
    # The seconds of a slot are metered up to the end.
    assert {row["name"] for row in report["rows"] if row["ready_s"]} == {"0", "1"}
    assert "no such socket; the figures are from" in done.stderr


def without_derived(status: dict[str, Any]) -> dict[str, Any]:
    """`verified` has fields that are worked out from the rest: nothing can be made of it."""
    for slot in status["slots"]:
        slot["verified"] = None
    return status
