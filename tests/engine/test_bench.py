"""`bench` on real vLLM: its figures are those of `vllm bench serve` run by hand, and every way to use it works.

CI reads its figures in under_load/test_bench_figures.py."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
from support.daemon_process import SOON_S, DaemonProcess, eventually
from support.engine_runs import Configure, bench, stored

from launcher.base.intervals import quantile_ratio
from launcher.measure.bench import workloads
from launcher.measure.bench.load_generator import Target, VllmDriver
from launcher.measure.bench.offered_load import Load
from launcher.measure.bench.run import run

pytestmark = [pytest.mark.engine, pytest.mark.release, pytest.mark.timeout(1800)]

PAIRS = 4
# Well below what the instances can do: at its limit, a run differs from the next by more than the tolerance. vLLM
# scales the arrivals so that they take REQUESTS / RATE seconds with every seed.
RATE = 2.0
REQUESTS = 24
# The seeds of the runs by hand: prompts that bench does not send, or the prefix cache has them.
BY_HAND = 5000


@pytest.fixture(scope="module")
def config(configure: Configure) -> str:
    return configure(max_model_len=4096)


def by_hand(daemon: DaemonProcess, vllm: str, model: Path, folder: Path, seed: int) -> dict[str, Any]:
    """The same options, as a person would type them."""
    name = f"hand-{seed}.json"
    subprocess.run(
        [
            vllm, "bench", "serve", "--base-url", daemon.url, "--model", "tiny", "--tokenizer", str(model),
            "--dataset-name", "random", "--random-input-len", "128", "--random-output-len", "128",
            "--num-prompts", str(REQUESTS), "--request-rate", str(RATE), "--temperature", "0.7",
            "--seed", str(seed), "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,95,99",
            "--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", name,
        ],
        check=True, capture_output=True, timeout=600, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def test_bench_agrees_with_vllm_bench_serve_by_hand(
    daemon: DaemonProcess, vllm: str, model: Path, tmp_path: Path
) -> None:
    """Within 3 % in tokens/s and 5 % in TTFT p50. That both read the same driver's file alike is tested in
    under_load, exactly.

    The pairs alternate in order, so that a slow change of the machine falls on both. A median TTFT of so few requests
    is uncertain by more than 5 %: its interval must reach the tolerance, and be narrow enough to show a fault."""
    target = Target(url=daemon.url, model="tiny", tokenizer=str(model))
    driver, workload = VllmDriver((vllm,), None), workloads.named("rackspace-128")
    tokens: list[float] = []
    ours: list[float] = []
    theirs: list[float] = []
    for pair in range(PAIRS):
        hand = by_hand(daemon, vllm, model, tmp_path, BY_HAND + pair) if pair % 2 else None
        result = run(
            target, workload, driver=driver, folder=tmp_path / f"pair-{pair}", loads=[Load(rate=RATE)],
            requests=REQUESTS, seed=pair * 10, warm_up=not pair,
        )  # fmt: skip
        hand = hand or by_hand(daemon, vllm, model, tmp_path, BY_HAND + pair)
        (point,) = result.points
        assert (point.completed, point.failed) == (hand["completed"], hand["failed"]) == (REQUESTS, 0)
        assert point.output_tokens == hand["total_output_tokens"]
        tokens.append(point.output_tokens_per_s / hand["output_throughput"])
        ours += point.ttft_samples_s
        theirs += hand["ttfts"]
    ttft = quantile_ratio(ours, theirs, 0.5)
    assert ttft is not None
    print(
        f"bench / by hand: tokens/s {tokens}; TTFT p50 {ttft.estimate:.3f} ({ttft.low:.3f} to {ttft.high:.3f})"
    )
    assert abs(median(tokens) - 1) <= 0.03
    assert ttft.low <= 1.05
    assert ttft.high >= 0.95
    assert ttft.high / ttft.low <= 1.6


def test_repeats_are_not_answered_by_the_prefix_cache(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Prompts longer than a KV block; --keep-cache sends them again."""
    words = ("--workload", "rag", "--requests", "6", "--concurrency", "2", "--repeats", "2")
    fresh = bench(daemon, tmp_path / "fresh", *words)
    assert fresh.returncode == 0, fresh.stderr
    kept = bench(daemon, tmp_path / "kept", *words, "--keep-cache")
    assert kept.returncode == 0, kept.stderr
    second, again = stored(tmp_path / "fresh").points[1], stored(tmp_path / "kept").points[1]
    assert second.prefix_hit_share is not None
    assert again.prefix_hit_share is not None
    assert second.prefix_hit_share < 0.2 < again.prefix_hit_share


def test_conversations_share_their_prefixes(daemon: DaemonProcess, tmp_path: Path) -> None:
    done = bench(daemon, tmp_path, "--workload", "chat", "--requests", "32", "--concurrency", "4")
    assert done.returncode == 0, done.stderr
    (point,) = stored(tmp_path).points
    assert (point.completed, point.failed) == (32, 0)
    assert point.prefix_hit_share is not None
    assert point.prefix_hit_share > 0.3


def test_a_search_of_a_rate_ends(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Four requests never break the limit: the search says so instead of doubling for ever."""
    done = bench(daemon, tmp_path, "--sweep", "--slo", "e2e_p99=60s", "--requests", "4")
    assert done.returncode == 0, done.stderr
    assert "e2e_p99=60s" in done.stdout
    assert 1 < len(stored(tmp_path).points) <= 12


def test_ctrl_c_on_a_terminal_prints_and_stores_what_was_measured(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    argv = [
        sys.executable, "-m", "launcher", "bench", "-c", str(daemon.config), "--state-dir", str(tmp_path),
        "--requests", "4", "--repeats", "500",
    ]  # fmt: skip
    pid, terminal = pty.fork()
    if not pid:
        os.execv(argv[0], argv)  # noqa: S606
    text = _read_until(terminal, "point 2/500")
    os.write(terminal, b"\x03")
    text += _read_until(terminal, "stored as")
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert "/4 requests" in text, "the live line"
    assert "did not end" in text
    result = stored(tmp_path)
    assert result.points
    assert not result.complete
    assert not [process for process in psutil.process_iter() if str(tmp_path) in " ".join(_words(process))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _read_until(terminal: int, words: str) -> str:
    text, deadline = "", time.monotonic() + 4 * SOON_S
    while words not in text:
        assert time.monotonic() < deadline, text
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                text += os.read(terminal, 65536).decode(errors="replace")
            except OSError:  # the other side has closed it
                break
    return text


def test_an_endpoint_that_dies_meanwhile_is_an_honest_end(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Last: the daemon is stopped."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "launcher", "bench", "-c", str(daemon.config), "--state-dir", str(tmp_path),
            "--requests", "400", "--concurrency", "8",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    logs = tmp_path / "bench"
    eventually(
        lambda: any(re.search(r"\d\d/400", file.read_text()) for file in logs.glob("*/001.log")),
        within_s=4 * SOON_S,
    )
    daemon.process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=600)
    assert process.returncode in {0, 1, 2}, err
    assert "failed" in out + err
    (point,) = stored(tmp_path).points
    assert point.failed > 0
    assert point.completed + point.failed == 400
