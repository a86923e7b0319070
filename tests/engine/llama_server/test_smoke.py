"""Two real llama-servers of `kind = "llama.cpp"`: placed as planned, they answer; one is killed and replaced."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.daemon_process import DaemonProcess, eventually
from support.engine_runs import chat, engine_of

from launcher.base.cpuset import CpuSet

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_two_instances_are_placed_answer_and_survive_a_kill(
    start_by_kind: Callable[[], DaemonProcess],
) -> None:
    """With a model's path only."""
    daemon = start_by_kind()
    text = chat(daemon.url, stream=False)
    assert text
    slots = daemon.status()["slots"]
    for slot in slots:
        words = engine_of(slot).cmdline()
        threads = str(len(CpuSet.parse(slot["cpus"])))
        assert words[words.index("--threads") + 1] == words[words.index("--threads-batch") + 1] == threads
        assert words[words.index("--parallel") + 1] == str(slot["max_num_seqs"])
        assert ".gguf" not in Path(f"/proc/{engine_of(slot).pid}/maps").read_text()
        # The whole KV cache is allocated and cleared at the start.
        assert 0 < slot["kv_cache_bytes"] < engine_of(slot).memory_info().rss
    engine_of(slots[0]).kill()
    assert chat(daemon.url, stream=True) == text
    eventually(lambda: daemon.slot(0)["generation"] > slots[0]["generation"], what="another generation")
    replaced = daemon.wait_ready(2)["slots"]
    assert [slot["restarts"] for slot in replaced] == [1, 0]
    verified = json.loads(daemon.cli("verify", "--json").stdout)
    assert [slot["verified"]["problems"] for slot in verified["slots"]] == [[], []]
    assert chat(daemon.url, stream=False) == text
    sums = daemon.status()["requests"]
    assert (sums["accepted"], sums["completed"], sums["failed"]) == (3, 3, 0)
