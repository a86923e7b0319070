"""What users would pick instead of numa-launcher, beside it: one model, one load, one table.

Each round starts each server, measures its start, its output under load, and once what a SIGKILL of one of its engines
does to clients, and ends it. So no two run at the same time, and a change of the machine falls on all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import aiohttp
import uvloop
from msgspec.structs import replace

from bench.closed_loop import Cell, ClosedLoop, Load, Served
from bench.engine_servers import Server, missing
from bench.points import quantile
from bench.processes import FailedError
from bench.random_model import SHAPES, TYPES, write_folder, write_gguf
from launcher.base.errors import LauncherError
from launcher.measure.bench.workloads import DEFAULT as DEFAULT_WORKLOAD
from launcher.measure.bench.workloads import Workload, all_workloads, named

CACHE: Final = (
    Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "numa-launcher" / "bench-models"
)
DEFAULT: Final = (
    "vllm", "vllm-dp", "nginx-vllm", "ours-vllm-2", "pace", "llama-defaults", "llama", "llama-numa", "ours-llama-1",
    "ours-llama-2",
)  # fmt: skip
WHOLE_S: Final = 600.0  # a killed engine is waited for this long
_COLUMNS: Final[tuple[tuple[str, float, Callable[[Cell], float]], ...]] = (
    ("output tokens/s", 1, lambda cell: cell.tokens_per_s),
    ("TTFT p50, ms", 1000, lambda cell: quantile(cell.ttft_s, 0.50)),
    ("TTFT p99, ms", 1000, lambda cell: quantile(cell.ttft_s, 0.99)),
    ("ITL p50, ms", 1000, lambda cell: quantile(cell.gap_s, 0.50)),
    ("ITL p99, ms", 1000, lambda cell: quantile(cell.gap_s, 0.99)),
    ("failed", 1, lambda cell: len(cell.failures)),
    ("cpus busy, %", 100, lambda cell: cell.busy),
)


def orders(names: Sequence[str]) -> Iterator[list[str]]:
    """Each round begins with another server, and every second goes backwards."""
    for number in range(1 << 30):
        shift = number // 2 % len(names)
        turned = [*names[shift:], *names[:shift]]
        yield turned if number % 2 == 0 else turned[::-1]


class Run:
    """All of it; every result goes to the file at once."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.began = time.monotonic()
        self.cells: list[Cell] = []
        self.starts: dict[str, list[dict[str, Any]]] = {}
        self.kills: dict[str, dict[str, Any]] = {}

    def left_s(self) -> float:
        """Seconds until --until."""
        return float(self.args.until) - (time.monotonic() - self.began)

    def seconds(self, clients: int) -> float:
        """The length of a load. Requests of equal length that begin together come in waves: several of them must fit in,
        and they get longer with the number of clients."""
        return float(self.args.seconds) * max(1.0, clients / 4)

    def say(self, kind: str, value: dict[str, Any]) -> None:
        """One line to the file, and to the screen."""
        line = json.dumps(
            {"kind": kind, "at_s": round(time.monotonic() - self.began, 1)} | value, ensure_ascii=False
        )
        if self.args.json:
            with self.args.json.open("a") as out:
                out.write(line + "\n")
        print(line[:400], flush=True)

    async def run(self) -> int:
        """Rounds, then tables. 1: some server did not start."""
        failed = False
        for number, order in zip(range(self.args.rounds), orders(self.args.servers), strict=False):
            for name in order:
                takes = sum(map(self.seconds, self.args.concurrency)) + self.args.warm_up + self.args.kill
                if self.left_s() < takes:
                    self.say("left out", {"server": name, "round": number, "why": "too little time left"})
                    continue
                failed |= not await self.turn(name, number)
        self.tables()
        return int(failed)

    async def turn(self, name: str, number: int) -> bool:
        """One server in one round. False: it did not start."""
        server = Server(name, self.args, self.folder / name)
        try:
            took = await server.start()
            if self.args.warm_up:
                await self.cell(server, -1, max(self.args.concurrency), self.args.warm_up)
            made = {"server": name, "round": number, "ready_s": took, "memory_bytes": server.memory_bytes()}
            self.starts.setdefault(name, []).append(made)
            self.say("start", made)
            for clients in self.args.concurrency:
                cell = await self.cell(server, number, clients, self.seconds(clients))
                self.cells.append(cell)
                self.say("cell", cell.figures())
            if self.args.kill and name not in self.kills:
                await self.kill(server)
        except FailedError as error:
            self.say("failed", {"server": name, "round": number, "why": str(error)})
            return name in self.starts
        finally:
            server.end()
        return True

    async def cell(self, server: Server, number: int, clients: int, seconds: float) -> Cell:
        """One load on one server."""
        args = self.args
        made = Cell(server.name, number, clients)
        asked = args.asked
        load = Load(
            clients, seconds, asked.input_tokens or asked.question_words, asked.output_tokens,
            turns=asked.turns or 1, system=asked.system_words, answer=asked.answer_words,
        )  # fmt: skip
        served = Served(server.url, server.model, args.vocabulary)
        timeout = aiohttp.ClientTimeout(total=None)
        # Some servers close a connection right after an answer, and a request that is sent then has no answer.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            await ClosedLoop(session, served, made, load).run()
        return made

    async def kill(self, server: Server) -> None:
        """One engine is killed under load; how many requests fail, and when all engines are ready again."""
        clients = min(16, max(self.args.concurrency))
        load = asyncio.create_task(self.cell(server, -2, clients, self.args.kill), name="load")
        await asyncio.sleep(self.args.kill / 3)
        began, out, whole, victim = time.monotonic(), None, None, server.kill_one()
        while (now := time.monotonic() - began) < min(WHOLE_S, max(self.args.kill, self.left_s())):
            with contextlib.suppress(FailedError):
                ready, all_ = await server.ready()
                out = now if out is None and ready < all_ else out
                if out is not None and ready == all_:
                    whole = now
                    break
            if (load.done() and not server.supervised) or not server.is_alive():
                break  # nothing starts it again
            await asyncio.sleep(0.01 if out is None else 0.05)
        made = await load
        found = {"killed": victim, "out_after_s": out, "whole_after_s": whole} | made.figures()
        self.kills[server.name] = found
        self.say("kill", {"server": server.name} | found)

    # --- Tables. ---

    def tables(self) -> None:
        """Medians over the rounds, and the least and the most."""
        names = [name for name in self.args.servers if name in self.starts]
        for title, unit, value in _COLUMNS:
            _row([title, *(f"{clients} at once" for clients in self.args.concurrency)], head=True)
            for name in names:
                _row([name, *(self._shown(name, clients, unit, value) for clients in self.args.concurrency)])
        _row(["", "ready after, s", "memory, GB", "failed after a kill", "of", "whole again, s"], head=True)
        for name in names:
            ready = [one["ready_s"] for one in self.starts[name]]
            memory = max(one["memory_bytes"] for one in self.starts[name]) / 1e9
            kill = self.kills.get(name)
            whole = kill["whole_after_s"] if kill else None
            _row([
                name, ", ".join(f"{one:.1f}" for one in ready), f"{memory:.2f}",
                str(kill["failed"]) if kill else "-", str(kill["completed"] + kill["failed"]) if kill else "-",
                "-" if not kill else "never" if whole is None else f"{whole:.1f}",
            ])  # fmt: skip
        most = max((cell.client_busy for cell in self.cells), default=0.0)
        print(f"\nThe client used at most {most:.0%} of a cpu.", flush=True)

    def _shown(self, name: str, clients: int, unit: float, value: Callable[[Cell], float]) -> str:
        values = [
            unit * float(value(cell))
            for cell in self.cells
            if (cell.server, cell.clients) == (name, clients) and cell.gap_s
        ]
        return f"{median(values):.1f} ({min(values):.1f}–{max(values):.1f})" if values else "-"


