"""`numa-launcher quickstart`: a first run with the real daemon.

Writes a configuration, prints the plan, runs `numa-launcher serve` as a child process, shows progress,
sends one streamed chat completion to the endpoint, and prints the placement of the instances.
"""

from __future__ import annotations

import argparse
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Final, Self

from launcher.base.errors import LauncherError, reason
from launcher.base.text import printable_lines
from launcher.cli import options
from launcher.control.client import ControlClient

# From the start of the daemon to its control socket; the daemon reads the machine and probes numactl first.
SOCKET_TIMEOUT_S: Final = 30.0
# From SIGTERM to the exit of the daemon and all its instances.
STOP_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.3
# Between two equal signals: pending equal signals are merged (signal(7)).
HASTE_S: Final = 0.2
CHAT_TIMEOUT_S: Final = 300.0
MAX_TOKENS: Final = 48
# A model may take requests of 131,072 tokens and more, and one of them may need more memory than the host has.
MAX_CONTEXT: Final = 8192
QUESTION: Final = "Say hello to every core of this machine."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine", choices=("vllm", "llama.cpp"), default="vllm", help="start this engine (default: vllm)"
    )
    parser.add_argument(
        "--model", required=True, metavar="MODEL",
        help="serve this model directory or Hugging Face repository id; with llama.cpp a GGUF file",
    )  # fmt: skip
    parser.add_argument("--once", action="store_true", help="stop after the first response")
    parser.add_argument(
        "--instances",
        type=options.Value("a number of 1 or more", options.whole(1)),
        metavar="N",
        help="start N instances per socket (default: depends on the number of cores)",
    )
    parser.add_argument(
        "--port", type=options.Value("a port from 1 to 65535", options.whole(1, 65535)), default=8000,
        metavar="P", help="listen on this port of 127.0.0.1 (default: 8000)",
    )  # fmt: skip
    parser.add_argument(
        "--state-dir",
        type=Path,
        default=Path(".quickstart"),
        metavar="DIR",
        help="store sockets, caches and logs in this directory (default: .quickstart)",
    )
    parser.add_argument(
        "--demo",
        action="store_true",
        help="use settings for a demo model with random weights, such as a small KV cache",
    )


def run(args: argparse.Namespace) -> int:
    _check_port(args.port)
    state = args.state_dir.absolute()
    state.mkdir(parents=True, exist_ok=True)
    config = state / "config.toml"
    length = None if args.demo else _long_context(args)
    config.write_text(_config(args, state, shortened=length is not None), encoding="utf-8")
    _step("Plan for this machine")
    if length is not None:
        print(
            f"   max_model_len = {MAX_CONTEXT}; the model takes {length}: raise it in {config}, and start that with "
            f"`{_command()} serve -c {config}`",
            flush=True,
        )
    _show_plan(config)
    _step(f"Starting the instances (log: {state / 'serve.log'})")
    with (state / "serve.log").open("wb") as log, _Serve(config, log, hasty=args.once) as serve:
        client = ControlClient(str(state / "run" / "control.sock"))
        began = time.monotonic()
        status = _wait_ready(client, serve, state / "serve.log")
        took_s = time.monotonic() - began
        print(f"   all {len(status['slots'])} instances ready after {took_s:.0f} s", flush=True)
        model = status["slots"][0]["model"]
        _step(f"One streamed chat completion from {status['endpoint']}")
        _chat(args.port, model)
        if args.demo:
            print("   (demo model with random weights: the text is random; use a real model with --model)")
        _step("Placement of the running threads and pages")
        _show_result(_wait_verified(client), config, model)
        if args.once:
            return 0
        print("\nPress Ctrl-C to stop everything.", flush=True)
        try:
            serve.wait()
        except KeyboardInterrupt:
            return 0
        raise LauncherError("cannot continue: the daemon exited", f"read {state / 'serve.log'}")


