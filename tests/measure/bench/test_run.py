"""Whole runs with a small load generator: a real process that follows a script, against a real HTTP server."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support.bench_endpoint import SAMPLE, WORKLOAD, Endpoint, ScriptedDriver

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.measure.bench import generator_process, workloads
from launcher.measure.bench.figures import by_load
from launcher.measure.bench.generator_process import CpuTimes, cost_between
from launcher.measure.bench.load_generator import DriverError, Phase, Target, VllmDriver
from launcher.measure.bench.offered_load import Load, meets
from launcher.measure.bench.run import Interrupted, PartialError, run
from launcher.measure.bench.table import to_text


@pytest.fixture
def never_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load generator may wait for a cpu: on a busy machine its rates would count as broken."""
    monkeypatch.setattr(generator_process, "LIMITED_SHARE", math.inf)
    monkeypatch.setattr(generator_process, "LIMITED_WAIT", math.inf)


def test_a_run_measures_every_load_and_repeat(endpoint: Endpoint, tmp_path: Path) -> None:
    driver = ScriptedDriver()
    seen: list[str] = []
    loads = (Load(concurrency=1), Load(concurrency=4))
    result = run(
        endpoint.target, WORKLOAD, driver=driver, folder=tmp_path / "r1", loads=loads, repeats=2, seed=100,
        slo={"ttft_p99": 0.020, "tpot_p99": 0.006}, watch=lambda progress: seen.append(progress.what),
    )  # fmt: skip
    assert [(point.concurrency, point.seed) for point in result.points] == [
        (1, 100),
        (4, 101),
        (1, 102),
        (4, 103),
    ]
    sample = json.loads(SAMPLE.read_text())
    point = result.points[0]
    assert point.output_tokens_per_s == pytest.approx(sample["output_throughput"])
    assert point.goodput_per_s == pytest.approx(sample["request_goodput"])
    assert point.ttft_samples_s == sample["ttfts"]
    assert result.complete
    assert result.id == "r1"
    assert (tmp_path / point.driver_file).is_file()
    assert "warm-up" in seen
    assert "4 at once" in seen


def test_a_role_that_comes_early_is_no_first_token(endpoint: Endpoint, tmp_path: Path) -> None:
    chat = workloads.named("chat")
    role = {"choices": [{"index": 0, "delta": {"role": "assistant"}}]}
    word = {"choices": [{"index": 0, "delta": {"content": "blue"}}]}
    endpoint.chat = [json.dumps(event).encode() for event in (role, word)]
    early = "result['ttfts'] = [0.0] * 4; result['itls'] = [[5.0, 0.1]] * 4"
    result = run(endpoint.target, chat, driver=ScriptedDriver(change=early), folder=tmp_path, warm_up=False)
    assert result.points[0].ttft_samples_s == [5.0] * 4
    assert result.points[0].itl_samples_s == [0.1] * 4


def test_the_warm_up_shares_no_prompts_with_a_point(endpoint: Endpoint, tmp_path: Path) -> None:
    driver = ScriptedDriver()
    run(endpoint.target, WORKLOAD, driver=driver, folder=tmp_path, repeats=3)
    seeds = [job.seed for job in driver.jobs]
    assert len(set(seeds)) == len(seeds) == 4


def test_keep_cache_sends_the_same_prompts(endpoint: Endpoint, tmp_path: Path) -> None:
    result = run(
        endpoint.target,
        WORKLOAD,
        driver=ScriptedDriver(),
        folder=tmp_path,
        repeats=2,
        keep_cache=True,
        warm_up=False,
    )
    assert [point.seed for point in result.points] == [0, 0]


def test_the_published_number_of_requests_is_sent(endpoint: Endpoint, tmp_path: Path) -> None:
    driver = ScriptedDriver()
    run(endpoint.target, WORKLOAD, driver=driver, folder=tmp_path, warm_up=False)
    assert [(job.requests, job.load) for job in driver.jobs] == [(20, Load(concurrency=4))]


@pytest.mark.usefixtures("never_limited")
def test_a_sweep_finds_the_highest_rate(endpoint: Endpoint, tmp_path: Path) -> None:
    """The warm-up completes 8 requests a second, so that the search begins with 2; the endpoint breaks above 6."""
    slow = (
        "result['duration'] = 0.5 if rate == 'None' else 4 / float(rate); "
        "result['ttfts'] = [9.0 if rate != 'None' and float(rate) > 6 else 0.02] * 4"
    )
    result = run(
        endpoint.target, WORKLOAD, driver=ScriptedDriver(change=slow), folder=tmp_path, sweep=True,
        slo={"ttft_p99": 2.0},
    )  # fmt: skip
    rates = [point.rate for point in result.points]
    assert rates[:3] == [2.0, 4.0, 8.0]
    assert any("highest rate that met ttft_p99=2s: 5.657" in note for note in result.notes)


