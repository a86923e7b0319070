"""Values between a measurement and its load generator: the endpoint, a job, a result file's figures, progress."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError, reason
from launcher.machine.hardware import Hardware
from launcher.measure.bench import workloads
from launcher.measure.bench.offered_load import Load
from launcher.measure.bench.outcomes import Figures, RequestTimes, Sent, figures_of
from launcher.measure.bench.result import Software
from launcher.measure.bench.workloads import Workload

# --- The endpoint under test, with what is known of the machine behind it. ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An OpenAI endpoint. Of a foreign one only the first four are known."""

    url: str
    """Without /v1 and without a trailing slash."""
    model: str
    """As requests name it."""
    tokenizer: str | None = None
    """Folder of the model's tokenizer; None: `model`, as a repository id of the Hugging Face hub."""
    key: str | None = field(default=None, repr=False)
    """API key."""
    client_cpus: CpuSet | None = None
    """Where the load generator runs: the plan's reserved cpus. None: anywhere."""
    cores: int | None = None
    """Physical cores of all instances."""
    plan: dict[str, Any] | None = None
    picture_svg: str | None = None
    hardware: Hardware | None = None
    software: Software | None = None


class Job(Struct, frozen=True, kw_only=True):
    """One point to be measured."""

    target: Target
    workload: Workload
    load: Load
    requests: int
    seed: int
    folder: Path
    name: str
    """Of the files in `folder`."""
    opening: int = 0
    """Events of a stream before its first output that the load generator takes for tokens."""

    @property
    def result_file(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def log_file(self) -> Path:
        return self.folder / f"{self.name}.log"


class Command(Struct, frozen=True):
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Added to the environment. An empty value removes the variable."""


class Phase(Struct, frozen=True):
    """Read from the load generator's output."""

    measuring: bool
    """The first request has been sent."""
    ended: bool
    """The last response has arrived."""
    done: int | None
    """Completed requests; None: it does not say."""


class DriverError(LauncherError):
    """The load generator gave no usable result."""


# --- How far a run is, for a live line. ---


class Progress(Struct, frozen=True, kw_only=True):
    """For a live line."""

    what: str
    """warm-up, or the load: "4 at once"."""
    point: int
    """From 1; 0 for the warm-up."""
    points: int | None
    """None: a search does not know."""
    done: int | None
    """Completed requests; None: the load generator does not say."""
    requests: int
    measuring: bool
    """False while the load generator starts."""
    elapsed_s: float
    """Since the first request of the point."""


# --- `vllm bench serve` as the load generator (vllm/benchmarks/serve.py, read in 0.32). ---
#
# What it does not do by itself: it exits with 0 when every request failed, writes no file when interrupted, and takes
# prompts from the prefix cache when a seed comes twice. Its ready check, which sends one request more than asked for,
# is switched off.

_BACKENDS: Final = {
    "completions": ("openai", "/v1/completions"),
    "chat": ("openai-chat", "/v1/chat/completions"),
    "embeddings": ("openai-embeddings", "/v1/embeddings"),
}
# Lines that it prints before the first request and after the last response.
_BEGIN: Final = "Starting main benchmark run..."
_END: Final = " Serving Benchmark Result "
_PROGRESS: Final = re.compile(r"(\d+)/\d+ \[")
_MISSING: Final = re.compile(r"No module named '(\w+)")
# Output tokens of a request whose data set names none.
_DEFAULT_OUTPUT: Final = 256


class VllmDriver:
    """The command line of a job, and its result file. `prepare` raises LauncherError, `read` DriverError."""

    name = "vllm"

    def __init__(self, command: Sequence[str], version: str | None) -> None:
        """`command` starts vLLM, as engine.command does."""
        self._command = tuple(command)
        self.version = version or "unknown"

    def prepare(self, job: Job) -> Command:
        target, workload, load = job.target, job.workload, job.load
        backend, path = _BACKENDS[workload.api]
        argv = [
            *self._command, "bench", "serve", "--backend", backend, "--base-url", target.url, "--endpoint", path,
            "--model", target.model, "--tokenizer", target.tokenizer or target.model,
            *_dataset(job), "--num-prompts", str(job.requests), "--seed", str(job.seed),
            "--request-rate", "inf" if load.rate is None else repr(load.rate),
            "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,95,99",
            "--ready-check-timeout-sec", "0", "--save-result", "--save-detailed",
            "--result-dir", str(job.folder), "--result-filename", job.result_file.name,
        ]  # fmt: skip
        if load.concurrency is not None:
            argv += ["--max-concurrency", str(load.concurrency)]
        # A data set's responses end where the model ends them; those of other workloads have an exact length.
        if workload.exact_output is not None:
            argv += ["--ignore-eos"]
        if workload.temperature is not None:
            argv += ["--temperature", str(workload.temperature)]
        env = {
            "OPENAI_API_KEY": target.key or "",
            "PYTHONUNBUFFERED": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TQDM_MININTERVAL": "0.5",
        }
        if target.tokenizer is not None and Path(target.tokenizer).exists():
            env["HF_HUB_OFFLINE"] = "1"
        return Command(tuple(argv), env)

    def progress(self, output: str) -> Phase:
        _, begun, rest = output.partition(_BEGIN)
        done = 0
        for found in _PROGRESS.finditer(rest):
            done = int(found[1])
        return Phase(measuring=bool(begun), ended=_END in rest, done=done)

    def read(self, job: Job) -> Figures:
        try:
            file = json.loads(job.result_file.read_bytes())
            sent = requests_of(file, job.workload, opening=job.opening)
            return figures_of(sent, float(file["duration"]))
        except OSError as error:
            raise DriverError(
                f"cannot read the result of vllm bench serve, '{job.result_file}': {reason(error)}",
                f"see its output in {job.log_file}",
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise DriverError(
                f"cannot read the result of vllm bench serve, '{job.result_file}': {str(error) or type(error).__name__}",
                f"see its output in {job.log_file}; vLLM {self.version} may write another form",
            ) from None

    def explain(self, output: str) -> tuple[str, str]:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        last = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "no output")
        if (missing := _MISSING.search(last)) is not None:
            return last, f"install Python package {missing[1]} into the environment of {self._command[0]}"
        if "unrecognized arguments" in last or "invalid choice" in last:
            return last, f"install a newer vLLM: {self.version} does not know an option that bench needs"
        if "okenizer" in last or "huggingface" in output or "LocalEntryNotFound" in output:
            return last, "give the folder of the model's tokenizer with --tokenizer DIR"
        return last, "see its output in the file above"


def _dataset(job: Job) -> list[str]:
    """The options of the data set; writes the file that they name."""
    workload = job.workload
    if workload.prompts == "random":
        return [
            "--dataset-name", "random", "--random-input-len", str(workload.input_tokens),
            "--random-output-len", str(workload.output_tokens or 1),
        ]  # fmt: skip
    if workload.prompts == "sharegpt":
        return ["--dataset-name", "sharegpt", "--dataset-path", str(workload.dataset)]
    if workload.prompts == "conversations":
        lines = workloads.conversations(workload, job.requests, job.seed)
    else:
        lines = _user_requests(str(workload.dataset))
    file = job.folder / f"{job.name}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return [
        "--dataset-name", "custom", "--dataset-path", str(file), "--custom-output-len", "-1", "--skip-chat-template",
        *(["--disable-shuffle"] if workload.prompts == "conversations" else []),
    ]  # fmt: skip


