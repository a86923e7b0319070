"""scripts/time-start: how long one instance, several, and the engine alone take to answer, with empty and full caches."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launcher.base.errors import LauncherError  # noqa: E402
from launcher.config.schema import Engine as EngineConfig  # noqa: E402
from launcher.config.schema import EngineKind  # noqa: E402
from launcher.control.client import ControlClient  # noqa: E402
from launcher.engines import tiny_model  # noqa: E402
from launcher.engines.llama_cpp import tiny_gguf  # noqa: E402
from launcher.engines.llama_cpp.launch import LLAMA_LOG, probe  # noqa: E402
from launcher.engines.vllm.output import VLLM_LOG  # noqa: E402

READY_S: Final = 1800.0
BUDGET: Final = 1.3
REQUESTS: Final = 16
LENGTH: Final = 2048
_STALLED: Final = re.compile(r"^some .*total=(\d+)$", re.MULTILINE)
_LOOK_S: Final = 0.02
# Empty, then as the start before left them. llama.cpp compiles nothing.
CACHES: Final = {"vllm": ("nothing compiled", "all compiled"), "llama.cpp": ("",)}
ASKED: Final = json.dumps({"model": "m", "prompt": "Hello", "max_tokens": 1})


@dataclass(frozen=True, slots=True)
class Took:
    """One start of all instances, or of an engine alone."""

    first_s: float
    all_s: float
    others_waited: float
    """Share of the time in which some task of this host waited for a cpu."""
    parts: tuple[tuple[str, float], ...]
    """The steps of the instance that was ready last, and their seconds."""

    @classmethod
    def of(cls, first_s: float, all_s: float, waited_us: int, reached: Sequence[tuple[str, float]]) -> Took:
        """`reached`: each part with the time at which it began."""
        ends = pairwise((*(at for _, at in reached), all_s))
        parts = tuple((name, end - at) for (name, _), (at, end) in zip(reached, ends, strict=True))
        return cls(first_s, all_s, waited_us / 1e6 / all_s, parts)

    def row(self, what: str) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts if seconds >= 0.05)
        waited = f"{self.others_waited * 100:.0f} %"
        return f"{what:<34} {self.first_s:>5.1f} s {self.all_s:>5.1f} s {waited:>16}   {parts}"


def config(args: argparse.Namespace, folder: Path, instances: int) -> str:
    """The quickstart's configuration with another number of instances."""
    engine = f'kind = "llama.cpp"\ncommand = {json.dumps([args.llama])}'
    if args.engine == "vllm":
        engine = f"command = {json.dumps([args.vllm])}\ncache_dir = {json.dumps(str(folder / 'cache'))}"
    return f"""
[[models]]
name = "m"
path = {json.dumps(str(args.model))}
max_model_len = {LENGTH}
max_num_seqs = {REQUESTS}
[layout]
instances_per_socket = {instances}
reserve_cores = 0
[engine]
{engine}
[proxy]
listen = ["unix:{folder}/api.sock"]
[control]
socket = "{folder}/control.sock"
[supervision]
spawner = "direct"
probe_interval_s = 1
"""