@pytest.mark.usefixtures("never_limited")
def test_a_rate_that_the_endpoint_does_not_keep_up_with_is_not_the_answer(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    """Completes 6 requests a second at most; the limit is never broken in so short a run."""
    full = (
        "r = 2.0 if rate == 'None' else float(rate); "
        "result['duration'] = float(requests) / min(r, 6.0)\n"
        "for column in ('latencies', 'errors', 'input_lens', 'ttfts', 'output_lens', 'itls'):\n"
        "    result[column] = (result[column] * int(requests))[:int(requests)]"
    )
    result = run(
        endpoint.target, WORKLOAD, driver=ScriptedDriver(change=full), folder=tmp_path, sweep=True,
        slo={"ttft_p99": 900.0},
    )  # fmt: skip
    (note,) = [note for note in result.notes if "highest rate" in note]
    assert 5.0 < float(note.rpartition(": ")[2].split()[0]) < 8.0, (note, [p.rate for p in result.points])


@pytest.mark.usefixtures("never_limited")
def test_a_search_ends_where_a_higher_rate_is_the_same_load(endpoint: Endpoint, tmp_path: Path) -> None:
    same = "result['duration'] = 0.05"
    result = run(
        endpoint.target, WORKLOAD, driver=ScriptedDriver(change=same), folder=tmp_path, sweep=True, requests=8,
        slo={"ttft_p99": 900.0},
    )  # fmt: skip
    assert any("raise --requests" in note for note in result.notes), result.notes
    assert len(result.points) < 16


def test_observed_figures_come_from_the_metrics(endpoint: Endpoint, tmp_path: Path) -> None:
    def page(ended: int, failed: int, queries: int, hits: int) -> str:
        return textwrap.dedent(f"""\
            numa_launcher_slot_requests_ended_total{{model="m",outcome="completed",slot="0"}} {ended}
            numa_launcher_slot_requests_ended_total{{model="m",outcome="failed",slot="0"}} {failed}
            vllm:num_requests_running{{slot="0"}} 1
            vllm:generation_tokens_total{{slot="0"}} 5
            vllm:kv_cache_usage_perc{{slot="0"}} 0.25
            vllm:prefix_cache_queries_total{{slot="0"}} {queries}
            vllm:prefix_cache_hits_total{{slot="0"}} {hits}
            """)

    endpoint.pages = [page(10, 0, 1000, 0), page(30, 2, 3000, 500)]
    result = run(endpoint.target, WORKLOAD, driver=ScriptedDriver(), folder=tmp_path, warm_up=False)
    point = result.points[0]
    assert point.requests_by_instance == {"0": 22}
    assert point.prefix_hit_share == 0.25
    assert point.kv_use_max == 0.25
    assert point.fault.startswith("the proxy counts 2 failed requests, the load generator 0")
    assert by_load(result.points)[0].unusable == "RUN FAILED"
    (note,) = [line for line in to_text(result) if "NOT THE WORKLOAD" in line]
    assert "1 of 1 run failed: the proxy counts 2 failed requests" in note


def test_an_endpoint_without_metrics_gives_none(endpoint: Endpoint, tmp_path: Path) -> None:
    point = run(endpoint.target, WORKLOAD, driver=ScriptedDriver(), folder=tmp_path, warm_up=False).points[0]
    assert (point.requests_by_instance, point.kv_use_max, point.prefix_hit_share) == (None, None, None)


def test_failed_requests_are_an_honest_row(endpoint: Endpoint, tmp_path: Path) -> None:
    failed = f"result = json.load(open({str(SAMPLE.with_name('vllm-0.32.0-failed.json'))!r}))"
    driver = ScriptedDriver(change=failed)
    result = run(
        endpoint.target, WORKLOAD, driver=driver, folder=tmp_path, warm_up=False, slo={"ttft_p99": 1.0}
    )
    point = result.points[0]
    assert (point.completed, point.failed, point.goodput_per_s) == (0, 4, 0.0)
    assert any("4 requests failed: Not Found" in note for note in result.notes)


def test_streams_that_broke_off_have_failed(endpoint: Endpoint, tmp_path: Path) -> None:
    """Each stream ended with an error after 2 of 8 tokens: more requests a second, and lower latencies."""
    broken = "result['output_lens'] = [2] * 4; result['latencies'] = [0.01] * 4"
    result = run(
        endpoint.target, WORKLOAD, driver=ScriptedDriver(change=broken), folder=tmp_path, warm_up=False,
        slo={"ttft_p99": 900.0},
    )  # fmt: skip
    (point,) = result.points
    assert (point.completed, point.failed, point.goodput_per_s, point.e2e_s) == (0, 4, 0.0, None)
    assert not meets(point, {"ttft_p99": 900.0})
    assert by_load(result.points)[0].unusable == "ALL FAILED"
    assert "4 at once: 4 requests failed: 2 of 8 output tokens came" in result.notes


@pytest.mark.usefixtures("never_limited")
def test_a_search_does_not_go_on_where_streams_break_off(endpoint: Endpoint, tmp_path: Path) -> None:
    broken = (
        "result['duration'] = 0.5 if rate == 'None' else 4 / float(rate); "
        "result['output_lens'] = [2 if rate != 'None' and float(rate) > 6 else 8] * 4"
    )
    result = run(
        endpoint.target, WORKLOAD, driver=ScriptedDriver(change=broken), folder=tmp_path, sweep=True,
        slo={"ttft_p99": 900.0},
    )  # fmt: skip
    assert [point.rate for point in result.points][:3] == [2.0, 4.0, 8.0]
    assert any("highest rate that met ttft_p99=900s: 5.657" in note for note in result.notes), result.notes


def test_a_warm_up_that_fails_ends_the_run(endpoint: Endpoint, tmp_path: Path) -> None:
    failed = f"result = json.load(open({str(SAMPLE.with_name('vllm-0.32.0-failed.json'))!r}))"
    with pytest.raises(LauncherError, match="all 4 requests of the warm-up failed: Not Found"):
        run(endpoint.target, WORKLOAD, driver=ScriptedDriver(change=failed), folder=tmp_path)


def test_a_busy_client_is_limited(endpoint: Endpoint, tmp_path: Path) -> None:
    busy = "end = time.process_time() + 1.0\nwhile time.process_time() < end: pass"
    driver = ScriptedDriver(busy=busy, pause=0.0, stay=2.0)
    point = run(endpoint.target, WORKLOAD, driver=driver, folder=tmp_path, warm_up=False).points[0]
    assert point.client.cpu_s > 0.5
    assert point.client.limited


@pytest.mark.parametrize(
    ("used", "waited", "limited"),
    [(0.7, 0.0, False), (0.8, 0.0, True), (0.0, 0.3, True), (0.49, 0.29, False), (0.71, 0.26, True)],
)
def test_a_client_with_work_for_most_of_the_time_is_limited(
    used: float, waited: float, limited: bool
) -> None:
    """A client that shares its core may be busy all the time with less CPU time than that."""
    cost = cost_between({1: CpuTimes(1.0, 1.0)}, {1: CpuTimes(1.0 + 10 * used, 1.0 + 10 * waited)}, 10.0)
    assert (cost.share, cost.wait_share) == (pytest.approx(used), pytest.approx(waited))
    assert cost.limited is limited


def test_cpu_time_before_the_first_request_is_not_counted(endpoint: Endpoint, tmp_path: Path) -> None:
    importing = "end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    driver = ScriptedDriver(before=importing, pause=0.3)
    point = run(endpoint.target, WORKLOAD, driver=driver, folder=tmp_path, warm_up=False).points[0]
    assert point.client.cpu_s < 0.3


def test_the_client_runs_on_the_reserved_cpus(endpoint: Endpoint, tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    driver = ScriptedDriver(change="result['duration'] = 1000.0 + sum(os.sched_getaffinity(0))", pause=0.1)
    target = replace(endpoint.target, client_cpus=CpuSet((cpu,)))
    result = run(target, WORKLOAD, driver=driver, folder=tmp_path, warm_up=False)
    assert result.points[0].duration_s == 1000.0 + cpu
    assert not any("not pinned" in note for note in result.notes)


def test_a_client_without_reserved_cpus_is_named(endpoint: Endpoint, tmp_path: Path) -> None:
    result = run(endpoint.target, WORKLOAD, driver=ScriptedDriver(), folder=tmp_path, repeats=2)
    assert result.notes == ["load generator not pinned: no reserved cores"]


def test_a_load_generator_that_fails_is_explained(endpoint: Endpoint, tmp_path: Path) -> None:
    driver = ScriptedDriver(before="raise OSError(\"Can't load tokenizer for 'demo'\")")
    with pytest.raises(DriverError, match="Can't load tokenizer") as caught:
        run(endpoint.target, WORKLOAD, driver=driver, folder=tmp_path)
    assert "--tokenizer" in caught.value.remedy


def test_points_before_a_failure_are_kept(endpoint: Endpoint, tmp_path: Path) -> None:
    driver = ScriptedDriver(before="if seed == '1': sys.exit('engine gone: error')")
    with pytest.raises(PartialError, match="engine gone") as caught:
        run(endpoint.target, WORKLOAD, driver=driver, folder=tmp_path, repeats=3, warm_up=False)
    assert len(caught.value.result.points) == 1
    assert not caught.value.result.complete


def test_a_missing_load_generator_is_named(endpoint: Endpoint, tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="'/nowhere/vllm' cannot be started: no such file"):
        run(endpoint.target, WORKLOAD, driver=VllmDriver(("/nowhere/vllm",), None), folder=tmp_path)


def test_ctrl_c_keeps_what_was_measured_and_kills_the_client(endpoint: Endpoint, tmp_path: Path) -> None:
    driver = ScriptedDriver(before="if seed == '1':\n    print('second', flush=True)\n    time.sleep(600)")

    def second_runs() -> bool:
        # Not before: a client that is interrupted while it is started ends with its parent only.
        return (
            len(driver.jobs) == 2
            and driver.jobs[1].log_file.is_file()
            and "second" in driver.jobs[1].log_file.read_text()
        )

    threading.Thread(target=_interrupt_when, args=(second_runs,), daemon=True).start()
    with pytest.raises(Interrupted) as caught:
        run(endpoint.target, WORKLOAD, driver=driver, folder=tmp_path, repeats=2, warm_up=False)
    assert len(caught.value.result.points) == 1
    assert not caught.value.result.complete
    assert not psutil.Process().children()


def _interrupt_when(ready: Callable[[], bool]) -> None:
    while not ready():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)


def test_a_client_ends_with_its_bench(tmp_path: Path) -> None:
    """Also when `bench` is killed: the endpoint must not be loaded any longer."""
    text = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parents[2])]!r}
