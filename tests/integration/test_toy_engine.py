"""A third engine from plan to crash, without a line of the launcher that knows it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import toy_engine
from support.daemon_process import SOON_S, DaemonProcess, eventually

TOY = Path(toy_engine.__file__)
COUNTING = "one two three four five six seven eight nine ten"


def config(*args: str) -> str:
    return f"""
[[models]]
name = "toy"
path = "toy"
[layout]
instances_per_socket = 2
[engine]
kind = "command"
command = ["toy", "{{uds}}"]
args = {json.dumps(args)}
[supervision]
backoff_initial_s = 0.2
""".replace('["toy", "{uds}"]', json.dumps([sys.executable, "{uds}"]))


Start = Callable[..., DaemonProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    daemons: list[DaemonProcess] = []

    def started(*args: str) -> DaemonProcess:
        daemons.append(DaemonProcess(tmp_path, config(*args), program=(str(TOY),)))
        return daemons[-1]

    yield started
    for daemon in daemons:
        daemon.end()


def streamed(daemon: DaemonProcess, words: int) -> tuple[str, list[dict[str, Any]], bool]:
    """Text, events, and whether the stream was whole."""
    body = {"model": "toy", "prompt": "Count:", "max_tokens": words, "temperature": 0, "stream": True}
    status, stream = daemon.ask("/v1/completions", body)
    assert status == 200, stream
    lines = [line[6:].strip() for line in stream.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    text = "".join(event["choices"][0]["text"] for event in events if event.get("choices"))
    return text, events, lines[-1] == "[DONE]"


def continued(daemon: DaemonProcess) -> float:
    found = [
        line
        for line in daemon.metrics().splitlines()
        if line.startswith("numa_launcher_streams_continued_total{") and "continued" in line
    ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def test_planned_started_probed_and_continued(start: Start) -> None:
    daemon = start()
    phases = set()

    def ready() -> bool:
        status = daemon.status()
        phases.update(slot.get("phase") for slot in status.get("slots", ()))
        return bool(status) and status["ready"] == 2

    eventually(ready)
    assert phases & {"sharpening pencils", "paper in"}, "it tells its start in its own phases"
    status = daemon.wait_ready(2)
    assert [slot["max_num_seqs"] for slot in status["slots"]] == [toy_engine.LANES] * 2
    assert streamed(daemon, 10)[0] == f"{COUNTING} "
    assert "toy: paper is in" in daemon.cli("logs", "0").stdout
    for slot in (0, 1):
        daemon.cli("verify", str(slot))
        assert daemon.slot(slot)["verified"]["ok"]
    daemon.post(0, "/fault", {"kind": "cut"})  # every stream of this one is cut after two words
    for _ in range(4):
        text, _, whole = streamed(daemon, 10)
        assert (text, whole) == (f"{COUNTING} ", True)
    assert continued(daemon) > 0


def test_its_crash_is_diagnosed_in_its_own_words(start: Start) -> None:
    daemon = start("--ink", "12")
    daemon.wait_ready(2)

    def crashed() -> Any:
        streamed(daemon, 10)
        return [slot for slot in daemon.status()["slots"] if (slot["last_cause"] or {}).get("name")]

    slot = eventually(crashed)[0]
    assert slot["last_cause"]["name"] == "toy-out-of-ink"
    assert slot["last_cause"]["evidence"] == ["toy: out of ink: refill cartridge 3"]
    assert "the toy has no ink left" in daemon.cli("why", str(slot["slot"])).stdout


def test_its_rules_are_in_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(config("--ink", "5"))
    done = subprocess.run(
        [sys.executable, str(TOY), "plan", "-c", str(file), "--machine", "epyc-9454-1p", "--json"],
        check=True, capture_output=True, text=True, timeout=SOON_S,
    )  # fmt: skip
    plan = json.loads(done.stdout)
    assert "toy-ink" in {finding["code"] for finding in plan["findings"]}
    assert str(toy_engine.SERVER) in plan["slots"][0]["argv"]
