"""`tune` with real vLLM on this machine: one instance of two cores against two of one core, then --apply under load."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.daemon_process import DaemonProcess
from support.engine_runs import READY_S, Configure

from launcher.measure.tune.remembered import recall, remember

# Three to eight minutes: each visit starts real engines.
pytestmark = [pytest.mark.release, pytest.mark.timeout(3600)]
BUDGET_S = 180.0
# Of the visits that a budget needs: two, and less than the four of two pairs.
VISITS = 3
# The budget counts visits; beside them are the interpreter, the plan and the table.
SLACK_S = 90.0
SEARCH = ("--strategies", "interleaved", "--instances", "1,2", "--no-refine", "--repeats", "1")


@pytest.fixture(scope="module")
def one_instance(configure: Configure) -> str:
    """Nothing is compiled, so that the budget is for measurements."""
    text = configure(instances=1)
    line = "instances_per_socket = 1"
    assert line in text
    return text.replace(line, f"{line}  # as delivered")


def search(config: Path, state: Path, budget_s: float) -> dict[str, Any]:
    """One run: its JSON, what it printed, and how long it took."""
    words = ["-c", str(config), *SEARCH, "--budget", f"{budget_s:.0f}s", "--state-dir", str(state)]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "tune", *words, "--json"], capture_output=True, text=True, check=False,
        timeout=3000,
    )  # fmt: skip
    print(done.stderr)
    assert done.returncode == 0, done.stderr
    took_s = time.monotonic() - began
    told = json.loads(done.stdout)
    longest_s = max(visit["start_s"] + visit["measure_s"] for visit in told["visits"])
    more = {"said": done.stderr, "took_s": took_s, "budget_s": budget_s, "longest_s": longest_s}
    return {**told, **more, "state": state}


@pytest.fixture(scope="module")
def tuned(one_instance: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that had time for both layouts.

    An instance starts within 30 s or, with a cold page cache on cores that others use, 90 s: where the budget was over
    after the first visit, which is right, that visit says what two of them take."""
    folder = tmp_path_factory.mktemp("tune")
    file = folder / "config.toml"
    file.write_text(one_instance + f'[control]\nsocket = "{folder}/c.sock"\n')
    found = search(file, folder / "state", BUDGET_S)
    if len(found["visits"]) > 1:
        return found
    return search(file, folder / "again", VISITS * found["longest_s"])


def test_it_ends_within_the_time_that_it_prints(tuned: dict[str, Any]) -> None:
    assert re.search(r"plan: at most \d+ visits, about \d+ min; budget \d+ min", tuned["said"]), tuned["said"]
    used_s = sum(visit["start_s"] + visit["measure_s"] for visit in tuned["visits"])
    assert tuned["took_s"] <= used_s + SLACK_S
    # The last visit was begun because the visits before it said that it fits.
    assert used_s <= tuned["budget_s"] + tuned["longest_s"]


def test_both_layouts_are_measured(tuned: dict[str, Any]) -> None:
    assert len({each["cores"] for each in tuned["candidates"]}) == 1, "both use all cores"
    assert sorted(each["layout"]["instances_per_socket"] for each in tuned["candidates"]) == [1, 2]
    for row in tuned["candidates"]:
        assert row["output_tokens_per_s"] is not None, tuned["said"]
        assert row["output_tokens_per_s"] > 0
        assert row["ttft_p99_s"] > 0
        assert row["itl_p99_s"] > 0
        assert row["left"] is None or "did not start" not in row["left"]
    assert not [visit for visit in tuned["visits"] if visit["cause"]]
    assert all(each["failed"] == 0 for visit in tuned["visits"] for each in visit["measurements"])
    assert tuned["sentence"]


class Load:
    """Requests without a pause, until `end`; every answer's status."""

    def __init__(self, url: str) -> None:
        self.answers: list[str] = []
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        body = json.dumps({"model": "tiny", "prompt": "one two three", "max_tokens": 16}).encode()
        while not self._over.is_set():
            request = urllib.request.Request(
                f"{self._url}/v1/completions", body, {"Content-Type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=READY_S) as response:
                    choice = json.load(response)["choices"][0]
                    self.answers.append(f"{response.status} {choice['finish_reason']}")
            except OSError as error:
                self.answers.append(str(error))

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(READY_S)


@pytest.mark.release
def test_apply_makes_the_running_service_use_the_layout_with_no_failed_request(
    tuned: dict[str, Any], one_instance: str, tmp_path: Path
) -> None:
    """Where the default won, the other layout stands for a winner: what is tested is the way into the service."""
    (best,) = recall(tuned["state"])
    if not best.different:
        layout = msgspec.structs.replace(best.layout, instances_per_socket=2)
        remember(
            tuned["state"],
            msgspec.structs.replace(best, different=True, layout=layout, label="interleaved x 2"),
        )
    daemon = DaemonProcess(tmp_path, one_instance)
    try:
        daemon.wait_ready(1, READY_S)
        before = daemon.config.read_text()
        load = Load(daemon.url)
        time.sleep(2.0)
        applied = subprocess.run(
            [sys.executable, "-m", "launcher", "tune", "--apply", "-c", str(daemon.config), "--json",
             "--state-dir", str(tuned["state"])],
            capture_output=True, text=True, check=False, timeout=3 * READY_S,
        )  # fmt: skip
        during = len(load.answers)
        time.sleep(2.0)
        load.end()
        told = applied.stdout + applied.stderr + daemon.log.read_text()[-5000:]
        assert applied.returncode == 0, told
        found = json.loads(applied.stdout)["applied"]
        assert (found["reload"], found["in_use"]) == ("done", True)
        assert [slot["state"] for slot in daemon.status()["slots"]] == ["ready", "ready"]
        assert "# as delivered" in daemon.config.read_text()
        assert Path(found["kept"]).read_text() == before
        assert set(load.answers) == {"200 length"}, {*load.answers, told}
        assert 0 < during < len(load.answers)
        requests = daemon.status()["requests"]
        assert (requests["failed"], requests["rejected"]) == (0, 0)
    finally:
        daemon.end()
