"""`numa-launcher bench` from argv to text and exit code; the load generator is a script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.bench_endpoint import SAMPLE, Endpoint, ScriptedDriver
from support.bench_results import RESULT

from launcher import cli
from launcher.cli import bench_target
from launcher.measure.bench import store
from launcher.measure.bench.figures import by_load
from launcher.measure.bench.result import BenchResult


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.server.shutdown()
    endpoint.server.server_close()


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedDriver:
    """Instead of vLLM's benchmark."""
    driver = ScriptedDriver()
    monkeypatch.setattr(bench_target, "driver_of", lambda *_args: driver)
    return driver


def stored(folder: Path) -> list[BenchResult]:
    return store.load_all(folder / "bench")[0]


def bench(endpoint: Endpoint, folder: Path, *words: str) -> int:
    return cli.main(["bench", "--url", endpoint.target.url, "--state-dir", str(folder), *words])


def test_a_result_is_printed_and_stored(
    endpoint: Endpoint, scripted: ScriptedDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(endpoint, tmp_path, "--concurrency", "2,4") == 0
    printed = capsys.readouterr().out
    assert all(runs.label in printed for runs in by_load(stored(tmp_path)[0].points))
    (result,) = stored(tmp_path)
    assert result.id in printed
    assert result.model == "demo", "the first one that the endpoint serves"
    assert [job.load.concurrency for job in scripted.jobs] == [2, 2, 4]


@pytest.mark.usefixtures("scripted")
def test_json_is_the_stored_result(
    endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(endpoint, tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["id"] == stored(tmp_path)[0].id


def test_seeds_differ_between_runs(endpoint: Endpoint, scripted: ScriptedDriver, tmp_path: Path) -> None:
    bench(endpoint, tmp_path)
    bench(endpoint, tmp_path)
    assert len({job.seed for job in scripted.jobs}) == len(scripted.jobs)
    bench(endpoint, tmp_path, "--seed", "5")
    assert scripted.jobs[-1].seed == 5


def test_the_key_comes_from_a_file(endpoint: Endpoint, scripted: ScriptedDriver, tmp_path: Path) -> None:
    endpoint.key = "right"
    file = tmp_path / "key"
    file.write_text("right\n")
    assert bench(endpoint, tmp_path, "--key-file", str(file)) == 0
    assert scripted.jobs[0].target.key == "right"
    assert "right" not in (next((tmp_path / "bench").glob("*.json"))).read_text()


def test_all_requests_failed_is_exit_code_1(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = f"result = json.load(open({str(SAMPLE.with_name('vllm-0.32.0-failed.json'))!r})) if seed == '5' else result"
    monkeypatch.setattr(bench_target, "driver_of", lambda *_args: ScriptedDriver(change=failed))
    assert bench(endpoint, tmp_path, "--seed", "5") == 1
    assert "failed" in capsys.readouterr().out.lower().splitlines()[3]


@pytest.mark.parametrize(
    ("came", "code"), [("[5] * 4", 1), ("[128, 128, 5, 5]", 1), ("[130] * 4", 1), ("[129] * 4", 0)]
)
def test_a_row_that_is_not_of_the_workload_is_exit_code_1(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, came: str, code: int
) -> None:
    """The warm-up is whole: else nothing would be measured."""
    change = f"result['output_lens'] = {came} if seed == '5' else result['output_lens']"
    monkeypatch.setattr(bench_target, "driver_of", lambda *_args: ScriptedDriver(change=change))
    assert bench(endpoint, tmp_path, "--seed", "5") == code


def test_a_full_disk_keeps_the_printed_table(
    endpoint: Endpoint, scripted: ScriptedDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def full(*_args: Any, **_more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "replace_file", full)
    assert bench(endpoint, tmp_path) == 2
    printed = capsys.readouterr()
    assert "output tok/s" in printed.out
    assert "cannot store the result" in printed.err
    assert "no space left on device" in printed.err
    assert scripted.jobs


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--sweep"], "--sweep needs --slo"),
        (["--slo", "ttft=2"], "'ttft=2' is not a list of limits such as ttft_p99=2s"),
        (["--concurrency", "1,x"], "'1,x' is not a list of numbers"),
        (["--rate", "0"], "'0' is not a list of rates"),
        (["--rate", "1", "--concurrency", "1"], "not allowed with"),
        (["--workload", "nothing"], "choose one of rackspace-128, amd-128, chat, rag, batch, embeddings"),
        (["--dataset", "/nowhere/x.jsonl"], "cannot read --dataset '/nowhere/x.jsonl': no such file"),
        (["--key-file", "/nowhere/key"], "cannot read --key-file '/nowhere/key': no such file"),
        (["--seed", "-1"], "--seed"),
        (["--requets", "1"], "did you mean '--requests'?"),
    ],
)
@pytest.mark.usefixtures("scripted")
def test_mistakes_are_explained(
    endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], error: str
) -> None:
    try:
        code = bench(endpoint, tmp_path, *words)
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2
    assert error in capsys.readouterr().err


def test_a_url_without_a_scheme_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--url", "localhost:8000"]) == 2
    assert "cannot measure 'localhost:8000'" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_v1_belongs_to_the_requests(url: str) -> None:
    assert bench_target.base_url(url) == "http://h:1"


def test_stored_results_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "list", "--state-dir", str(tmp_path)]) == 0
    assert "no results" in capsys.readouterr().out
    (tmp_path / "bench").mkdir()
    store.save(tmp_path / "bench", RESULT)
    (tmp_path / "bench" / "torn.json").write_text('{"schema": 1, "id"')
    assert cli.main(["bench", "list", "--state-dir", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert RESULT.id in printed.out
    assert "torn.json" in printed.err


def test_the_state_folder_may_be_given_before_the_action(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--state-dir", str(tmp_path), "list"]) == 0
    assert str(tmp_path) in capsys.readouterr().out
