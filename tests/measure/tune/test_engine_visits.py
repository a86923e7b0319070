"""Visits with a private daemon, the fake engine, and a small load generator."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.daemon_process import fake_config

from launcher.config.loading import load_config
from launcher.config.schema import Strategy
from launcher.measure.bench import workloads
from launcher.measure.bench.load_generator import Command, Job, Phase
from launcher.measure.bench.outcomes import Figures
from launcher.measure.bench.result import ClientCost, Percentiles, Point
from launcher.measure.tune.answers import PROMPTS
from launcher.measure.tune.engine_visits import EngineVisits, Setting, measurement_of
from launcher.measure.tune.model import Candidate, Layout, MeasurementFailedError, NotStartedError, Visit

# ARGS: url, file, requests. Each request asks for 4 tokens.
CLIENT = """
import json, sys, time, urllib.request
url, file, requests = sys.argv[1:4]
body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 4}).encode()
began, done = time.monotonic(), 0
for _ in range(int(requests)):
    request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    try:
        json.load(urllib.request.urlopen(request, timeout=60))
        done += 1
    except OSError:
        pass
json.dump({"done": done, "seconds": time.monotonic() - began}, open(file, "w"))
"""
LATENCY = Percentiles(mean=0.1, p50=0.1, p95=0.2, p99=0.3)


class SmallDriver:
    """Implements bench's Driver."""

    name = "small"
    version = "1"

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.before = ""
        """Lines of the load generator before its own."""
        self.killed: psutil.Process | None = None
        """It is killed before the load generator starts."""

    def prepare(self, job: Job) -> Command:
        self.jobs.append(job)
        if self.killed is not None:
            self.killed.kill()
        words = (job.target.url, str(job.result_file), str(job.requests))
        return Command((sys.executable, "-I", "-S", "-c", self.before + CLIENT, *words), {})

    def progress(self, output: str) -> Phase:
        return Phase(measuring=False, ended=False, done=0)

    def read(self, job: Job) -> Figures:
        found: dict[str, Any] = json.loads(job.result_file.read_text())
        done, seconds = found["done"], found["seconds"]
        return Figures(
            duration_s=seconds, completed=done, failed=job.requests - done, input_tokens=done, output_tokens=4 * done,
            requests_per_s=done / seconds, output_tokens_per_s=4 * done / seconds, total_tokens_per_s=5 * done / seconds,
            ttft_s=LATENCY, tpot_s=None, itl_s=None, e2e_s=LATENCY, requests=[],
        )  # fmt: skip

    def explain(self, output: str) -> tuple[str, str]:
        return output.strip() or "no output", "look"


def setting(folder: Path, driver: SmallDriver, *engine: str) -> Setting:
    (folder / "given.toml").write_text(fake_config(*engine))
    run = folder / "run"
    run.mkdir(exist_ok=True)
    config = load_config(folder / "given.toml", environ={})
    (folder / "other.toml").write_text(fake_config(*engine, "--token-s", "0.001"))
    other = load_config(folder / "other.toml", environ={})
    return Setting(
        config=config, config_of=lambda layout: other if layout.stack == "llama.cpp" else config,
        workload=workloads.named("rackspace-128"), driver=driver, slo={"ttft_p99": 1.0}, folder=run,
        cache=folder / "cache", cores_of=lambda plan: len(plan["slots"]),
    )  # fmt: skip


def candidate(stack: Any = None) -> Candidate:
    layout = Layout(strategy=Strategy.INTERLEAVED, instances_per_socket=2, reserve_cores=0, stack=stack)
    return Candidate(
        layout=layout, label="x 2", plan={"slots": [{}, {}], "reserved": "", "strategy": "interleaved"}
    )


def visit(number: int = 1) -> Visit:
    return Visit(number=number, candidate=0, purpose="race", repeats=2)


def engine_process() -> psutil.Process:
    """An engine of this test."""
    own = psutil.Process().children(recursive=True)
    return next(
        each for each in own if "--uds" in each.cmdline() and "shim.py" not in "".join(each.cmdline())
    )


