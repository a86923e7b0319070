"""How each server of a model is started for scripts/bench-rivals: with what its own documents recommend, the same requests
at once, the same context, and the same cores."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.processes import FailedError, Process, free_port, status_line
from bench.rivals import Setting, nginx
from launcher.base.errors import LauncherError
from launcher.control.client import ControlClient

READY_S: Final = 600.0
GIB: Final = 1 << 30
_VLLM_ENV: Final = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True, slots=True)
class Program:
    """One process of a server."""

    argv: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    health: tuple[int, str] | None = None
    """Port and path that answer 200 when it is ready; None: it has no such thing."""


class Server:
    """Some programs behind one port; started, asked, one killed, ended."""

    def __init__(self, name: str, args: argparse.Namespace, folder: Path) -> None:
        self.name, self.args, self.folder = name, args, folder
        self.port = free_port()
        self.running: list[Process] = []
        self.programs: list[Program] = []

    @property
    def url(self) -> str:
        """The URL of its API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def supervised(self) -> bool:
        """Whether an engine that dies is started again: by numa-launcher alone."""
        return _ours_of(self.name) is not None

    @property
    def model(self) -> str:
        """The name in requests."""
        return str(self.args.model) if self.name == "pace" else "m"

    async def start(self) -> float:
        """Seconds until all of it is ready, without those of `numa-launcher tune` before the first start of a tuned
        server. Raises FailedError.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        its = _ours_of(self.name)
        if its and its.instances is None and not (self.folder / "config.toml").exists():
            await asyncio.to_thread(_tune, self, its)
        began = time.monotonic()
        self.programs = make_programs(self)
        for number, program in enumerate(self.programs):
            log = self.folder / f"output-{number}.log"
            self.running.append(Process(program.argv, log, env=_VLLM_ENV | dict(program.env)))
        while True:
            ready, all_ = await self.ready()
            took = time.monotonic() - began
            if 0 < all_ <= ready:
                return took
            for process in self.running:
                process.check()
            if took > READY_S:
                raise FailedError(f"not ready after {took:.0f} s: {self.running[0].last_words()}")
            await asyncio.sleep(0.05)

    async def ready(self) -> tuple[int, int]:
        """Engines that are ready, and all. Raises FailedError when one crashed too often to be started again."""
        if self.supervised:
            return await self._ready_slots()
        asked = [program.health for program in self.programs if program.health]
        return sum([await _is_healthy(*health) for health in asked]), len(asked)

    async def _ready_slots(self) -> tuple[int, int]:
        client = ControlClient(str(self.folder / "control.sock"))
        try:
            status = await asyncio.to_thread(client.get, "/status")
        except LauncherError:
            return 0, 0
        if any(slot["state"] == "failed" for slot in status["slots"]):
            raise FailedError(f"instances fail: {self.running[0].last_words()}")
        return int(status["ready"]), len(status["slots"])

    def is_alive(self) -> bool:
        """Whether each of its programs runs."""
        return all(process.popen.poll() is None for process in self.running)

    def pids(self) -> list[int]:
        """All its processes."""
        return [pid for process in self.running for pid in process.pids()]

    def memory_bytes(self) -> int:
        """Memory of all its processes; what they share is counted once (proportional set size)."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                found = re.search(
                    r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE
                )
                total += int(found[1]) * 1024 if found else 0
        return total

    def kill_one(self) -> str:
        """SIGKILL to one engine: the process with most memory, numa-launcher aside. Says which."""
        sizes = []
        aside = self.running[0].popen.pid if self.supervised else 0
        for pid in self.pids():
            if pid == aside:
                continue
            with contextlib.suppress(OSError, IndexError, ValueError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                sizes.append((pages, pid, name))
        _, pid, name = max(sizes)
        os.kill(pid, signal.SIGKILL)
        return f"{pid} {name}"

    def end(self) -> None:
        """SIGTERM, then SIGKILL, to all of it."""
        pids = self.pids()
        for process in self.running:
            process.popen.send_signal(signal.SIGTERM)
        for process in self.running:
            with contextlib.suppress(Exception):
                process.popen.wait(self.args.stop_s)
            process.end()
        for pid in pids:  # instances are sessions of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.running = []


async def _is_healthy(port: int, path: str) -> int:
    """1 for status 200."""
    with contextlib.suppress(OSError, TimeoutError):
        return int((await status_line(port, path))[9:12] == b"200")
    return 0


# --- Programs of each. ---


@dataclass(frozen=True, slots=True)
class _Ours:
    """A server that is numa-launcher."""

    llama: bool
    instances: int | None
    """Per socket. None: the layout that `numa-launcher tune` finds."""


def make_programs(server: Server) -> list[Program]:
    """The programs of a server, by its name."""
    its = _ours_of(server.name)
    return [_ours(server, its)] if its else KINDS[server.name](server)


def _ours_of(name: str) -> _Ours | None:
    """`ours-vllm-N`, `ours-llama-N`, and either with `tuned` for N; None for another name."""
    found = re.fullmatch(r"ours-(vllm|llama)-(tuned|[1-9]\d*)", name)
    return _Ours(found[1] == "llama", None if found[2] == "tuned" else int(found[2])) if found else None


def cores() -> list[int]:
    """The cpus that may be used; scripts/bench-rivals takes them for cores."""
    return sorted(os.sched_getaffinity(0))


def _vllm_words(server: Server, port: int, engines: int) -> list[str]:
    args = server.args
    return [
        *(args.vllm, "serve", str(args.model), "--served-model-name", "m"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", args.dtype),
        *("--max-model-len", str(args.max_model_len), "--max-num-seqs", str(args.max_num_seqs)),
        *("--kv-cache-memory-bytes", str(int(args.kv_cache * GIB / engines))),
    ]


def _vllm_env(folder: Path) -> dict[str, str]:
    """Caches of its own, which its next start finds."""
    return {
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def _vllm(server: Server) -> list[Program]:
    words = _vllm_words(server, server.port, 1)
    return [Program(words, _vllm_env(server.folder), (server.port, "/health"))]


def _vllm_dp(server: Server) -> list[Program]:
    words = [*_vllm_words(server, server.port, 2), "--data-parallel-size", "2"]
    return [Program(words, _vllm_env(server.folder), (server.port, "/health"))]


def _nginx_vllm(server: Server) -> list[Program]:
    """Two engines with every second core each, and nginx's least_conn before them."""
    ports = [free_port(), free_port()]
    every = cores()
    made = []
    for number, port in enumerate(ports):
        mine = ",".join(map(str, every[number::2]))
        env = _vllm_env(server.folder) | {"VLLM_CPU_OMP_THREADS_BIND": mine}
        argv = ["numactl", f"--physcpubind={mine}", "--localalloc", *_vllm_words(server, port, 2)]
        made.append(Program(argv, env, (port, "/health")))
    setting = Setting(server.folder, server.port, server.port, tuple(ports), ())
    argv = list(nginx("least_conn;", fails_over=True)(setting))
    return [*made, Program(argv, {}, (server.port, "/health"))]


def _llama(server: Server, *more: str) -> list[Program]:
    """llama-server with a thread for each core, and as many requests and tokens as the others have."""
    args, threads = server.args, str(len(cores()))
    argv = [
        *(args.llama_server, "--model", str(args.gguf), "--alias", "m", "--host", "127.0.0.1", "--port"),
        *(str(server.port), "--threads", threads, "--threads-batch", threads, "--parallel", str(args.max_num_seqs)),
        *("--ctx-size", str(args.max_num_seqs * args.max_model_len), "--metrics", "--no-webui", *more),
    ]  # fmt: skip
    return [Program(argv, {}, (server.port, "/health"))]


def _llama_numa(server: Server) -> list[Program]:
    return _llama(server, "--numa", "distribute")


def _llama_defaults(server: Server) -> list[Program]:
    """Nothing but the model: its threads and its four requests at once."""
    argv = [server.args.llama_server, "--model", str(server.args.gguf), "--port", str(server.port)]
    return [Program(argv, {}, (server.port, "/health"))]


def _pace(server: Server) -> list[Program]:
    """AMD PACE: its router and two engines with every second core each."""
    args, every = server.args, cores()
    halves = ";".join(",".join(map(str, every[number::2])) for number in range(2))
    argv = [
        *(args.pace, "--server_model", str(args.model), "--num_engine_instances", "2", "--dtype", args.dtype),
        *("--numa_physcpubind", halves, "--numa_membind", "0;0", "--router_host", "127.0.0.1"),
        *("--router_port", str(server.port), "--server_host", "127.0.0.1", "--server_port", str(free_port())),
        *("--serve_type", "continuous_batch", "--kv_cache_type", "SLAB"),
        *("--kv_cache_memory_gb", str(args.kv_cache / 2)),
    ]
    return [Program(argv, {}, (server.port, "/v1/models"))]


KINDS: Final[dict[str, Callable[[Server], list[Program]]]] = {
    "vllm": _vllm,
    "vllm-dp": _vllm_dp,
    "nginx-vllm": _nginx_vllm,
    "llama": _llama,
    "llama-numa": _llama_numa,
    "llama-defaults": _llama_defaults,
    "pace": _pace,
}


def _ours(server: Server, its: _Ours) -> Program:
    """numa-launcher with a configuration of its own, or with that which `tune` changed."""
    file = server.folder / "config.toml"
    if its.instances is not None:
        file.write_text(_configuration(server, its))
    listen = f"proxy.listen={json.dumps([f'127.0.0.1:{server.port}'])}"
    return Program(
        [*_LAUNCHER, "serve", "-c", str(file), *_options(*server.args.set, listen)], _state(server)
    )


_LAUNCHER: Final = (sys.executable, "-m", "launcher")


def _options(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def _state(server: Server) -> dict[str, str]:
    return {"STATE_DIRECTORY": str(server.folder / "state")}


def _tune(server: Server, its: _Ours) -> None:
    """`numa-launcher tune --apply` with the workload that is measured then; its output is tune.log. Raises FailedError."""
    args, file = server.args, server.folder / "config.toml"
    file.write_text(_configuration(server, its))
    argv = [*_LAUNCHER, "tune", "-c", str(file), "--workload", args.workload, "--budget", f"{args.tune:.0f}s"]
    log = server.folder / "tune.log"
    with log.open("wb") as out:
        env = {**os.environ, **_VLLM_ENV, **_state(server)}
        done = subprocess.run(
            [*argv, "--apply", *_options(*args.set)], stdout=out, stderr=out, env=env, check=False
        )
    if done.returncode:
        file.unlink()
        raise FailedError(
            f"tune: exit code {done.returncode}: {log.read_text(errors='replace')[-500:].strip()}"
        )


def _configuration(server: Server, its: _Ours) -> str:
    """No core is reserved, as the others have all of them, too."""
    args, quoted = server.args, json.dumps
    if its.llama:
        engine = f'kind = "llama.cpp"\ncommand = [{quoted(str(args.llama_server))}]'
        model = f"path = {quoted(str(args.gguf))}"
    else:
        engine = f"command = [{quoted(args.vllm)}]\ncache_dir = {quoted(str(server.folder / 'cache'))}"
        model = f"path = {quoted(str(args.model))}\ndtype = {quoted(args.dtype)}"
    # A vLLM has as many requests at once as it is given; llama.cpp reserves a context for each.
    seqs = -(-args.max_num_seqs // (its.instances or 1)) if its.llama else args.max_num_seqs
    layout = memory = ""
    if its.instances is not None:
        layout = f"instances_per_socket = {its.instances}"
        memory = "" if its.llama else f'[memory]\nkv_cache = "{int(args.kv_cache * 1024 / its.instances)}MiB"'
    return f"""
[[models]]
name = "m"
{model}
max_model_len = {args.max_model_len}
max_num_seqs = {seqs}
[layout]
strategy = {quoted(args.strategy)}
{layout}
reserve_cores = 0
{memory}
[engine]
{engine}
[control]
socket = {quoted(str(server.folder / "control.sock"))}
[supervision]
spawner = "direct"
probe_interval_s = 1
"""


def missing(name: str, args: argparse.Namespace) -> str | None:
    """A program that `name` needs and this machine does not have. Raises LauncherError for a name of no server."""
    its = _ours_of(name)
    engine = "" if its is None else "llama" if its.llama else "vllm"
    needs = {
        "vllm-dp": (args.vllm,), "nginx-vllm": (args.vllm, "nginx", "numactl"), "pace": (args.pace, "numactl"),
        "vllm": (args.vllm,),
    } | dict.fromkeys(("llama", "llama-numa", "llama-defaults"), (args.llama_server,))  # fmt: skip
    programs = needs.get(engine or name)
    if programs and its and its.instances is None:
        programs = (*programs, args.vllm)  # tune measures with `vllm bench serve`
    if programs is None:
        raise LauncherError(
            f"cannot measure {name!r}: there is no server of that name",
            f"choose from {', '.join(KINDS)}, ours-vllm-N, ours-llama-N, ours-vllm-tuned, ours-llama-tuned",
        )
    return next((program for program in programs if shutil.which(program) is None), None)
