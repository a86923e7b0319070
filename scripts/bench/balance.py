"""Compares how proxies balance, live: engines that take a real one's time, scaled, and open-loop workloads.

usage: scripts/bench-balance [--only NAME,...] [--workloads NAME,...] [--seeds N,...] [--speed X] [--json FILE]
       scripts/bench-balance --json FILE --report [--write]

Four engines (prefill 1,500 tok/s, step 60 ms + 0.8 ms per sequence, 32 sequences, 60k tokens of prefix cache in
blocks of 128), load 85 % of saturation, the same requests for all at each seed, each run with fresh engines and a
fresh proxy. Times are model seconds. The first token's time is the engine's, so that a proxy's own delay is not
scaled up with the rest. A run that FILE has already is not made again.
Names: nginx-lc, nginx-rr, vllm-cache, vllm-cache-8, vllm-p2c, sglang-cache, sglang-cache-8, smg-p2c, ours, fleet (four
hosts: give --engines 8 or 16, and --speed 1: its own intervals are not scaled).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import uvloop

from bench import balance_pages
from bench.arrivals import Play, Seen
from bench.engine_model import Shape
from bench.load import Target
from bench.points import quantile
from bench.processes import FailedError, Process, free_port
from bench.proxies import raise_limits
from bench.rivals import OURS, SCRIPTS, SETTINGS, Setting
from bench.workloads import WORKLOADS, Mix, Request, workload

ENGINES: Final = 4  # unless told
GOOD_S: Final = 2.0  # a first token within this time is good
TICK_S: Final = 0.5


class Trial:
    """One workload, one seed, one proxy."""

    def __init__(self, name: str, requests: Sequence[Request], speed: float, engines: int = ENGINES) -> None:
        self._name = name
        self._count = engines
        self._requests = requests
        self._speed = speed

    async def run(self) -> dict[str, Any]:
        """The figures. Raises FailedError."""
        with tempfile.TemporaryDirectory(prefix="bench-balance-") as scratch:
            folder = Path(scratch)
            engines, ports, uds = await self._engines(folder)
            setting = Setting(folder, free_port(), free_port(), ports, uds, self._speed)
            rival = SETTINGS[self._name]
            proxy = Process(rival.argv(setting), folder / "proxy.log", env=rival.env)
            try:
                await proxy.answers(setting.port, rival.ready, 30)
                await self._all_known(setting.port)
                counted = [await _get(port) for port in ports]
                before, began = _spent(engines, proxy), time.monotonic()
                play = Play(self._requests, Target(("127.0.0.1", setting.port)), self._speed)
                seen = await play.run()
                wall = time.monotonic() - began
                busy = (_spent(engines, proxy) - before) / wall / len(os.sched_getaffinity(0))
                counts = [_less(await _get(port), old) for port, old in zip(ports, counted, strict=True)]
            finally:
                await asyncio.to_thread(proxy.end)
                await asyncio.to_thread(engines.end)
        return self._figures(seen, counts, wall * self._speed) | {"busy": busy}

    async def _engines(self, folder: Path) -> tuple[Process, tuple[int, ...], tuple[str, ...]]:
        uds = [str(folder / f"engine{n}.sock") for n in range(self._count)]
        argv = [
            sys.executable,
            "-m",
            "bench.model_engine",
            "--engines",
            str(self._count),
            "--speed",
            str(self._speed),
        ]
        argv += [word for path in uds for word in ("--uds", path)]
        process = Process(argv, folder / "engines.log", env={"PYTHONPATH": str(SCRIPTS)}, pipe=True)
        assert process.popen.stdout is not None  # noqa: S101 - for the type
        line = await asyncio.to_thread(process.popen.stdout.readline)
        if not line:
            process.end()
            raise FailedError(f"the engines did not start: {process.last_words()}")
        told = json.loads(line)
        return process, tuple(told["ports"]), tuple(told["uds"])

    async def _all_known(self, port: int) -> None:
        """Some routers learn of their engines in the background: until one request in a row each is answered."""
        body = b'{"model":"m","stream":true,"max_tokens":1,"messages":[{"role":"user","content":"hello"}]}'
        good, deadline = 0, time.monotonic() + 30
        while good < 2 * self._count:
            if time.monotonic() > deadline:
                raise FailedError("the proxy answers no requests")
            status = await _post(port, body)
            good = good + 1 if status == 200 else 0
            if status != 200:
                await asyncio.sleep(TICK_S)

    def _figures(
        self, seen: dict[int, Seen], counts: Sequence[dict[str, float]], model_s: float
    ) -> dict[str, Any]:
        good = [one for one in seen.values() if not one.failure]
        failures = [one.failure for one in seen.values() if one.failure]
        if not good:
            raise FailedError(f"all requests failed: {failures[0]}")
        scale = self._speed / 1e9
        ttft = [(one.first - one.sent) * scale for one in good]
        whole = [(one.ended - one.sent) * scale for one in good]
        back = [(one.arrived - one.first) / 1e9 for one in good]
        tokens = {request.id: request.output_tokens for request in self._requests}
        timely = sum(
            tokens[key]
            for key, one in seen.items()
            if not one.failure and (one.first - one.sent) * scale <= GOOD_S
        )
        asked = sum(one["prompt_tokens"] for one in counts)
        return {
            "ttft_p50_s": quantile(ttft, 0.5),
            "ttft_p99_s": quantile(ttft, 0.99),
            "whole_p50_s": quantile(whole, 0.5),
            "whole_p99_s": quantile(whole, 0.99),
            "hit_rate": sum(one["cached_tokens"] for one in counts) / asked if asked else 0.0,
            "goodput": timely / model_s,
            "model_s": model_s,
            "back_ms": quantile(back, 0.5) * 1e3,
            "shares": [one["output_tokens"] for one in counts],
            "requests": len(seen),
            "failed": len(failures),
            "failure": failures[0] if failures else "",
        }


def _spent(*processes: Process) -> float:
    return sum(process.cpu_s() for process in processes) + time.process_time()


def _less(new: dict[str, float], old: dict[str, float]) -> dict[str, float]:
    return {key: new[key] - old[key] for key in new}


async def _exchange(port: int, request: bytes) -> tuple[int, bytes]:
    try:
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            data = await reader.read()
            writer.close()
    except (OSError, TimeoutError):
        return 0, b""
    return int(data[9:12] or 0), data.partition(b"\r\n\r\n")[2]


async def _get(port: int) -> dict[str, float]:
    _, body = await _exchange(port, b"GET /counts HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    found: dict[str, float] = json.loads(body)
    return found


async def _post(port: int, body: bytes) -> int:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    status, _ = await _exchange(port, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return status


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scripts/bench-balance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--only", metavar="NAME,...", help="these settings")
    made.add_argument("--workloads", metavar="NAME,...", help=f"of {', '.join(WORKLOADS)}")
    made.add_argument("--seeds", default="101,102,103", metavar="N,...")
    made.add_argument("--requests", type=int, default=800, help="in a run (default 800)")
    made.add_argument("--engines", type=int, default=ENGINES, metavar="N")
    made.add_argument("--load", type=float, default=0.85, help="of saturation (default 0.85)")
    made.add_argument("--missed", type=float, default=0.1, help="part of shared prompts missed at saturation")
    made.add_argument("--prompt-scale", type=float, default=1.0, help="length of prompts")
    made.add_argument("--speed", type=float, default=10.0, help="model seconds in a second (default 10)")
    made.add_argument("--json", type=Path, metavar="FILE", help="keep what was measured; go on from it")
    made.add_argument("--report", action="store_true", help="measure nothing, show FILE")
    made.add_argument("--write", action="store_true", help="put the tables into docs/")
    return made


def _chosen(text: str | None, known: Sequence[str], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",")] if text else list(known)
    for name in names:
        if name not in known:
            raise SystemExit(
                f"cannot run {what} '{name}': there is none of that name\n  what to do: choose from {', '.join(known)}"
            )
    return names


def run(arguments: Sequence[str]) -> int:
    """Measure and report. 1 when ours failed a request."""
    args = _parser().parse_args(arguments)
    rows: list[dict[str, Any]] = []
    if args.json and args.json.exists():
        rows = json.loads(args.json.read_text())["rows"]
    if not args.report:
        _measure(args, rows)
    result = {"machine": balance_pages.machine(), "speed": args.speed, "load": args.load, "rows": rows}
    print(balance_pages.text(result))
    if args.write:
        balance_pages.write(result, SCRIPTS.parent / "docs")
    return int(any(row["failed"] for row in rows if row["setting"] == OURS))


def digest_of(requests: Sequence[Request], speed: float) -> str:
    """The same for the same requests at the same speed."""
    found = zlib.crc32(f"{speed} {Shape()}".encode())
    for one in requests:
        found = zlib.crc32(one.body("m") + f"{one.at_s} {one.after} {one.think_s}".encode(), found)
    return f"{found:08x}"


def _measure(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    raise_limits()
    names = _chosen(args.only, list(SETTINGS), "setting")
    for name in list(names):
        if how := SETTINGS[name].missing():
            print(f"{name} is not installed and left out\n  what to do: {how}", file=sys.stderr)
            names.remove(name)
    mix = Mix(args.engines, args.load, args.requests, args.prompt_scale, missed=args.missed)
    for seed in (int(text) for text in args.seeds.split(",")):
        for kind in _chosen(args.workloads, list(WORKLOADS), "workload"):
            requests = workload(kind, seed, mix, Shape())
            digest = digest_of(requests, args.speed)
            # What an earlier version of a workload gave is no part of this comparison.
            rows[:] = [
                row
                for row in rows
                if (row["workload"], row["seed"]) != (kind, seed) or row["digest"] == digest
            ]
            have = {row["setting"] for row in rows if (row["workload"], row["seed"]) == (kind, seed)}
            for name in names:
                if name in have:
                    continue
                row = {"setting": name, "workload": kind, "seed": seed, "digest": digest}
                gc.collect()
                try:
                    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                        row |= runner.run(Trial(name, requests, args.speed, args.engines).run())
                except FailedError as failed:
                    print(f"{name}, {kind}, seed {seed}: {failed}", file=sys.stderr)
                    continue
                rows.append(row)
                print(balance_pages.line(row), file=sys.stderr, flush=True)
                if args.json:
                    args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
