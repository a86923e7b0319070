"""vLLM's benchmark: its command line, its output, and its result files, as vLLM 0.32.0 wrote them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from launcher.base.errors import LauncherError
from launcher.measure.bench import offered_load, outcomes, workloads
from launcher.measure.bench.load_generator import DriverError, Job, Target, VllmDriver, requests_of
from launcher.measure.bench.offered_load import Load
from launcher.measure.bench.outcomes import Figures

HERE = Path(__file__).parent
DRIVER = VllmDriver(("/opt/bin/vllm",), "0.32.0")


def file_of(what: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / f"vllm-0.32.0-{what}.json").read_text())
    return found


def job(folder: Path, workload: str = "rackspace-128", **more: Any) -> Job:
    values: dict[str, Any] = {
        "target": Target(url="http://h:1", model="demo", key="secret"), "workload": workloads.named(workload),
        "load": Load(concurrency=4), "requests": 20, "seed": 7, "folder": folder, "name": "001",
    }  # fmt: skip
    return Job(**(values | more))


def figures_of(file: dict[str, Any], asked: int = 8) -> Figures:
    """Of a file whose requests asked for `asked` tokens."""
    workload = replace(workloads.named("rackspace-128"), output_tokens=asked)
    return outcomes.figures_of(requests_of(file, workload), float(file["duration"]))


def option(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_figures_are_those_of_the_file() -> None:
    file = file_of("completions")
    figures = figures_of(file)
    assert figures.duration_s == file["duration"]
    assert (figures.completed, figures.failed) == (4, 0)
    assert (figures.input_tokens, figures.output_tokens) == (68, 32)
    assert figures.requests_per_s == pytest.approx(file["request_throughput"])
    assert figures.output_tokens_per_s == pytest.approx(file["output_throughput"])
    assert figures.total_tokens_per_s == pytest.approx(file["total_token_throughput"])
    names = {"ttft": figures.ttft_s, "tpot": figures.tpot_s, "itl": figures.itl_s, "e2el": figures.e2e_s}
    for name, found in names.items():
        assert found is not None
        assert msgspec.structs.asdict(found) == {
            part: pytest.approx(file[f"{part}_{name}_ms"] / 1000) for part in ("mean", "p50", "p95", "p99")
        }
    assert figures.error is None


def test_single_requests_are_those_of_the_file() -> None:
    figures = figures_of(file_of("completions"))
    assert len(figures.requests) == 4
    assert all(len(request.itl) == request.output_tokens - 1 == 7 for request in figures.requests)


def test_goodput_is_what_vllm_counts() -> None:
    """The file was made with --goodput ttft:20 tpot:6."""
    file = file_of("completions")
    figures = figures_of(file)
    good = offered_load.good_requests(figures.requests, {"ttft_p99": 0.020, "tpot_p99": 0.006})
    assert 0 < good < 4
    assert good / figures.duration_s == pytest.approx(file["request_goodput"])


def test_requests_that_all_failed_give_no_latencies() -> None:
    figures = figures_of(file_of("failed"))
    assert (figures.completed, figures.failed, figures.error) == (0, 4, "Not Found")
    assert figures.ttft_s is figures.e2e_s is None
    assert figures.requests == []


@pytest.mark.parametrize("came", [[5, 5, 5, 5], [8, 8, 8, 7]])
def test_a_request_short_of_its_exact_length_has_failed(came: list[int]) -> None:
    """vLLM's benchmark takes a stream for completed once its first event came, with 5 of 128 tokens and an error event."""
    file = {**file_of("completions"), "output_lens": came}
    figures, whole = figures_of(file), came.count(8)
    assert (figures.completed, figures.failed) == (whole, 4 - whole)
    assert (figures.asked_tokens, figures.output_tokens) == (32, 8 * whole)
    assert figures.requests_per_s == pytest.approx(whole / file["duration"])
    assert len(figures.requests) == whole
    assert figures.error == f"{came[-1]} of 8 output tokens came"


def test_an_event_before_the_first_output_is_no_token() -> None:
    """The role came early: without its event, time to first token and gaps are those of an engine that sends none."""
    file = file_of("completions")
    workload = replace(workloads.named("rackspace-128"), output_tokens=8)
    early = {
        **file,
        "ttfts": [0.001] * 4,
        "itls": [[first - 0.001, *gaps] for first, gaps in zip(file["ttfts"], file["itls"], strict=True)],
    }
    plain, corrected = requests_of(file, workload), requests_of(early, workload, opening=1)
    for one, other in zip(plain, corrected, strict=True):
        assert other.times.ttft == pytest.approx(one.times.ttft)
        assert other.times.itl == one.times.itl
    assert requests_of({**early, "itls": [[]] * 4}, workload, opening=1)[0].times.ttft is None


def test_answers_of_a_data_set_have_no_exact_length(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "one"}\n')
    workload = workloads.of_dataset(tmp_path / "mine.jsonl")
    found = requests_of({**file_of("completions"), "output_lens": [5, 8, 8, 8]}, workload)
    assert [each.failure for each in found] == [None] * 4
    assert outcomes.figures_of(found, 1.0).asked_tokens is None


def test_failed_embeddings_are_counted_by_their_errors() -> None:
    figures = figures_of(file_of("embeddings-failed"))
    assert (figures.completed, figures.failed, figures.output_tokens) == (0, 4, 0)


def test_responses_of_one_token_have_no_gaps() -> None:
    file = file_of("completions")
    file["output_lens"], file["itls"] = [1] * 4, [[]] * 4
    figures = figures_of(file, asked=1)
    assert figures.tpot_s is figures.itl_s is None


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_torn_file_is_an_error_with_its_name(tmp_path: Path, share: float) -> None:
    text = (HERE / "vllm-0.32.0-completions.json").read_text()
    its = job(tmp_path)
    its.result_file.write_text(text[: math.floor(len(text) * share)])
    with pytest.raises(DriverError, match=r"001\.json"):
        DRIVER.read(its)


