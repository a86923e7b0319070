"""The real `vllm bench serve` against an engine of known behaviour: what it takes for completed is not taken as it comes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support import behaving_engine
from support.behaving_engine import FIRST_S

from launcher.measure.bench import generator_process, workloads
from launcher.measure.bench.compare import compare
from launcher.measure.bench.load_generator import Target, VllmDriver
from launcher.measure.bench.result import BenchResult
from launcher.measure.bench.run import run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

TOKENS, REQUESTS = 32, 8


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", str(behaving_engine.__file__)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


def measure(target: Target, vllm: str, folder: Path, workload: str = "rackspace-128") -> BenchResult:
    chosen = msgspec.structs.replace(workloads.named(workload), output_tokens=TOKENS)
    driver = VllmDriver((vllm,), "0.32.0")
    return run(target, chosen, driver=driver, folder=folder, requests=REQUESTS, warm_up=False)


def test_broken_and_short_streams_have_failed(
    engine: str, vllm: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator_process, "LIMITED_SHARE", 1e9)
    monkeypatch.setattr(generator_process, "LIMITED_WAIT", 1e9)
    failed = {"healthy": 0, "half broken": 4, "error event": 8, "short": 8}
    targets = {name: Target(url=engine, model=name, tokenizer=str(model)) for name in (*failed, "role early")}
    found = {name: measure(targets[name], vllm, tmp_path / name.replace(" ", "-")) for name in failed}
    assert {name: result.points[0].failed for name, result in found.items()} == failed
    for name in ("half broken", "error event", "short"):
        assert compare([found["healthy"]], [found[name]], 0.03).worse
    early = measure(targets["role early"], vllm, tmp_path / "early", "chat").points[0]
    assert (early.completed, early.failed) == (REQUESTS, 0)
    assert early.ttft_s is not None
    assert early.ttft_s.p50 >= FIRST_S
