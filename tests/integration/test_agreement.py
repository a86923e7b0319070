"""Usage ledger, /metrics and clients count the same, while instances die, streams are cut and clients leave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos.agreement import books, compare
from chaos.clients import Client, Result
from chaos.wire import Wire
from support.daemon_process import DaemonProcess, eventually

pytestmark = pytest.mark.timeout(900)

TESTS = Path(__file__).resolve().parents[1]
SECONDS = 3.0
QUICK = {f"NUMA_LAUNCHER_PROXY__{name}_TIMEOUT_S": "1" for name in ("FIRST_TOKEN", "ANSWER", "IDLE", "HUNG")}
KINDS = (
    "chat",
    "chat",
    "chat",
    "completions",
    "completions",
    "unstreamed",
    "leaver",
    "leaver",
    "odd",
    "slow",
)


def config(folder: Path) -> str:
    command = [
        sys.executable, "-m", "chaos.engine", "--uds", "{uds}", "--model", "{name}", "--log", str(folder / "faults"),
        "--seed", "1", "--faults", "0.25", "--token-s", "0.003",
    ]  # fmt: skip
    return f"""
[[models]]
name = "chaos"
path = "chaos"
max_num_seqs = 16
[layout]
instances_per_socket = 2
[engine]
kind = "command"
command = {json.dumps(command)}
[engine.env]
PYTHONPATH = "{TESTS}"
[usage]
path = "{folder}/usage.db"
[supervision]
probe_interval_s = 0.3
backoff_initial_s = 0.1
backoff_max_s = 0.2
crash_limit = 1000
"""


async def ask(address: str, kill: Callable[[], object]) -> list[Result]:
    """Ask for a while; one instance is killed in the middle of it."""
    results: list[Result] = []
    until = time.monotonic() + SECONDS
    asyncio.get_running_loop().call_later(SECONDS / 2, kill)
    async with asyncio.TaskGroup() as group:
        for number, kind in enumerate(KINDS):
            group.create_task(Client(number, kind, 1, address, results).run(until))
    return results


def idle(daemon: DaemonProcess) -> dict[str, Any] | None:
    """The sums of requests, once none is in flight."""
    requests = daemon.status().get("requests")
    return requests if requests and not requests["in_flight"] else None


async def metrics(address: str) -> str:
    wire = Wire(address)
    page = await wire.get("/metrics")
    wire.close()
    return page.decode()


def test_they_agree(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, config(tmp_path), QUICK)
    try:
        daemon.wait_ready(2)
        address = f"127.0.0.1:{daemon.port}"
        pid = daemon.slot(0)["pid"]
        results = asyncio.run(ask(address, lambda: os.kill(pid, signal.SIGKILL)))
        requests = eventually(lambda: idle(daemon), what="no request in flight")
        accepted = requests["accepted"]
        page = asyncio.run(metrics(address))
        ledger = tmp_path / "usage.db"
        found = compare(results, books(ledger, accepted), page, accepted)
        assert found["wrong"] == [], found
        outcomes = {result.outcome for result in results}
        assert {"exact", "aborted"} <= outcomes
        assert requests["continued"] > 0
        assert found["equal to their clients' counts"] > 5
        print(found)
    finally:
        daemon.end()
    assert compare(results, books(ledger, accepted), page, accepted)["wrong"] == []