def stalled_us() -> int:
    """Microseconds since boot in which some task waited for a cpu; 0 where the kernel does not count."""
    try:
        found = _STALLED.search(Path("/proc/pressure/cpu").read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0


@contextlib.contextmanager
def running(argv: Sequence[str], log: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A program, ended afterwards."""
    with log.open("ab") as output:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=output, stderr=output, env=os.environ | env)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def start(args: argparse.Namespace, folder: Path, instances: int) -> Took:
    """Starts a daemon, waits until all instances are ready, stops it. Raises SystemExit if they do not become ready."""
    file, log = folder / "config.toml", folder / "serve.log"
    file.write_text(config(args, folder, instances))
    client = ControlClient(str(folder / "control.sock"))
    began, stalled = time.monotonic(), stalled_us()
    reached: dict[int, list[tuple[str, float]]] = {}
    ended: dict[int, float] = {}
    argv = [sys.executable, "-m", "launcher", "serve", "-c", str(file)]
    with running(argv, log, {"STATE_DIRECTORY": str(folder / "state")}) as daemon:
        while True:
            slots = slots_of(client)
            now = time.monotonic() - began
            for slot in slots:
                its = reached.setdefault(slot["slot"], [("daemon", 0.0)])
                phase = slot["phase"] or ("waiting" if slot["state"] != "ready" else its[-1][0])
                if phase != its[-1][0]:
                    its.append((phase, now))
                if slot["state"] == "ready":
                    ended.setdefault(slot["slot"], now)
            if slots and len(ended) == len(slots):
                last = max(ended, key=lambda slot: ended[slot])
                return Took.of(min(ended.values()), ended[last], stalled_us() - stalled, reached[last])
            if daemon.poll() is not None or now > READY_S:
                raise SystemExit(f"cannot time the start: it failed\n{log_tail(log)}")
            time.sleep(_LOOK_S)


def start_alone(args: argparse.Namespace, folder: Path) -> Took:
    """The same of the engine by itself, with its defaults, until it has answered a first completion."""
    log, address = folder / "alone.log", folder / "alone.sock"
    log.write_text("")
    address.unlink(missing_ok=True)
    if args.engine == "vllm":
        argv = [args.vllm, "serve", str(args.model), "--served-model-name", "m", "--uds", str(address)]
        argv += ["--max-model-len", str(LENGTH), "--max-num-seqs", str(REQUESTS)]
    else:
        server = probe(EngineConfig(kind=EngineKind.LLAMA_CPP, command=(args.llama,)))
        argv = [
            *server.command,
            "--model",
            str(args.model),
            "--host",
            str(address),
            "--parallel",
            str(REQUESTS),
        ]
        argv += ["--ctx-size", str(LENGTH * REQUESTS)]
    env = {
        "VLLM_CACHE_ROOT": str(folder / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip
    phase_of = (VLLM_LOG if args.engine == "vllm" else LLAMA_LOG).phase_of
    began, stalled = time.monotonic(), stalled_us()
    reached = [("starting", 0.0)]
    with running(argv, log, env) as engine, log.open(errors="replace") as lines:
        while True:
            now = time.monotonic() - began
            phases = [phase for line in lines if (phase := phase_of(line)) is not None]
            reached += [(phase, now) for phase in phases if phase != reached[-1][0]]
            if answers(address):
                now = time.monotonic() - began
                return Took.of(now, now, stalled_us() - stalled, reached)
            if engine.poll() is not None or now > READY_S:
                raise SystemExit(f"cannot time the start: it failed\n{log_tail(log)}")
            time.sleep(_LOOK_S)


def answers(address: Path) -> bool:
    """Whether a server has answered a completion of one token."""
    connection = http.client.HTTPConnection("localhost", timeout=READY_S)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(READY_S)
        connection.sock.connect(str(address))
        connection.request("POST", "/v1/completions", ASKED, {"Content-Type": "application/json"})
        return connection.getresponse().status == http.client.OK
    return False


def slots_of(client: ControlClient) -> list[dict[str, Any]]:
    """Empty while the daemon does not answer."""
    try:
        return list(client.get("/status")["slots"])
    except LauncherError:
        return []


def log_tail(log: Path) -> str:
    """The end of a log, for the error message."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def main() -> int:
    """Returns 0 if N instances are ready within the budget, else 1."""
    parser = argparse.ArgumentParser(prog="scripts/time-start", description=__doc__)
    parser.add_argument("--engine", choices=CACHES, default="vllm")
    parser.add_argument("--instances", type=int, default=2, metavar="N", help="per socket (default 2)")
    parser.add_argument(
        "--model", type=Path, help="model directory or GGUF file (default: a tiny one, made here)"
    )
    parser.add_argument("--vllm", default=str(Path(sys.executable).with_name("vllm")), help="vLLM's command")
    parser.add_argument("--llama", default="llama-server", help="llama-server's command")
    args = parser.parse_args()
    print(
        f"{'what':<34} {'first':>7} {'all':>7} {'cpus waited for':>16}   parts of the last one, s", flush=True
    )
    rows: dict[tuple[int, str], Took] = {}
    with tempfile.TemporaryDirectory() as top:
        if args.model is None:
            args.model = Path(top) / ("model" if args.engine == "vllm" else "tiny.gguf")
            (tiny_model.make if args.engine == "vllm" else tiny_gguf.make)(args.model)
        for instances in dict.fromkeys((1, args.instances, 0)):
            folder = Path(top) / str(instances)
            folder.mkdir()
            for caches in CACHES[args.engine]:
                took = start(args, folder, instances) if instances else start_alone(args, folder)
                rows[instances, caches] = took
                what = f"{instances} instance{'s' * (instances > 1)}" if instances else f"{args.engine} alone"
                print(took.row(", ".join(filter(None, (what, caches)))), flush=True)
    good = True
    for caches in CACHES[args.engine]:
        ratio = rows[args.instances, caches].all_s / rows[1, caches].all_s
        good = good and ratio <= BUDGET
        print(f"{args.instances} ÷ 1{caches and ', '}{caches}: {ratio:.2f} (budget {BUDGET})")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
