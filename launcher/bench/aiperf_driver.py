"""NVIDIA's aiperf as the load generator (its files as version 0.13 writes them).

It holds conversations: with the workload `chat` a turn contains the endpoint's own earlier answers. Its inter-token
latency is one mean per request, our time per output token; its inter-chunk latency is our inter-token latency."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from launcher.bench.driver import Command, DriverError, Figures, Job, Phase
from launcher.bench.result import Percentiles
from launcher.bench.slo import RequestTimes
from launcher.errors import LauncherError, reason

_ENDPOINTS: Final = {"completions": "completions", "chat": "chat", "embeddings": "embeddings"}
_BEGIN: Final = "Phase profiling (profiling) started"
_END: Final = "Phase profiling (profiling) complete"
_MS: Final = 1000.0
_VERSION_S: Final = 60.0


def find_aiperf() -> AiperfDriver:
    """The one beside this Python, else in PATH. Raises LauncherError."""
    beside = Path(sys.executable).with_name("aiperf")
    found = str(beside) if beside.is_file() else shutil.which("aiperf")
    if found is None:
        raise LauncherError(
            f"cannot use --driver aiperf: no command 'aiperf' (not in {beside.parent} and not in PATH)",
            "install it in an environment of its own (pip install aiperf) and put its bin folder into PATH",
        )
    try:
        done = subprocess.run(
            [found, "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LauncherError(
            f"cannot use --driver aiperf: '{found} --version' failed: {error}", "run it by hand to see why"
        ) from None
    return AiperfDriver(found, done.stdout.strip())


class AiperfDriver:
    """Implements Driver."""

    name = "aiperf"

    def __init__(self, command: str, version: str) -> None:
        self._command = command
        self.version = version

    def prepare(self, job: Job) -> Command:
        target, workload = job.target, job.workload
        if workload.dataset is not None:
            raise LauncherError(
                "cannot use --dataset with --driver aiperf: its files have another form", "use --driver vllm"
            )
        if target.key is not None:
            raise LauncherError(
                "cannot use --key-file with --driver aiperf: it takes the key on its command line, which every user of "
                "this machine can read",
                "use --driver vllm",
            )
        argv = [
            self._command, "profile", "--model", target.model, "--url", target.url,
            "--endpoint-type", _ENDPOINTS[workload.api], "--tokenizer", target.tokenizer or target.model,
            *_prompts(job), "--random-seed", str(job.seed), "--use-server-token-count",
            "--output-artifact-dir", str(job.folder), "--profile-export-prefix", job.name, "--export-level", "records",
            "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
        ]  # fmt: skip
        if workload.api != "embeddings":
            argv += ["--streaming", "--extra-inputs", "ignore_eos:true"]
        if workload.temperature is not None:
            argv += ["--extra-inputs", f"temperature:{workload.temperature}"]
        if job.load.rate is not None:
            argv += ["--request-rate", repr(job.load.rate), "--arrival-pattern", "poisson"]
        if job.load.concurrency is not None:
            argv += ["--concurrency", str(job.load.concurrency)]
        return Command(tuple(argv), {"PYTHONUNBUFFERED": "1"})

    def progress(self, output: str) -> Phase:
        return Phase(measuring=_BEGIN in output, ended=_END in output, done=None)

    def read(self, job: Job) -> Figures:
        try:
            summary = json.loads(job.result_file.read_bytes())
            records = [
                json.loads(line) for line in _records_file(job).read_text(encoding="utf-8").splitlines()
            ]
            return figures_of(summary, records, job.requests)
        except OSError as error:
            why = reason(error)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = str(error) or type(error).__name__
        raise DriverError(
            f"cannot read the result of aiperf, '{job.result_file}': {why}",
            f"see its output in {job.log_file}; aiperf {self.version} may write another form",
        )

    def explain(self, output: str) -> tuple[str, str]:
        lines = [line.strip(" │╭╰─╮╯") for line in output.splitlines()]
        said = [line for line in lines if line]
        # Its log lines have a level; the box that follows them repeats the error in pieces.
        errors = (
            [line for line in said if " ERROR " in line] or [line for line in said if "rror" in line] or said
        )
        last = errors[-1] if errors else "no output"
        if "okenizer" in last:
            return last, "give the folder of the model's tokenizer with --tokenizer DIR"
        return last, "see its output in the file above"


def _records_file(job: Job) -> Path:
    return job.folder / f"{job.name}.jsonl"


def _prompts(job: Job) -> Iterator[str]:
    workload = job.workload
    output = ("--prompt-output-tokens-mean", str(workload.output_tokens)) if workload.output_tokens else ()
    if workload.prompts == "conversations":
        yield from (
            "--conversation-num", str(-(-job.requests // workload.turns)), "--conversation-turn-mean", str(workload.turns),
            "--shared-system-prompt-length", str(workload.system_words),
            "--prompt-input-tokens-mean", str(workload.question_words), *output,
        )  # fmt: skip
    else:
        # Fewer entries than requests would send some prompts twice.
        yield from (
            "--request-count", str(job.requests), "--num-dataset-entries", str(job.requests),
            "--prompt-input-tokens-mean", str(workload.input_tokens), *output,
        )  # fmt: skip


def figures_of(summary: dict[str, Any], records: list[dict[str, Any]], requests: int) -> Figures:
    """The files PREFIX.json and PREFIX.jsonl. Raises KeyError, TypeError or ValueError for files of another form."""
    good = [record for record in records if not record.get("error")]
    completed = len(good)
    rate = _average(summary, "request_throughput")
    duration = completed / rate if rate else _average(summary, "benchmark_duration")
    errors = Counter(_error(record["error"]) for record in records if record.get("error"))
    return Figures(
        duration_s=duration, completed=completed, failed=max(requests - completed, len(records) - completed),
        input_tokens=int(_average(summary, "total_isl")), output_tokens=int(_average(summary, "total_osl")),
        requests_per_s=rate, output_tokens_per_s=_average(summary, "output_token_throughput"),
        total_tokens_per_s=_average(summary, "total_token_throughput"),
        ttft_s=_percentiles(summary, "time_to_first_token"), tpot_s=_percentiles(summary, "inter_token_latency"),
        itl_s=_percentiles(summary, "inter_chunk_latency"), e2e_s=_percentiles(summary, "request_latency"),
        requests=[_request(record["metrics"]) for record in good],
        error=errors.most_common(1)[0][0] if errors else None,
    )  # fmt: skip


def _average(summary: dict[str, Any], name: str) -> float:
    """0 where the file has no such figure: all requests failed, or there are no output tokens."""
    found = summary.get(name)
    return 0.0 if found is None else float(found["avg"])


def _percentiles(summary: dict[str, Any], name: str) -> Percentiles | None:
    found = summary.get(name)
    if found is None:
        return None
    return Percentiles(
        mean=found["avg"] / _MS, p50=found["p50"] / _MS, p95=found["p95"] / _MS, p99=found["p99"] / _MS
    )


def _request(metrics: dict[str, Any]) -> RequestTimes:
    def value(name: str) -> Any:
        found = metrics.get(name)
        return None if found is None else found["value"]

    ttft = value("time_to_first_token")
    return RequestTimes(
        ttft=None if ttft is None else ttft / _MS, e2e=value("request_latency") / _MS,
        output_tokens=int(value("output_sequence_length") or 0),
        itl=[gap / _MS for gap in value("inter_chunk_latency") or ()],
    )  # fmt: skip


def _error(error: Any) -> str:
    text = str(error.get("message") or error.get("type")) if isinstance(error, dict) else str(error)
    return text.strip().splitlines()[0][:200] if text.strip() else "no reason given"
