"""Real vLLM with two tensor-parallel ranks of one core each: where they are, and the end of one of them."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator

import psutil
import pytest
from support.daemon_process import DaemonProcess, eventually
from support.engine_runs import READY_S, Configure

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def daemon(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(tmp_path_factory.mktemp("d"), configure(instances=1, ranks=2))
    daemon.wait_ready(1, READY_S)
    yield daemon
    daemon.end()


def test_each_rank_is_a_process_on_its_own_core(daemon: DaemonProcess) -> None:
    slot = daemon.status()["slots"][0]
    first, second = slot["omp_cpus"].split("|")
    verified = eventually(lambda: daemon.status()["slots"][0]["verified"], READY_S)
    assert verified["ok"], verified["problems"]
    assert [(rank["rank"], rank["cpus"]) for rank in verified["ranks"]] == [(0, first), (1, second)]
    for rank in verified["ranks"]:
        # vLLM takes the node of the lowest cpu of the worker's main thread (v1/worker/cpu_worker.py).
        assert os.sched_getaffinity(rank["pid"]) == {int(rank["cpus"])}
        assert psutil.Process(rank["pid"]).cmdline()[0].strip() == f"VLLM::Worker_TP{rank['rank']}"


def test_it_answers(daemon: DaemonProcess) -> None:
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "ignore_eos": True}
    url, kind = f"http://127.0.0.1:{daemon.port}/v1/completions", {"Content-Type": "application/json"}
    call = urllib.request.Request(url, json.dumps(body).encode(), kind)
    with urllib.request.urlopen(call, timeout=READY_S) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 8


def test_the_end_of_a_rank_ends_its_instance_and_is_the_cause(daemon: DaemonProcess) -> None:
    slot = daemon.status()["slots"][0]
    root = psutil.Process(slot["pid"])
    tree = [root, *root.children(recursive=True)]
    os.kill(slot["verified"]["ranks"][1]["pid"], signal.SIGKILL)
    after = eventually(
        lambda: next(
            (its for its in daemon.status().get("slots", ()) if its["last_cause"] is not None), None
        ),
        READY_S,
    )
    assert not [
        process for process in tree if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]
    cause = after["last_cause"]
    # vLLM often sees no exit code of a worker that has just ended.
    assert "the process of rank 1 ended" in cause["message"]
    assert cause["name"] in {"unknown", "killed-by-operator"}
    assert any("VllmWorker-1 died unexpectedly" in line for line in cause["evidence"])
    assert after["state"] in {"backoff", "starting"}