@pytest.mark.parametrize("content", [b"[]", b"{}", b"null", b'{"errors": 3}', b"\xff\xfe"])
def test_a_file_of_another_form_is_an_error_with_its_name(tmp_path: Path, content: bytes) -> None:
    its = job(tmp_path)
    its.result_file.write_bytes(content)
    with pytest.raises(DriverError, match=r"001\.json"):
        DRIVER.read(its)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="no such file"):
        DRIVER.read(job(tmp_path))


def test_the_published_load_becomes_options(tmp_path: Path) -> None:
    command = DRIVER.prepare(job(tmp_path))
    argv = command.argv
    assert argv[:3] == ("/opt/bin/vllm", "bench", "serve")
    assert option(argv, "--random-input-len") == option(argv, "--random-output-len") == "128"
    assert option(argv, "--num-prompts") == "20"
    assert option(argv, "--max-concurrency") == "4"
    assert option(argv, "--request-rate") == "inf"
    assert option(argv, "--temperature") == "0.7"
    assert option(argv, "--seed") == "7"
    assert option(argv, "--tokenizer") == "demo"


def test_no_probe_request_is_sent(tmp_path: Path) -> None:
    assert option(DRIVER.prepare(job(tmp_path)).argv, "--ready-check-timeout-sec") == "0"


def test_the_key_is_in_the_environment_only(tmp_path: Path) -> None:
    command = DRIVER.prepare(job(tmp_path))
    assert command.env["OPENAI_API_KEY"] == "secret"
    assert "secret" not in " ".join(command.argv)
    without = DRIVER.prepare(job(tmp_path, target=Target(url="http://h:1", model="demo")))
    assert without.env["OPENAI_API_KEY"] == "", (
        "one of the caller's environment would be sent to the endpoint"
    )


def test_an_open_loop_has_a_rate_and_no_bound(tmp_path: Path) -> None:
    argv = DRIVER.prepare(job(tmp_path, load=Load(rate=0.5))).argv
    assert option(argv, "--request-rate") == "0.5"
    assert "--max-concurrency" not in argv


def test_embeddings_have_their_own_route(tmp_path: Path) -> None:
    argv = DRIVER.prepare(job(tmp_path, workload="embeddings")).argv
    assert option(argv, "--endpoint") == "/v1/embeddings"
    assert "--ignore-eos" not in argv


def test_conversations_become_a_data_set_in_order(tmp_path: Path) -> None:
    argv = DRIVER.prepare(job(tmp_path, workload="chat")).argv
    assert option(argv, "--backend") == "openai-chat"
    assert "--disable-shuffle" in argv
    lines = [json.loads(line) for line in Path(option(argv, "--dataset-path")).read_text().splitlines()]
    assert len(lines) == 20
    assert {line["output_tokens"] for line in lines} == {128}


def test_a_data_set_of_the_user_is_sent_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(
        '{"prompt": "one", "max_tokens": 5}\n{"messages": [{"role": "user", "content": "two"}]}\n'
    )
    workload = workloads.of_dataset(file)
    argv = DRIVER.prepare(job_of(tmp_path, workload)).argv
    assert "--ignore-eos" not in argv
    lines = [json.loads(line) for line in Path(option(argv, "--dataset-path")).read_text().splitlines()]
    assert lines == [{"prompt": "one", "output_tokens": 5}, {"prompt": "User: two", "output_tokens": 256}]


def job_of(folder: Path, workload: workloads.Workload) -> Job:
    return replace(job(folder), workload=workload)


@pytest.mark.parametrize("text", ["nonsense\n", '{"other": 1}\n', '{"prompt": ["a"]}\n', '{"prompt": ""}\n'])
def test_a_data_set_that_cannot_be_used_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "one"}\n' + text)
    with pytest.raises(LauncherError, match="line 2") as caught:
        DRIVER.prepare(job_of(tmp_path, workloads.of_dataset(file)))
    assert "one request per line" in caught.value.remedy


def test_progress_is_read_from_the_output() -> None:
    starting = "INFO importing\n 50%|##   | 5/10 [00:01<00:01]\n"
    assert not DRIVER.progress(starting).measuring
    running = f"{starting}Starting main benchmark run...\nTraffic request rate: inf\n"
    phase = DRIVER.progress(running)
    assert (phase.measuring, phase.ended, phase.done) == (True, False, 0)
    bar = f"{running}\r  0%|   | 0/20 [00:00<?, ?it/s]\r 60%|###  | 12/20 [00:01<00:01, 9.1it/s]"
    assert DRIVER.progress(bar).done == 12
    assert DRIVER.progress(f"{bar}\n============ Serving Benchmark Result ============\n").ended


@pytest.mark.parametrize(
    ("output", "remedy"),
    [
        ("vllm: error: unrecognized arguments: --ready-check-timeout-sec 0\n", "newer vLLM"),
        ("Traceback\nOSError: Can't load tokenizer for 'demo'.\n", "--tokenizer"),
        ("Traceback\nModuleNotFoundError: No module named 'pandas'\n", "install Python package pandas"),
        ("Traceback\nValueError: x\n", "output"),
        ("", "output"),
    ],
)
def test_a_failure_is_explained(output: str, remedy: str) -> None:
    _, advice = DRIVER.explain(output)
    assert remedy in advice


def test_figures_can_be_stored() -> None:
    figures = figures_of(file_of("completions"))
    assert msgspec.json.decode(msgspec.json.encode(figures), type=Figures) == figures