def _row(cells: list[str], *, head: bool = False) -> None:
    print(("\n" if head else "") + "| " + " | ".join(cells) + " |")
    if head:
        print("|" + " --- |" * len(cells))


def numbers(text: str) -> list[int]:
    """1,4,16."""
    return [int(part) for part in text.split(",")]


def run(argv: list[str]) -> int:
    """Measure as the command line says."""
    args = _parser().parse_args(argv)
    try:
        args.asked = _asked(args)
        args.max_model_len = args.max_model_len or max(512, args.asked.longest)
        args.servers = list(_servers_here(args))
        _find_model(args)
    except LauncherError as error:
        print(f"{error}\n  what to do: {error.remedy}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as top, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Run(args, args.folder or Path(top)).run())


def _asked(args: argparse.Namespace) -> Workload:
    """--workload, with the lengths that are given."""
    asked = named(args.workload)
    given = {"question_words" if asked.turns else "input_tokens": args.input, "output_tokens": args.output}
    return replace(asked, **{name: value for name, value in given.items() if value})


def _servers_here(args: argparse.Namespace) -> Iterator[str]:
    """Those of --servers whose programs are here. Raises LauncherError for a wrong name, and when none is here."""
    found = False
    for name in args.servers:
        program = missing(name, args)
        if program is None:
            found = True
            yield name
        else:
            print(f"left out: {name}, for {program} is not here", file=sys.stderr)
    if not found:
        raise LauncherError(
            "cannot measure anything: no program of --servers is here",
            "install one, or name its program with --vllm, --llama-server or --pace",
        )


def _find_model(args: argparse.Namespace) -> None:
    """Sets model, gguf and vocabulary; makes what is not given, once. Raises LauncherError."""
    if (args.model is None) != (args.gguf is None):
        raise LauncherError(
            "cannot measure with one of --model and --gguf: servers of both kinds need the same weights",
            "give both, or none: then both are made with random weights (--shape, --gguf-type)",
        )
    if args.model is None:
        shape = SHAPES[args.shape]
        args.model, args.gguf = CACHE / args.shape, CACHE / f"{args.shape}-{args.gguf_type}.gguf"
        for path, write in (
            (args.model, lambda there: write_folder(shape, there)),
            (args.gguf, lambda there: write_gguf(shape, args.gguf_type, there)),
        ):
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                building = path.with_name(f".{path.name}-{os.getpid()}")
                write(building)
                building.rename(path)
    try:
        args.vocabulary = int(json.loads((args.model / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise LauncherError(
            f"cannot read '{args.model}/config.json': {error}",
            "name a directory with config.json, tokenizer and *.safetensors",
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench-rivals", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="model for vLLM and PACE (default: made)")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the same for llama.cpp (default: made)")
    parser.add_argument(
        "--shape", choices=tuple(SHAPES), default="0.1b", help="of the model that is made (0.1b)"
    )
    parser.add_argument("--gguf-type", choices=tuple(TYPES), default="Q8_0", help="of its matrices (Q8_0)")
    parser.add_argument(
        "--servers",
        type=lambda text: text.split(","),
        default=list(DEFAULT),
        metavar="NAME,…",
        help="vllm; vllm-dp: data parallel 2; nginx-vllm: nginx before 2 pinned by hand; pace: AMD PACE with 2; "
        "llama: llama-server with all cores, llama-numa with --numa distribute, llama-defaults with nothing; "
        "ours-vllm-N, ours-llama-N: numa-launcher with N instances per socket; ours-vllm-tuned, ours-llama-tuned: "
        "with the layout that numa-launcher tune finds before the first round, --max-num-seqs for each instance and the "
        "KV cache that the plan gives it",
    )
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 16, 64], metavar="N,…")
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="of a load of up to four clients; with more, as many times as long",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=float, default=5.0, metavar="SECONDS", help="0: none (5)")
    parser.add_argument("--until", type=float, default=1e9, metavar="SECONDS", help="end the run by then")
    parser.add_argument(
        "--kill",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="load under which an engine is killed; 0: none",
    )
    parser.add_argument(
        "--tune",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="budget of tune for each tuned server (3600)",
    )
    parser.add_argument(
        "--workload",
        choices=[name for name, its in all_workloads().items() if its.api != "embeddings"],
        default=DEFAULT_WORKLOAD,
        help=f"of numa-launcher bench: lengths and turns; words are tokens here ({DEFAULT_WORKLOAD})",
    )
    parser.add_argument("--input", type=int, metavar="TOKENS", help="instead of the workload's, of each turn")
    parser.add_argument("--output", type=int, metavar="TOKENS", help="instead of the workload's")
    parser.add_argument("--strategy", default="interleaved", help="layout.strategy (default interleaved)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="of numa-launcher's configuration",
    )
    parser.add_argument(
        "--kv-cache", type=float, default=4.0, metavar="GIB", help="of all vLLM engines together"
    )
    parser.add_argument(
        "--max-num-seqs", type=int, default=64, help="requests at once, of all engines together"
    )
    parser.add_argument("--max-model-len", type=int, help="(512, or what the workload needs)")
    parser.add_argument("--dtype", default="bfloat16", help="of vLLM and PACE")
    parser.add_argument("--vllm", default=str(Path(sys.executable).with_name("vllm")), help="vLLM's command")
    parser.add_argument("--llama-server", default="llama-server", help="llama.cpp's server")
    parser.add_argument("--pace", default="pace-server", help="AMD PACE's server")
    parser.add_argument("--stop-s", type=float, default=20.0, metavar="SECONDS", help="patience at the end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append each result as a line of JSON")
    parser.add_argument("--folder", type=Path, help="keep configurations, logs and caches there")
    return parser
