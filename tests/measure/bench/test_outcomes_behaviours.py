"""Each behaviour of an engine, through `bench`, its comparison, a search and `tune`: the figures are those of a careful
client that saw the same bytes, and a worse engine is never better.

Both measure with one clock in one process: a busy machine changes both alike. Each behaviour is measured once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support import behaving_engine, small_bench
from support.behaving_engine import BEHAVIOURS, FIRST_S, SLOW_S

from launcher.measure.bench import generator_process, workloads
from launcher.measure.bench.compare import Finding, compare
from launcher.measure.bench.figures import by_load
from launcher.measure.bench.load_generator import Command, Job, Target, VllmDriver
from launcher.measure.bench.offered_load import best_rate, meets
from launcher.measure.bench.result import BenchResult, Percentiles
from launcher.measure.bench.run import run
from launcher.measure.tune.engine_visits import measurement_of
from launcher.measure.tune.model import MeasurementFailedError

TOKENS, REQUESTS = 32, 8
WORKLOADS = {
    "completions": msgspec.structs.replace(
        workloads.named("rackspace-128"), input_tokens=8, output_tokens=TOKENS
    ),
    "chat": msgspec.structs.replace(workloads.named("chat"), output_tokens=TOKENS),
}
# Their requests have failed: all, or half of them.
FAILED = {"error event": 8, "clean break": 8, "reset": 8, "half broken": 4, "short": 8, "refused": 8}
OTHER_WORK = {*FAILED, "long"}


class SmallBench(VllmDriver):
    """Reads files and output as vLLM's driver does."""

    def __init__(self) -> None:
        super().__init__(("vllm",), "0.32.0")

    def prepare(self, job: Job) -> Command:
        words = (
            job.target.url, str(job.result_file), job.workload.api, job.target.model, str(job.requests), str(TOKENS),
            str(job.load.concurrency or 4),
        )  # fmt: skip
        return Command((sys.executable, "-I", "-S", str(small_bench.__file__), *words), {})


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", str(behaving_engine.__file__)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


@pytest.fixture(autouse=True)
def never_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load generator may wait for a cpu here."""
    monkeypatch.setattr(generator_process, "LIMITED_SHARE", 1e9)
    monkeypatch.setattr(generator_process, "LIMITED_WAIT", 1e9)


class Measured:
    """What `bench` made of each behaviour, and the folder of its files."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self._found: dict[str, tuple[BenchResult, Path]] = {}

    def of(self, behaviour: str, api: str = "completions") -> tuple[BenchResult, Path]:
        name = f"{behaviour} {api}"
        if name not in self._found:
            folder = self._folder / name.replace(" ", "-")
            result = run(
                Target(url=self._url, model=behaviour), WORKLOADS[api], driver=SmallBench(), folder=folder,
                requests=REQUESTS, warm_up=False, slo={"ttft_p99": 900.0},
            )  # fmt: skip
            self._found[name] = result, folder
        return self._found[name]


@pytest.fixture(scope="module")
def measured(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(engine, tmp_path_factory.mktemp("behaviours"))


def seen(folder: Path) -> tuple[float, list[dict[str, Any]]]:
    """The duration, and the requests that a careful client takes for completed."""
    file = json.loads((folder / "001.json.seen").read_text())
    whole = [
        each for each in file["requests"] if each["ended"] and not each["error"] and each["tokens"] >= TOKENS
    ]
    return file["duration"], whole


def percentiles(values: list[float]) -> Percentiles:
    return Percentiles(
        mean=float(np.mean(values)),
        **{f"p{each}": float(np.percentile(values, each)) for each in (50, 95, 99)},
    )


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_figures_are_those_of_a_careful_client(measured: Measured, behaviour: str) -> None:
    result, folder = measured.of(behaviour)
    duration, whole = seen(folder)
    (point,) = result.points
    failed = FAILED.get(behaviour, 0)
    assert (
        (point.completed, point.failed) == (len(whole), REQUESTS - len(whole)) == (REQUESTS - failed, failed)
    )
    assert point.asked_tokens == REQUESTS * TOKENS
    assert point.output_tokens == sum(each["tokens"] for each in whole)
    assert point.requests_per_s == pytest.approx(len(whole) / duration)
    assert point.output_tokens_per_s == pytest.approx(point.output_tokens / duration)
    assert point.goodput_per_s == pytest.approx(len(whole) / duration)
    if whole:
        assert point.ttft_s is not None
        assert point.e2e_s is not None
        first, last = percentiles([e["first"] for e in whole]), percentiles([e["last"] for e in whole])
        for name in ("mean", "p50", "p95", "p99"):
            assert getattr(point.ttft_s, name) == pytest.approx(getattr(first, name), abs=1e-6)
            assert getattr(point.e2e_s, name) == pytest.approx(getattr(last, name), abs=1e-6)
        assert point.ttft_s.p50 >= (SLOW_S if behaviour == "slow first" else FIRST_S)
    else:
        assert (point.ttft_s, point.tpot_s, point.itl_s, point.e2e_s) == (None, None, None, None)
    assert meets(point, {"ttft_p99": 900.0}) is (behaviour not in OTHER_WORK)
    if behaviour in OTHER_WORK:
        with pytest.raises(MeasurementFailedError):
            measurement_of(point)
    else:
        assert measurement_of(point).output_tokens_per_s == point.output_tokens_per_s


@pytest.mark.parametrize("behaviour", ["healthy", "role early"])
def test_the_first_token_of_a_chat_is_its_first_text(measured: Measured, behaviour: str) -> None:
    result, folder = measured.of(behaviour, "chat")
    (point,) = result.points
    _, whole = seen(folder)
    assert len(whole) == point.completed == REQUESTS
    assert point.ttft_s is not None
    assert point.ttft_s.p50 == pytest.approx(np.percentile([each["first"] for each in whole], 50), abs=1e-6)
    assert point.ttft_s.p50 >= FIRST_S
    assert len(point.itl_samples_s) == REQUESTS * (TOKENS - 1), "the role is no token"


@pytest.mark.parametrize("behaviour", sorted(OTHER_WORK))
def test_a_worse_engine_is_never_better(measured: Measured, behaviour: str) -> None:
    """Without noise: no interval, and so no verdict, depends on this machine."""
    (healthy, _), (worse, _) = measured.of("healthy"), measured.of(behaviour)
    a = msgspec.structs.replace(healthy, points=healthy.points * 2)
    b = msgspec.structs.replace(worse, points=worse.points * 2)
    found = compare([a], [b], 0.03)
    assert found.worse
    assert not [row for row in found.rows if row.finding is Finding.BETTER]
    assert all(runs.unranked for runs in by_load(b.points))


def test_a_search_ends_below_the_rate_at_which_streams_break(measured: Measured) -> None:
    """The rates of a search, of which the second is one at which half of the streams break."""
    points = [measured.of(behaviour)[0].points[0] for behaviour in ("healthy", "half broken")]
    tried = [
        (rate, meets(point, {"ttft_p99": 900.0})) for rate, point in zip((1.0, 2.0), points, strict=True)
    ]
    assert tried == [(1.0, True), (2.0, False)]
    assert best_rate(tried) == 1.0
