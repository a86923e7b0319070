"""One `vllm serve` over all cores against numa-launcher with several pinned instances on the same cores, same load.

All servers are started, one after the other, and stay; only one of them has load at a time. So they are measured in
turn within a round, and a change of the machine falls on all alike. Each has the same memory for its KV cache in all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import aiohttp
import uvloop

from bench.points import quantile
from bench.processes import FailedError, Process, free_port
from launcher.base.errors import LauncherError
from launcher.control.client import ControlClient

ROOT: Final = Path(__file__).resolve().parents[2]
ALONE: Final = "alone"
RAMP: Final = 0.25  # of a cell's time, in which first requests of random length spread the clients
FIRST_TOKEN_S: Final = 30.0  # how long first tokens of requests that were sent are waited for
READY_S: Final = 1800.0
CHECK_S: Final = 40.0  # what a load with numa-launcher bench takes at most, where the time is short
GIB: Final = 1 << 30
_SENTENCE: Final = "Repeat with `scripts/bench-instances`."


@dataclass(frozen=True, slots=True)
class Load:
    """Closed loop: `clients` requests in flight, each of `prompt` tokens that no other has, and `output` tokens."""

    clients: int
    seconds: float
    prompt: int
    output: int


@dataclass(slots=True)
class Cell:
    """What one load on one server gave."""

    server: str
    round: int
    clients: int
    seconds: float = 0.0
    """Of the part that is counted: all clients had a request in flight."""
    tokens: int = 0
    """Generated in it, as the engine counts them."""
    ttft_s: list[float] = field(default_factory=list)
    """From a request's write to its first token."""
    gap_s: list[float] = field(default_factory=list)
    """Between events of a stream, in the part that is counted."""
    completed: int = 0
    failures: list[str] = field(default_factory=list)
    busy: float = 0.0
    """Share of all cpus that ran something."""
    client_busy: float = 0.0
    """CPU time of this process over time: from 0.8 on the client is the limit."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def figures(self) -> dict[str, Any]:
        """For a file: without single latencies."""
        values = asdict(self)
        for name in ("ttft_s", "gap_s"):
            times = values.pop(name)
            for q in (50, 99):
                values[f"{name.removesuffix('_s')}_p{q}_s"] = quantile(times, q / 100) if times else None
        return values | {"tokens_per_s": self.tokens_per_s, "failed": len(self.failures)}


def cpu_times() -> tuple[float, float]:
    """(busy, all) cpu time of the machine since boot."""
    try:
        values = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0.0, 0.0
    return float(sum(values) - values[3] - values[4]), float(sum(values))


# --- Load. ---


@dataclass(slots=True)
class Stream:
    """One request under way."""

    output: int
    sent: float
    last: float
    seen: int = 0
    """Tokens so far."""
    ended: bool = False
    first: asyncio.Event = field(default_factory=asyncio.Event)
    """Its first token is there, or never comes."""


class ClosedLoop:
    """Fills a cell. A client sends its next request when the last one has ended; when the time is over, first tokens
    of those in flight are waited for, and the rest is given up."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, cell: Cell, load: Load, vocabulary: int
    ) -> None:
        self._session, self._url, self._cell, self._load = session, url, cell, load
        self._vocabulary = vocabulary
        self._chance = random.Random()  # noqa: S311  each run asks what no prefix cache has
        self._streams: list[Stream] = []
        self._from_s = self._until_s = 0.0

    async def run(self) -> None:
        """All of it."""
        cell, load = self._cell, self._load
        began = time.perf_counter()
        self._from_s, self._until_s = began + RAMP * load.seconds, began + load.seconds
        cell.seconds = self._until_s - self._from_s
        (busy, total), own = cpu_times(), time.process_time()
        clients = [asyncio.create_task(self._client(), name="client") for _ in range(load.clients)]
        await asyncio.sleep(load.seconds)
        busy_then, total_then = cpu_times()
        cell.busy = (busy_then - busy) / max(1.0, total_then - total)
        cell.client_busy = (time.process_time() - own) / load.seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_TOKEN_S):
                await asyncio.gather(*(stream.first.wait() for stream in self._streams))
        for task in clients:
            task.cancel()
        await asyncio.wait(clients)

    async def _client(self) -> None:
        output = self._chance.randint(1, self._load.output)
        while time.perf_counter() < self._until_s:
            now = time.perf_counter()
            stream = Stream(output, now, now)
            self._streams.append(stream)
            try:
                await self._request(stream)
                self._cell.completed += 1
            except (OSError, aiohttp.ClientError, TimeoutError, ValueError, FailedError) as error:
                self._cell.failures.append(f"{type(error).__name__}: {error}"[:300])
                await asyncio.sleep(0.1)  # a server that refuses is not asked as fast as possible
            finally:
                stream.first.set()
            output = self._load.output

    async def _request(self, stream: Stream) -> None:
        body = {
            "model": "m",
            "prompt": [self._chance.randrange(8, self._vocabulary) for _ in range(self._load.prompt)],
            "max_tokens": stream.output,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise FailedError(f"status {answer.status}: {(await answer.text())[:200]}")
            async for line in answer.content:
                if line.startswith(b"data: [DONE]"):
                    stream.ended = True
                elif line.startswith(b"data: "):
                    self._take(stream, json.loads(line[6:]))
        if not stream.ended or stream.seen != stream.output:
            end = "an end" if stream.ended else "no end"
            raise FailedError(f"{stream.seen} of {stream.output} tokens and {end}")

    def _take(self, stream: Stream, event: dict[str, Any]) -> None:
        now, cell = time.perf_counter(), self._cell
        if "error" in event:
            raise FailedError(f"error event: {str(event['error'])[:200]}")
        # One token an event, and what an engine that fell behind put together with the usage that ends the stream.
        usage = event.get("usage")
        tokens = int(usage["completion_tokens"]) - stream.seen if usage else int(bool(event.get("choices")))
        if tokens <= 0:
            return
        if not stream.seen:
            cell.ttft_s.append(now - stream.sent)
            stream.first.set()
        if self._from_s <= now < self._until_s:
            cell.tokens += tokens
            if stream.seen and stream.last >= self._from_s:
                cell.gap_s.append(now - stream.last)
        stream.seen, stream.last = stream.seen + tokens, now


# --- Servers. ---


class Server:
    """`vllm serve` alone, or numa-launcher with some instances; started, ended, its memory read."""

    def __init__(self, name: str, args: argparse.Namespace, folder: Path) -> None:
        self.name, self.args, self.folder = name, args, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: Process | None = None

    @property
    def pinned(self) -> int:
        """Instances; 0: vLLM alone."""
        return 0 if self.name == ALONE else int(self.name)

    def command(self) -> list[str]:
        """What starts it."""
        args = self.args
        if self.pinned:
            file = self.folder / "config.toml"
            file.write_text(self.config())
            options = [word for pair in args.set for word in ("--set", pair)]
            return [sys.executable, "-m", "launcher", "serve", "-c", str(file), *options]
        return [
            *(args.vllm, "serve", str(args.model), "--served-model-name", "m"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", args.dtype),
            *("--max-model-len", str(args.max_model_len), "--max-num-seqs", str(args.max_num_seqs)),
            *("--kv-cache-memory-bytes", str(int(args.kv_cache * GIB))),
        ]

    def config(self) -> str:
        """The launcher's configuration: no core reserved, as vLLM alone has all of them, too."""
        args, quoted = self.args, json.dumps
        return f"""
[[models]]
name = "m"
path = {quoted(str(args.model))}
dtype = {quoted(args.dtype)}
max_model_len = {args.max_model_len}
max_num_seqs = {args.max_num_seqs}
[layout]
strategy = {quoted(args.strategy)}
instances_per_socket = {self.pinned}
reserve_cores = 0
[memory]
kv_cache = "{int(args.kv_cache * 1024 / self.pinned)}MiB"
[engine]
command = [{quoted(args.vllm)}]
cache_dir = {quoted(str(self.folder / "cache"))}
[proxy]
listen = ["127.0.0.1:{self.port}"]
[control]
socket = {quoted(str(self.folder / "control.sock"))}
[supervision]
spawner = "direct"
probe_interval_s = 1
"""

    async def start(self) -> dict[str, Any]:
        """Until all instances are ready. Raises FailedError."""
        env = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "STATE_DIRECTORY": str(self.folder / "state"),
        }
        if not self.pinned:
            env |= {
                "VLLM_CACHE_ROOT": str(self.folder / "vllm"),
                "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            }
        began = time.monotonic()
        self.process = Process(self.command(), self.folder / "output.log", env=env)
        first: float | None = None
        while True:
            ready, all_ = await self.ready()
            now = time.monotonic() - began
            first = now if first is None and ready else first
            if 0 < all_ <= ready:
                return {"server": self.name, "first_ready_s": first, "ready_s": now}
            self.process.check()
            if now > READY_S:
                raise FailedError(f"not ready after {now:.0f} s: {self.process.last_words()}")
            await asyncio.sleep(0.1)

    async def ready(self) -> tuple[int, int]:
        """Ready instances, and all. Raises FailedError when one crashed too often to be started again."""
        if self.pinned:
            client = ControlClient(str(self.folder / "control.sock"))
            try:
                status = await asyncio.to_thread(client.get, "/status")
            except LauncherError:
                return 0, 0
            if any(slot["state"] == "failed" for slot in status["slots"]):
                raise FailedError(f"instances fail: {self.process.last_words() if self.process else ''}")
            return int(status["ready"]), len(status["slots"])
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(2):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                with contextlib.closing(writer):
                    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                    return int((await reader.readline())[9:12] == b"200"), 1
        return 0, 1

    def memory_bytes(self) -> int:
        """Of all its processes; what they share is counted once (proportional set size)."""
        total = 0
        for pid in self.process.pids() if self.process else ():
            with contextlib.suppress(OSError):
                found = re.search(
                    r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE
                )
                total += int(found[1]) * 1024 if found else 0
        return total

    def threads(self) -> list[str]:
        """Each OpenMP worker's process and the cpus of its threads, as the kernel has them."""
        rows = []
        for pid in self.process.pids() if self.process else ():
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                pins: dict[str, int] = {}
                for task in Path(f"/proc/{pid}/task").iterdir():
                    cpus = (task / "status").read_text().split("Cpus_allowed_list:\t", 1)[1].split("\n", 1)[0]
                    pins[cpus] = pins.get(cpus, 0) + 1
                rows.append(
                    f"{pid} {name}: " + ", ".join(f"{n}×[{cpus}]" for cpus, n in sorted(pins.items()))
                )
        return rows

    def kill_one(self) -> str:
        """SIGKILL to one instance's engine: the process with most memory. Says which."""
        sizes = []
        for pid in self.process.pids() if self.process else ():
            with contextlib.suppress(OSError, IndexError, ValueError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                sizes.append((pages, pid, name))
        _, pid, name = max(sizes)
        os.kill(pid, signal.SIGKILL)
        return f"{pid} {name}"

    def end(self) -> None:
        """SIGTERM, then SIGKILL, to all of it."""
        if self.process is None:
            return
        pids = self.process.pids()
        self.process.popen.send_signal(signal.SIGTERM)
        with contextlib.suppress(Exception):
            self.process.popen.wait(self.args.stop_s)
        self.process.end()
        for pid in pids:  # instances are sessions of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process = None


# --- The run. ---


def orders(names: Sequence[str]) -> Iterator[list[str]]:
    """Each round begins with another server, and every second goes backwards."""
    for number in range(1 << 30):
        shift = number // 2 % len(names)
        turned = [*names[shift:], *names[:shift]]
        yield turned if number % 2 == 0 else turned[::-1]


class Run:
    """All of it; every result goes to the file at once."""

    def __init__(self, args: argparse.Namespace, folder: Path, vocabulary: int) -> None:
        self.args, self.folder = args, folder
        self.began = time.monotonic()
        self.cells: list[Cell] = []
        self.vocabulary = vocabulary

    def left_s(self) -> float:
        """Seconds until --until."""
        return float(self.args.until) - (time.monotonic() - self.began)

    @property
    def kill_takes_s(self) -> float:
        """With the engine's next start; a guess."""
        return float(self.args.kill + 30) if self.args.kill else 0.0

    def say(self, kind: str, value: dict[str, Any]) -> None:
        """One line to the file, and to the screen."""
        line = json.dumps(
            {"kind": kind, "at_s": round(time.monotonic() - self.began, 1)} | value, ensure_ascii=False
        )
        if self.args.json:
            with self.args.json.open("a") as out:
                out.write(line + "\n")
        print(line[:400], flush=True)

    async def cell(self, server: Server, number: int, clients: int, seconds: float) -> Cell:
        """One load on one server."""
        made = Cell(server.name, number, clients)
        load = Load(clients, seconds, self.args.input, self.args.output)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            await ClosedLoop(session, server.url, made, load, self.vocabulary).run()
        return made

    async def run(self) -> int:
        """Start, warm up, measure in rounds, tables, then the kill. 1: some server did not start."""
        args = self.args
        servers = [Server(name, args, self.folder / name) for name in args.servers]
        running: list[Server] = []
        began: list[Server] = []
        try:
            for server in servers:
                began.append(server)
                try:
                    started = await server.start()
                except FailedError as error:
                    self.say("failed start", {"server": server.name, "why": str(error)})
                    server.end()
                    continue
                running.append(server)
                await self.cell(server, -1, max(args.concurrency), args.warm_up)
                self.say(
                    "start", started | {"memory_bytes": server.memory_bytes(), "threads": server.threads()}
                )
            if not running:
                return 1
            await self.idle()
            await self.rounds(running)
            self.tables([server.name for server in running])
            for server in (running[0], running[-1]) if args.check else ():
                if self.left_s() > self.kill_takes_s + CHECK_S:
                    await self.check(server)
            if args.kill and running[-1].pinned > 1 and self.left_s() > args.kill:
                await self.kill(running[-1])
            return 0 if len(running) == len(servers) else 1
        finally:
            for server in began:
                server.end()

    async def idle(self) -> None:
        """What all of them take while nobody asks."""
        busy, total = cpu_times()
        await asyncio.sleep(2)
        busy_then, total_then = cpu_times()
        share = (busy_then - busy) / max(1.0, total_then - total)
        self.say("idle", {"busy_cpus": round(share * (os.cpu_count() or 1), 2), "cpus": os.cpu_count()})

    async def rounds(self, running: list[Server]) -> None:
        """--rounds of them, or fewer when the time ends."""
        by_name = {server.name: server for server in running}
        for number, order in enumerate(orders(list(by_name))):
            if number == self.args.rounds:
                return
            for clients in self.args.concurrency:
                for name in order:
                    seconds = self.args.seconds * (1 + 0.25 * (clients >= 16) + 0.25 * (clients >= 64))
                    if self.left_s() < seconds + self.kill_takes_s + CHECK_S * self.args.check + 5:
                        self.say(
                            "ended", {"why": "too little time left", "round": number, "clients": clients}
                        )
                        return
                    made = await self.cell(by_name[name], number, clients, seconds)
                    self.cells.append(made)
                    self.say("cell", made.figures())

    async def check(self, server: Server) -> None:
        """One load with `numa-launcher bench`, whose load generator is vLLM's: it should see what this client sees."""
        clients = 16
        words = ("--workload", "rackspace-128", "--concurrency", str(clients), "--requests", str(4 * clients))
        where = ("--url", server.url, "--model", "m", "--tokenizer", str(self.args.model))
        bench = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "launcher", "bench", *where, *words),
            *("--state-dir", str(self.folder / "bench")),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | {"PATH": f"{Path(self.args.vllm).parent}:{os.environ['PATH']}"},
        )
        try:
            async with asyncio.timeout(max(CHECK_S, self.left_s() - self.kill_takes_s)):
                output, _ = await bench.communicate()
        except TimeoutError:
            bench.terminate()
            output, _ = await bench.communicate()
        self.say(
            "check", {"server": server.name, "exit": bench.returncode, "output": output.decode()[-3000:]}
        )

    async def kill(self, server: Server) -> None:
        """One instance's engine is killed under load."""
        load = asyncio.create_task(self.cell(server, -2, 16, self.args.kill), name="load")
        await asyncio.sleep(self.args.kill / 4)
        began, dead, whole, victim = time.monotonic(), None, None, server.kill_one()
        while time.monotonic() - began < READY_S and self.left_s() > 5:
            ready, all_ = await server.ready()
            now = time.monotonic() - began
            if dead is None and ready < all_:
                dead = now
            if dead is not None and ready == all_:
                whole = now
                break
            await asyncio.sleep(0.01 if dead is None else 0.1)
        made = await load
        self.say(
            "kill",
            {"server": server.name, "killed": victim, "out_after_s": dead, "whole_after_s": whole}
            | made.figures(),
        )

    def tables(self, names: list[str]) -> None:
        """Medians over the rounds, and the least and the most."""
        for title, unit, value in (
            ("output tokens/s", 1, lambda cell: cell.tokens_per_s),
            ("TTFT p50, ms", 1000, lambda cell: quantile(cell.ttft_s, 0.50)),
            ("TTFT p99, ms", 1000, lambda cell: quantile(cell.ttft_s, 0.99)),
            ("ITL p50, ms", 1000, lambda cell: quantile(cell.gap_s, 0.50)),
            ("ITL p99, ms", 1000, lambda cell: quantile(cell.gap_s, 0.99)),
            ("failed", 1, lambda cell: len(cell.failures)),
            ("cpus busy, %", 100, lambda cell: cell.busy),
        ):
            print(
                f"\n| {title} | "
                + " | ".join(f"{clients} at once" for clients in self.args.concurrency)
                + " |"
            )
            print("| --- |" + " --- |" * len(self.args.concurrency))
            for name in names:
                shown = []
                for clients in self.args.concurrency:
                    values = [
                        unit * float(value(cell))
                        for cell in self.cells
                        if (cell.server, cell.clients) == (name, clients)
                        and (cell.gap_s or title == "failed")
                    ]
                    shown.append(
                        f"{median(values):.1f} ({min(values):.1f}–{max(values):.1f})" if values else "-"
                    )
                print(f"| {name} | " + " | ".join(shown) + " |")
        most = max((cell.client_busy for cell in self.cells), default=0.0)
        print(f"\nThe client used at most {most:.0%} of a cpu. {_SENTENCE}", flush=True)


def numbers(text: str) -> list[int]:
    """1,4,16."""
    return [int(part) for part in text.split(",")]


def run(argv: list[str]) -> int:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(prog="scripts/bench-instances", description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL", help="model directory")
    parser.add_argument(
        "--servers",
        type=lambda text: text.split(","),
        default=[ALONE, "1", "2", "4"],
        help=f"{ALONE}: `vllm serve`; N: numa-launcher with N instances per socket (default {ALONE},1,2,4)",
    )
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 16, 64], metavar="N,…")
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="a cell's; a quarter more from 16 clients on, half from 64",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--until", type=float, default=1e9, metavar="SECONDS", help="end the run by then")
    parser.add_argument(
        "--kill", type=float, default=0.0, metavar="SECONDS", help="kill an instance under this load"
    )
    parser.add_argument("--check", action="store_true", help="one load with numa-launcher bench, too")
    parser.add_argument("--input", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--output", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--strategy", default="interleaved", help="layout.strategy (default interleaved)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="of numa-launcher's configuration",
    )
    parser.add_argument(
        "--kv-cache", type=float, default=8.0, metavar="GIB", help="of all instances together"
    )
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--vllm", default=str(Path(sys.executable).with_name("vllm")), help="vLLM's command")
    parser.add_argument("--stop-s", type=float, default=20.0, metavar="SECONDS", help="patience at the end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append each result as a line of JSON")
    parser.add_argument("--folder", type=Path, help="keep configurations, logs and caches there")
    args = parser.parse_args(argv)
    try:
        vocabulary = int(json.loads((args.model / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        print(f"cannot read '{args.model}/config.json': {error}", file=sys.stderr)
        print("name a directory with config.json, tokenizer and *.safetensors", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as top, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Run(args, args.folder or Path(top), vocabulary).run())