def _check_port(port: int) -> None:
    """At once, and with quickstart's own option: the daemon would name a key of a file that is written here."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise LauncherError(
            f"cannot listen on '127.0.0.1:{port}': {reason(error)}",
            f"choose another port with --port; `ss -ltnp 'sport = :{port}'` shows who has this one",
        ) from None


def _command() -> Path:
    return Path(sys.executable).with_name("numa-launcher")


def _step(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _path(model: str) -> str:
    return str(Path(model).absolute()) if Path(model).exists() else model


def _long_context(args: argparse.Namespace) -> int | None:
    """The longest request that the model takes, in tokens, where that is more than MAX_CONTEXT and the environment sets no
    length. None for a model whose files are not here or cannot be read: the plan says why."""
    from launcher.config.loading import load_config  # noqa: PLC0415  heavy
    from launcher.daemon.deployment import read_profiles  # noqa: PLC0415  heavy

    base = {"models": [{"name": "model", "path": _path(args.model)}], "engine": {"kind": args.engine}}
    try:
        config = load_config(None, base=base, environ=os.environ)
        if config.models[0].max_model_len is not None:
            return None
        lengths = [profile.max_model_len or 0 for profile in read_profiles(config).values()]
    except LauncherError:
        return None
    length = max(lengths, default=0)
    return length if length > MAX_CONTEXT else None


def _config(args: argparse.Namespace, state: Path, *, shortened: bool) -> str:
    text = json.dumps  # JSON strings are valid TOML strings
    name = "demo" if args.demo else Path(args.model).name.removesuffix(".gguf")
    instances = args.instances if args.instances is not None else _demo_instances(args)
    lines = [
        "# Written by `numa-launcher quickstart`. To use it again: numa-launcher serve -c FILE",
        "[[models]]",
        f"name = {text(name)}",
        f"path = {text(_path(args.model))}",
        *(["max_model_len = 2048", "max_num_seqs = 16"] if args.demo else []),
        *([f"max_model_len = {MAX_CONTEXT}"] if shortened else []),
        "[layout]",
        f"instances_per_socket = {text(instances)}",
        "[engine]",
        f"kind = {text(args.engine)}",
        f"cache_dir = {text(str(state / 'cache'))}",
        "[proxy]",
        f'listen = ["127.0.0.1:{args.port}"]',
        "[control]",
        f"socket = {text(str(state / 'run' / 'control.sock'))}",
        "[usage]",
        f"path = {text(str(state / 'usage' / 'usage.db'))}",
        "[supervision]",
        "drain_timeout_s = 10",
        "stop_timeout_s = 15",
        "[logging]",
        'level = "debug"',
        'format = "text"',
    ]
    return "\n".join(lines) + "\n"


def _demo_instances(args: argparse.Namespace) -> int | str:
    """Two instances where `auto` gives one, so that the demo shows balancing."""
    from launcher.machine import sysfs  # noqa: PLC0415  heavy

    if not args.demo:
        return "auto"
    topology = sysfs.read(Path("/"))
    nodes = [node for node in topology.numa_nodes if node.cpus & topology.allowed]
    cores = sum(1 for core in topology.cores if core.cpus & topology.allowed)
    return 2 if len(topology.sockets) == len(nodes) == 1 and 2 <= cores <= 64 else "auto"


def _show_plan(config: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "launcher", "plan", "-c", str(config)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    print("\n".join(f"   {line}" for line in done.stdout.splitlines()), flush=True)
    if done.returncode:
        why = (done.stderr.strip() or "the plan above does not fit this machine").splitlines()
        raise LauncherError(
            f"cannot plan: {why[0].removeprefix('cannot plan: ')}",
            why[1] if len(why) > 1 else "use fewer --instances, or another --model",
        )


class _Serve:
    """`numa-launcher serve` as a child process that ends with this one."""

    def __init__(self, config: Path, log: IO[bytes], *, hasty: bool) -> None:
        # With no requests in flight there is no need to wait for vLLM's shutdown, which takes seconds.
        self._hasty = hasty
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "launcher", "serve", "-c", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # so that Ctrl-C does not reach the daemon directly
            preexec_fn=_die_with_parent,  # noqa: PLW1509  one thread, and prctl only
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is not None:
            return
        print("\nstopping ...", flush=True)
        self._process.terminate()
        try:
            if self._hasty:
                time.sleep(HASTE_S)
                self._process.terminate()
            self._process.wait(STOP_TIMEOUT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.terminate()  # the second signal ends it at once
            self._process.wait()
        print("stopped", flush=True)

    def wait(self) -> None:
        self._process.wait()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None


def _die_with_parent() -> None:
    """PR_SET_PDEATHSIG (1): the kernel sends SIGTERM to the daemon when this process dies."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)


