"""Cost of a real daemon: what a client counted is what the report has; prices of a reload; energy that cannot be read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.daemon_process import DaemonProcess, eventually

from launcher.control.client import ControlClient
from launcher.machine.load import POWERCAP

CONFIG = '[cost]\nhourly = 360\nwatts = "measured"\nprice_per_kwh = 0.3\n'
COST = "/cost?since=30d"


def completion(daemon: DaemonProcess, tokens: int, *, stream: bool) -> None:
    body = {"model": "fake", "prompt": "a b c", "max_tokens": tokens, "stream": stream}
    status, text = daemon.ask("/v1/completions", body)
    assert status == 200
    assert text


def metric(daemon: DaemonProcess, name: str) -> dict[str, float]:
    page = ControlClient(str(daemon.socket)).text("/metrics")
    lines = [line.rpartition(" ") for line in page.splitlines() if line.startswith(f"{name}{{")]
    return {labels: float(value) for labels, _, value in lines}


def reported(daemon: DaemonProcess, *words: str) -> dict[str, Any]:
    done = daemon.cli("cost", "--json", *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_what_was_served_is_what_is_priced(start: Callable[..., DaemonProcess]) -> None:
    daemon = start("--token-s", "0.1", more=CONFIG)
    daemon.wait_ready(2)
    for stream in (True, True, False):
        completion(daemon, 10, stream=stream)
    eventually(lambda: daemon.get(COST)["requests"] == 3)
    found = reported(daemon)
    assert found["requests"] == 3
    assert found["output_tokens"] == 30
    seconds = found["end"] - found["begin"]
    assert found["bill"] == pytest.approx(seconds / 10)
    assert found["allocated"]["output"] == pytest.approx(seconds / 10 / 30 * 1e6)
    # Of the two streams: how long they take is up to the machine. The third response would make it a third at least.
    done = daemon.cli("usage", "--requests", "--json")
    streams = json.loads(done.stdout)["requests"][:2]
    prefill_s = sum(each["first_byte_s"] - each["queued_s"] for each in streams)
    decode_s = sum(each["duration_s"] - each["first_byte_s"] for each in streams)
    assert decode_s > 0
    assert found["input_share"] == pytest.approx(prefill_s / (prefill_s + decode_s), abs=0.01)
    assert found["references"][0]["name"] == "GPT-4o-mini"
    status = daemon.status()["cost"]
    assert status["currency"] == "USD"
    (spent,) = metric(daemon, "numa_launcher_cost_total").values()
    assert 0 < spent <= (time.time() - daemon.status()["since"] + 1) / 10
    if not POWERCAP.exists():
        log = daemon.log.read_text()
        assert log.count("cannot measure energy") == 1
        assert found["kwh_measured_share"] == 0.0

    daemon.config.write_text(daemon.config.read_text().replace("hourly = 360", "hourly = 720"))
    assert daemon.cli("reload").returncode == 0
    found = reported(daemon)
    assert found["rent"] == pytest.approx((found["end"] - found["begin"]) / 5)
    eventually(lambda: daemon.get(COST)["utilisation"])  # metered every 5 s
    assert reported(daemon)["utilisation"]

    daemon.end()
    ledger = next(daemon.folder.rglob("usage.db"))
    found = reported(daemon, "--file", str(ledger), "-c", str(daemon.config))
    assert (found["requests"], found["output_tokens"]) == (3, 30)
    assert 0 < found["utilisation"] < 1
    assert found["slots"] == 2
