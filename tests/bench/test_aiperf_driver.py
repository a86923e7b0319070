"""aiperf: its command line, its output, and its files, as aiperf 0.13.0 wrote them (fewer keys)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.test_vllm_driver import job, job_of, option

from launcher.bench import aiperf_driver, workloads
from launcher.bench.aiperf_driver import AiperfDriver, figures_of, find_aiperf
from launcher.bench.driver import DriverError
from launcher.bench.load import Load
from launcher.bench.target import Target
from launcher.errors import LauncherError

HERE = Path(__file__).parent
DRIVER = AiperfDriver("/opt/bin/aiperf", "0.13.0")
OPEN = Target(url="http://h:1", model="demo")
FAILED = {
    "metadata": {},
    "metrics": {},
    "error": {"code": 404, "type": "Not Found", "message": "no such model"},
}


def summary() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "aiperf-0.13.0.json").read_text())
    return found


def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / "aiperf-0.13.0.jsonl").read_text().splitlines()]


def test_figures_are_those_of_the_file() -> None:
    file = summary()
    figures = figures_of(file, records(), 8)
    assert (figures.completed, figures.failed) == (8, 0)
    assert (figures.input_tokens, figures.output_tokens) == (360, 64)
    assert figures.output_tokens_per_s == file["output_token_throughput"]["avg"]
    assert figures.ttft_s is not None
    assert figures.ttft_s.p99 == file["time_to_first_token"]["p99"] / 1000
    assert figures.itl_s is not None
    assert figures.itl_s.p95 == file["inter_chunk_latency"]["p95"] / 1000
    assert figures.tpot_s is not None
    assert figures.tpot_s.p50 == file["inter_token_latency"]["p50"] / 1000
    assert figures.completed / figures.duration_s == pytest.approx(figures.requests_per_s)


def test_single_requests_give_the_same_means() -> None:
    figures = figures_of(summary(), records(), 8)
    tpot = [request.tpot for request in figures.requests if request.tpot is not None]
    assert figures.tpot_s is not None
    assert sum(tpot) / len(tpot) == pytest.approx(figures.tpot_s.mean)


def test_failed_requests_are_counted_with_their_error() -> None:
    figures = figures_of(summary(), [*records()[:6], FAILED, FAILED], 8)
    assert (figures.completed, figures.failed, figures.error) == (6, 2, "no such model")


def test_requests_without_a_record_have_failed() -> None:
    assert figures_of(summary(), records(), 10).failed == 2


def test_the_load_becomes_options(tmp_path: Path) -> None:
    argv = DRIVER.prepare(replace(job(tmp_path), target=OPEN)).argv
    assert option(argv, "--request-count") == option(argv, "--num-dataset-entries") == "20"
    assert option(argv, "--concurrency") == "4"
    assert option(argv, "--random-seed") == "7"
    assert "temperature:0.7" in argv
    rate = DRIVER.prepare(replace(job(tmp_path), target=OPEN, load=Load(rate=0.5))).argv
    assert (option(rate, "--request-rate"), option(rate, "--arrival-pattern")) == ("0.5", "poisson")


def test_chat_has_turns_behind_one_system_prompt(tmp_path: Path) -> None:
    argv = DRIVER.prepare(replace(job(tmp_path, workload="chat"), target=OPEN)).argv
    assert option(argv, "--conversation-turn-mean") == "4"
    assert option(argv, "--conversation-num") == "5"
    assert option(argv, "--shared-system-prompt-length") == "300"


def test_a_key_is_refused(tmp_path: Path) -> None:
    """aiperf takes it on its command line."""
    with pytest.raises(LauncherError, match="every user"):
        DRIVER.prepare(job(tmp_path))


def test_a_data_set_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "a"}\n')
    with pytest.raises(LauncherError, match="--dataset"):
        DRIVER.prepare(replace(job_of(tmp_path, workloads.of_dataset(file)), target=OPEN))


def test_files_are_read_by_name(tmp_path: Path) -> None:
    its = replace(job(tmp_path), requests=8)
    its.result_file.write_bytes((HERE / "aiperf-0.13.0.json").read_bytes())
    (tmp_path / "001.jsonl").write_bytes((HERE / "aiperf-0.13.0.jsonl").read_bytes())
    assert DRIVER.read(its).completed == 8


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"request_throughput": 3}'])
def test_a_torn_file_is_an_error_with_its_name(tmp_path: Path, text: str) -> None:
    its = job(tmp_path)
    its.result_file.write_text(text)
    (tmp_path / "001.jsonl").write_text('{"metrics": {}}\n')
    with pytest.raises(DriverError, match=r"001\.json"):
        DRIVER.read(its)


def test_phases_are_read_from_the_log() -> None:
    started = "18:13:42.916 NOTICE   Phase profiling (profiling) started | phase_index=0\n"
    assert not DRIVER.progress("Starting AIPerf System").measuring
    assert DRIVER.progress(started).measuring
    assert not DRIVER.progress(f"{started}Phase profiling (profiling) sending complete | sent=8\n").ended
    assert DRIVER.progress(f"{started}NOTICE   Phase profiling (profiling) complete | completed=8\n").ended


def test_a_failure_is_explained_by_the_logged_error() -> None:
    output = (
        "18:16:08.990 ERROR    All 4 inference request(s) failed; no successful responses were collected.\n"
        "╭─ AIPerf System Exit Errors ─╮\n│    Error: Unknown │\n│            error details. │\n"
    )
    assert "All 4 inference request(s) failed" in DRIVER.explain(output)[0]
    assert DRIVER.explain("")[0] == "no output"


def test_a_missing_aiperf_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiperf_driver.shutil, "which", lambda _name: None)
    with pytest.raises(LauncherError, match="no command 'aiperf'") as caught:
        find_aiperf()
    assert "pip install aiperf" in caught.value.remedy