def _wait_ready(client: ControlClient, serve: _Serve, log: Path) -> dict[str, Any]:
    began = time.monotonic()
    said: dict[int, str] = {}
    while True:
        try:
            status = client.get("/status")
        except LauncherError:
            if serve.ended or time.monotonic() - began > SOCKET_TIMEOUT_S:
                raise _daemon_failed(log) from None
            time.sleep(POLL_S)
            continue
        for slot in status["slots"]:
            words = slot["phase"] or slot["state"]
            if said.get(slot["slot"]) != words:
                said[slot["slot"]] = words
                print(f"   {time.monotonic() - began:5.0f} s  slot {slot['slot']}: {words}", flush=True)
            if slot["state"] in {"failed", "backoff"}:
                cause = slot["last_cause"]
                evidence = "".join(f"\n  | {line}" for line in cause["evidence"])
                raise LauncherError(
                    f"cannot start slot {slot['slot']}: {cause['message']}{evidence}", cause["remedy"]
                )
        if status["ready"] == len(status["slots"]):
            return status
        time.sleep(POLL_S)


def _daemon_failed(log: Path) -> LauncherError:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for message, remedy in pairwise(lines):
        if message.startswith("cannot "):
            return LauncherError(message, remedy)
    return LauncherError(f"cannot start the daemon: {lines[-1] if lines else 'no output'}", f"read {log}")


def _wait_verified(client: ControlClient) -> dict[str, Any]:
    while True:
        status = client.get("/status")
        if all(slot["verified"] is not None for slot in status["slots"]):
            return status
        time.sleep(POLL_S)


def _chat(port: int, model: str) -> None:
    """Print the streamed response. A model without a chat template gets a plain completion request."""
    tries: tuple[tuple[str, dict[str, Any], Callable[[Any], str | None]], ...] = (
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": QUESTION}]},
            lambda choice: choice["delta"].get("content"),
        ),
        ("/v1/completions", {"prompt": QUESTION}, lambda choice: choice["text"]),
    )
    why = ""
    for path, question, text_of in tries:
        body = {"model": model, "stream": True, "max_tokens": MAX_TOKENS, **question}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CHAT_TIMEOUT_S)
        began = time.monotonic()
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status == http.client.OK:
                print(f"   user: {QUESTION}\n   {model}: ", end="", flush=True)
                _print_stream(response, text_of, began)
                return
            why = response.read().decode(errors="replace")[:500]
        except (OSError, http.client.HTTPException) as error:
            why = str(error)
        finally:
            connection.close()
    raise LauncherError(f"cannot get a response from the endpoint: {why}", "read `numa-launcher logs 0`")


def _print_stream(
    response: http.client.HTTPResponse, text_of: Callable[[Any], str | None], began: float
) -> None:
    first: float | None = None
    events = 0
    for event in _events(response):
        if "error" in event:
            raise LauncherError(
                f"cannot finish the response: {event['error'].get('message')}", "read `numa-launcher logs 0`"
            )
        text = "".join(text_of(choice) or "" for choice in event["choices"])
        events += bool(event["choices"])
        if text and first is None:
            first = time.monotonic() - began
        print(printable_lines(text).replace("\n", "\n      "), end="", flush=True)
    took = time.monotonic() - began
    print(f"\n   [{events} events in {took:.2f} s, first text after {first or took:.2f} s]", flush=True)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each `data:` line. Raises LauncherError when the stream ends without [DONE]."""
    for raw in response:
        line = raw.decode(errors="replace").strip()
        if line == "data: [DONE]":
            return
        if line.startswith("data:"):
            yield json.loads(line.removeprefix("data:"))
    raise LauncherError(
        "cannot finish the response: the stream ended without [DONE]", "read `numa-launcher logs 0`"
    )


def _show_result(status: dict[str, Any], config: Path, model: str) -> None:
    from launcher.cli.verify import lines_of  # noqa: PLC0415  only here

    print("\n".join(f"   {line}" for slot in status["slots"] for line in lines_of(slot)))
    if not all(slot["verified"]["ok"] for slot in status["slots"]):
        raise LauncherError(
            "cannot confirm the placement: it differs from the plan, see above",
            "read `numa-launcher topology`",
        )
    socket = config.parent / "run" / "control.sock"
    command = _command()
    endpoint = status["endpoint"]
    print(
        f"""
   endpoint   {endpoint}/v1   (model "{model}")
   try        curl {endpoint}/v1/chat/completions -H 'Content-Type: application/json' \\
                -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
   look       {command} status --socket {socket}
   restart    {command} restart 0 --socket {socket}
   stop       Ctrl-C here, or kill {status["pid"]}
   again      {command} serve -c {config}""",
        flush=True,
    )
