"""The newest results of `bench` and `tune` in the state folder, for ``GET /v1/measurements``."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from launcher.bench.figures import LATENCIES, OUTPUT_TOKENS, Runs, by_load
from launcher.bench.result import ClientCost, Percentiles
from launcher.errors import LauncherError
from launcher.host.state_folder import state_folder
from launcher.tuning.best_file import recall
from launcher.tuning.remembered import BestLayout, ratio

MAX_RESULTS: Final = 20
# Decoding holds the event loop up: under 1 ms for each MiB. A result of twenty points has half a MiB.
MAX_BYTES: Final = 8 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One stored result."""

    kind: str
    """bench or tune."""
    id: str
    """Its id, as `bench list` and `tune` print it."""
    time: float | None
    """When it was measured, in seconds since the epoch; null if unknown."""
    model: str
    """The model."""
    workload: str
    """The workload."""
    what: str
    """Model, workload and load, or the layout that is best, in words."""
    output_tokens_per_s: float | None
    """Generated tokens a second at the load that has most; null for tune, and without usable figures."""
    ttft_p99_s: float | None
    """99th percentile of the time to first token at this load."""
    complete: bool
    """Whether it was measured to its end."""


class _Point(msgspec.Struct, frozen=True):
    """What is read of a bench.result.Point: samples are most of a file."""

    concurrency: int | None
    rate: float | None
    completed: int
    output_tokens_per_s: float
    ttft_s: Percentiles | None
    client: ClientCost


class _Result(msgspec.Struct, frozen=True):
    id: str
    started_at: str
    model: str
    workload: str
    points: list[_Point]
    complete: bool = True


class Measurements:
    """`folder` finds the state folder; it may raise LauncherError."""

    def __init__(
        self, folder: Callable[[], Path] = lambda: state_folder(None, os.environ, os.geteuid())
    ) -> None:
        self._folder = folder
        self._known: dict[tuple[Path, int, int], Measurement | None] = {}
        """By file, time of its last change and size: a result is read once."""

    async def newest(self) -> list[Measurement]:
        """The newest first; none without a readable state folder."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> list[Measurement]:
        try:
            state = self._folder()
        except LauncherError:  # a user without a home folder has no results either
            return []
        self._known = dict(self._results(state / "bench"))
        found = [each for each in self._known.values() if each is not None]
        found += map(_of_layout, recall(state))
        return sorted(found, key=lambda each: each.time or 0.0, reverse=True)[:MAX_RESULTS]

    def _results(self, folder: Path) -> Iterator[tuple[tuple[Path, int, int], Measurement | None]]:
        try:
            files = sorted(folder.glob("*.json"), reverse=True)[:MAX_RESULTS]  # names begin with the time
        except OSError:
            return
        for file in files:
            try:
                facts = file.stat()
                key = file, facts.st_mtime_ns, facts.st_size
                yield key, self._known[key] if key in self._known else _of_file(file)
            except OSError:  # removed meanwhile
                continue


def _of_file(file: Path) -> Measurement | None:
    """None for a file that is unreadable, no result, or too large."""
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        result = msgspec.json.decode(data, type=_Result) if len(data) <= MAX_BYTES else None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return None if result is None else _of_bench(result)


def _of_bench(result: _Result) -> Measurement:
    points: Any = result.points  # have all that these two figures are made of
    loads = [(runs, speed) for runs in by_load(points) if (speed := runs.value(OUTPUT_TOKENS)) is not None]
    best: tuple[Runs, float] | None = max(loads, key=lambda load: load[1], default=None)
    words = [result.model, result.workload, *([] if best is None else [best[0].label])]
    return Measurement(
        kind="bench", id=result.id, time=_time(result.started_at), model=result.model, workload=result.workload,
        what=", ".join(words), output_tokens_per_s=None if best is None else best[1],
        ttft_p99_s=None if best is None else best[0].value(LATENCIES["TTFT p99"]), complete=result.complete,
    )  # fmt: skip


def _of_layout(best: BestLayout) -> Measurement:
    models = ", ".join(model.path for model in best.fingerprint.models)
    gain = (
        ""
        if best.ratio_to_default is None
        else f", {ratio(best.ratio_to_default, best.interval)} × the default"
    )
    return Measurement(
        kind="tune", id=best.run, time=_time(best.measured_at), model=models, workload=best.workload,
        what=f"best layout: {best.label}{gain}" if best.different else "no layout differs from the default",
        output_tokens_per_s=None, ttft_p99_s=None, complete=True,
    )  # fmt: skip


def _time(text: str) -> float | None:
    try:
        return dt.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