from pathlib import Path
from measure.bench.test_run import Endpoint, ScriptedDriver, WORKLOAD, run
run(Endpoint().target, WORKLOAD, driver=ScriptedDriver(before="print(os.getpid(), flush=True); time.sleep(600)"),
    folder=Path({str(tmp_path)!r}), warm_up=False)
"""
    parent = subprocess.Popen([sys.executable, "-c", text], cwd=Path(__file__).parents[3])
    log = tmp_path / "001.log"
    deadline = time.monotonic() + 60
    while not (log.is_file() and log.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child = psutil.Process(int(log.read_text().split()[0]))
    parent.kill()
    parent.wait()
    child.wait(timeout=30)


def test_a_dead_endpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="9: connection refused") as caught:
        run(
            Target(url="http://127.0.0.1:9", model="demo"), WORKLOAD, driver=ScriptedDriver(), folder=tmp_path
        )
    assert "start the endpoint" in caught.value.remedy


def test_an_unknown_model_is_refused_with_the_known_ones(endpoint: Endpoint, tmp_path: Path) -> None:
    target = Target(url=endpoint.target.url, model="other")
    with pytest.raises(LauncherError, match="does not serve model 'other'") as caught:
        run(target, WORKLOAD, driver=ScriptedDriver(), folder=tmp_path)
    assert "demo" in caught.value.remedy


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_wrong_key_is_refused(endpoint: Endpoint, tmp_path: Path, key: str | None) -> None:
    endpoint.key = "right"
    with pytest.raises(LauncherError, match="API key") as caught:
        run(
            Target(url=endpoint.target.url, model="demo", key=key),
            WORKLOAD,
            driver=ScriptedDriver(),
            folder=tmp_path,
        )
    assert "--key-file" in caught.value.remedy


def test_the_right_key_is_accepted(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.key = "right"
    target = Target(url=endpoint.target.url, model="demo", key="right")
    assert run(target, WORKLOAD, driver=ScriptedDriver(), folder=tmp_path, warm_up=False).points


def test_a_page_that_is_no_list_of_models_is_refused(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.models = {"hello": 1}
    with pytest.raises(LauncherError, match="no list of models"):
        run(endpoint.target, WORKLOAD, driver=ScriptedDriver(), folder=tmp_path)


def test_a_workload_that_does_not_fit_the_context_is_refused(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.models = {"data": [{"id": "demo", "max_model_len": 128}]}
    with pytest.raises(LauncherError, match="needs 136 tokens of context, model 'demo' has 128"):
        run(endpoint.target, WORKLOAD, driver=ScriptedDriver(), folder=tmp_path)


def test_the_phases_of_the_script_are_those_of_vllm() -> None:
    assert ScriptedDriver().progress("Starting main benchmark run...\n 1/2 [") == Phase(
        measuring=True, ended=False, done=1
    )