def _user_requests(path: str) -> list[workloads.Prompt]:
    try:
        with Path(path).open(encoding="utf-8") as lines:
            found = list(workloads.read_requests(lines, _DEFAULT_OUTPUT))
    except OSError as error:
        raise LauncherError(
            f"cannot read --dataset '{path}': {reason(error)}", "give a readable JSONL or ShareGPT file"
        ) from None
    except ValueError as error:
        raise LauncherError(
            f"cannot use --dataset '{path}': {error}",
            'write one request per line, such as {"prompt": "…", "max_tokens": 128}',
        ) from None
    if not found:
        raise LauncherError(f"cannot use --dataset '{path}': it has no requests", "add requests to it")
    return found


def requests_of(file: dict[str, Any], workload: Workload, *, opening: int = 0) -> list[Sent]:
    """The requests of a result file of `--save-result --save-detailed`. `opening`: events of each stream that came before
    its first output: they are no tokens, and the first of them is no first token.

    Raises KeyError, TypeError or ValueError for a file of another form."""
    rows = zip_longest(
        file["latencies"], file["errors"], file["input_lens"],
        # Of embeddings the file has only the whole latency.
        file.get("ttfts", ()), file.get("output_lens", ()), file.get("itls", ()),
    )  # fmt: skip
    return [
        Sent(
            prompt_tokens=int(prompt), asked=workload.exact_output,
            times=_times(ttft, float(latency), int(tokens or 0), list(itl or ()), opening),
            error=_error(error, latency),
        )
        for latency, error, prompt, ttft, tokens, itl in rows
    ]  # fmt: skip


def _times(first: float | None, latency: float, tokens: int, gaps: list[float], opening: int) -> RequestTimes:
    """`first`: to the first event of the stream, `gaps`: to each later one."""
    if first is not None:
        first = first + sum(gaps[:opening]) if len(gaps) >= opening else None
    return RequestTimes(ttft=first, e2e=latency, output_tokens=tokens, itl=gaps[opening:])


def _error(said: str, latency: float) -> str | None:
    """None where the load generator takes the request for completed: of one that failed there may be no text."""
    lines = str(said).strip().splitlines()
    if lines:
        return lines[-1]
    return None if latency and not said else ""