def test_a_visit_is_one_start_with_one_warm_up_and_a_seed_per_repeat(tmp_path: Path) -> None:
    """A load generator that fails and an instance that ends are the causes of repeats that fail."""
    driver = SmallDriver()
    with EngineVisits(setting(tmp_path, driver)).start(candidate("vllm"), visit()) as session:
        zentorch_is_switched_off(engine_process())
        assert len(session.answers()) == len(PROMPTS)
        first, second = session.measure(0, 11), session.measure(1, 12)
        measured = list(driver.jobs)
        driver.before = "raise SystemExit('no tokenizer')\n"
        with pytest.raises(MeasurementFailedError, match="no tokenizer"):
            session.measure(2, 13)
        driver.before, driver.killed = "import time; time.sleep(0.5)\n", engine_process()
        with pytest.raises(MeasurementFailedError, match="an instance ended while it was measured: slot"):
            session.measure(3, 14)
    assert first.output_tokens_per_s > 0
    assert second.output_tokens_per_s > 0
    assert (first.failed, first.ttft_p99_s) == (0, 0.3)
    assert [(job.name, job.seed) for job in measured if job.name != "warm-up"] == [("001", 11), ("001", 12)]
    assert [job.name for job in measured].count("warm-up") == 1
    target = measured[0].target
    assert (target.model, target.tokenizer, target.cores) == ("fake", "fake", 2)


def zentorch_is_switched_off(engine: psutil.Process) -> None:
    """By a module that cannot be imported. It is in the sockets' folder: the user of root's engines cannot enter the run's,
    where --set may hold secrets."""
    words, environ = engine.cmdline(), engine.environ()
    shadow = Path(environ["PYTHONPATH"].split(":")[0])
    sockets = Path(words[words.index("--uds") + 1]).parent.parent
    assert shadow.parent == sockets
    assert shadow.stat().st_mode & 0o777 == 0o755
    with pytest.raises(ImportError, match="switched off"):
        exec((shadow / "zentorch.py").read_text())  # noqa: S102


def test_an_engine_of_another_stack_is_started_with_its_own_configuration(tmp_path: Path) -> None:
    with EngineVisits(setting(tmp_path, SmallDriver())).start(candidate("llama.cpp"), visit()) as session:
        engines = [each.cmdline() for each in psutil.Process().children(recursive=True)]
        assert session.measure(0, 1).output_tokens_per_s > 0
    assert sum("--token-s" in words for words in engines) >= 2


def test_a_stack_that_is_not_active_is_no_result_of_it(tmp_path: Path) -> None:
    visits = EngineVisits(setting(tmp_path, SmallDriver()))
    with (
        pytest.raises(NotStartedError, match="ZenTorch is not active"),
        visits.start(candidate("zentorch"), visit()),
    ):
        pass


def point(**changes: Any) -> Point:
    values: dict[str, Any] = {
        "concurrency": 4, "rate": None, "seed": 0, "duration_s": 1.0, "completed": 200, "failed": 1, "input_tokens": 20,
        "output_tokens": 80, "requests_per_s": 20.0, "output_tokens_per_s": 80.0, "total_tokens_per_s": 100.0,
        "ttft_s": LATENCY, "tpot_s": None, "itl_s": None, "e2e_s": LATENCY, "goodput_per_s": 18.0, "kv_use_max": None,
        "prefix_hit_share": None, "requests_by_instance": None, "ttft_samples_s": [], "itl_samples_s": [],
        "e2e_samples_s": [], "driver_file": "", "client": ClientCost(cpu_s=0.1, share=0.1, limited=False),
    }  # fmt: skip
    return Point(**values | changes)


def test_a_point_becomes_a_measurement() -> None:
    found = measurement_of(point())
    assert (found.output_tokens_per_s, found.goodput_per_s, found.failed) == (80.0, 18.0, 1)
    assert (found.ttft_p99_s, found.itl_p99_s) == (0.3, None)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"client": ClientCost(cpu_s=1.0, share=0.98, limited=True)}, "CLIENT-LIMITED: .* 98%"),
        ({"completed": 0, "failed": 20}, "none of 20 requests"),
        ({"completed": 10, "failed": 10}, "not the workload: 10 requests were completed, 20 asked for"),
        ({"asked_tokens": 640}, "not the workload: 80 output tokens were completed, 640 asked for"),
        ({"fault": "the proxy counts 3 failed requests"}, "the proxy counts 3 failed requests"),
    ],
)
def test_a_point_that_says_nothing_of_the_layout_is_a_failure(changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(MeasurementFailedError, match=cause):
        measurement_of(point(**changes))
