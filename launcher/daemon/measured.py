"""The measured layout of a deployment: fingerprints of this machine, and what `tune` remembered."""

from __future__ import annotations

import datetime as dt
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

import launcher
from launcher.base.disk import DISK_S, OneRead, within
from launcher.base.errors import LauncherError
from launcher.base.files import state_folder
from launcher.daemon.deployment import Deployment
from launcher.engines.make import engine_type
from launcher.machine.hardware import Hardware, read_hardware
from launcher.measure.bench.figures import LATENCIES, OUTPUT_TOKENS, Runs, by_load
from launcher.measure.bench.result import ClientCost, Percentiles, Software
from launcher.measure.tune.identity import Fingerprint, ModelFingerprint
from launcher.measure.tune.remembered import BestLayout, Limits, best_file, choose, judge, ratio, recall
from launcher.models.gguf_model import gguf_files
from launcher.models.reader import find_model
from launcher.models.weight_files import read_model_json

_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".gguf", ".pt"})


def with_measured_layout(deployment: Deployment, environ: Mapping[str, str] = os.environ) -> Deployment:
    """The deployment with the verdict of `tune` beside it, if one is remembered. Reads files: milliseconds, and no longer
    than DISK_S where the disk of the state folder hangs."""
    try:
        state = state_folder(None, environ, os.geteuid())
    except LauncherError:  # a user without a home folder has no results either
        return deployment
    remembered = within(DISK_S, f"read the measured layout '{best_file(state)}'", partial(recall, state))
    if not remembered:
        return deployment
    now = fingerprint_of(deployment)
    best = choose(remembered, now)
    if best is None:
        return deployment
    cpus = [slot.placement.cpus.format() for slot in deployment.plan.slots]
    limits = [
        Limits(max_num_seqs=model.max_num_seqs, max_num_batched_tokens=model.max_num_batched_tokens)
        for model in deployment.plan.models
    ]
    return replace(deployment, measured=judge(best, now, cpus, limits))


def fingerprint_of(deployment: Deployment) -> Fingerprint:
    """Of this machine, the engine's software and the models."""
    gguf = engine_type(deployment.config.engine.kind).reads_gguf
    return Fingerprint(
        hardware=hardware_of(deployment), software=software_of(deployment),
        models=tuple(
            model_fingerprint(model.path, gguf=gguf)
            for model in deployment.config.models
        ),
    )  # fmt: skip


def hardware_of(deployment: Deployment, *, live: bool = True) -> Hardware:
    """`live` is False for a deployment on another machine (--machine, --snapshot)."""
    return read_hardware(deployment.topology, Path("/") if live else None)


def software_of(deployment: Deployment) -> Software:
    stack, engine = deployment.stack, deployment.config.engine
    name = engine_type(engine.kind).title(engine)
    image = f" in image {stack.image.removeprefix('sha256:')[:12]}" if stack.image else ""
    return Software(
        numa_launcher=launcher.__version__, engine=f"{name}{image}", vllm=stack.vllm, torch=stack.torch,
        zentorch=stack.zentorch, python=stack.python_version, engine_version=stack.version,
    )  # fmt: skip


def model_fingerprint(path: str, *, gguf: bool = False) -> ModelFingerprint:
    """By config.json and the size of the weight files, which are not read; a model in GGUF by parts of its files. A
    repository id may not be cached yet. `gguf`: its engine reads nothing else, also where config.json lies beside it."""
    try:
        if files := _gguf_files(path, gguf=gguf):
            return _of_gguf(path, files)
        folder = find_model(path)
        if folder is None:
            return ModelFingerprint(path=path, config_sha256=None, weights_bytes=None)
        sizes = [file.stat().st_size for file in folder.iterdir() if file.suffix in _WEIGHTS]
        config = folder / "config.json"
        digest = hashlib.sha256(read_model_json(config)).hexdigest() if config.exists() else None
    except (LauncherError, OSError, ValueError):  # planning reports what is wrong with a model
        return ModelFingerprint(path=path, config_sha256=None, weights_bytes=None)
    local = Path(path).expanduser().is_dir()
    return ModelFingerprint(
        path=str(folder.resolve()) if local else path, config_sha256=digest, weights_bytes=sum(sizes) or None
    )


# Bytes of a GGUF file that tell it from others: its beginning, and blocks all over it. A file of another quantization has
# another header; one of the same shape has other weights.
_GGUF_BEGINNING: Final = 1024**2
_GGUF_BLOCKS: Final = 16
_GGUF_BLOCK: Final = 4096


def _gguf_files(path: str, *, gguf: bool) -> tuple[Path, ...]:
    """The files of a model in GGUF; empty for another format. Raises LauncherError for one that is not whole."""
    place = Path(path).expanduser()
    if place.is_dir():
        gguf = gguf or (not (place / "config.json").exists() and any(place.glob("*.gguf")))
    else:
        gguf = gguf or place.is_file() or place.suffix == ".gguf"
    return gguf_files(path) if gguf else ()


def _of_gguf(path: str, files: Sequence[Path]) -> ModelFingerprint:
    digest, total = hashlib.sha256(), 0
    for file in files:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            total += size
            digest.update(f"{file.name} {size} ".encode())
            stream.seek(0)
            digest.update(stream.read(_GGUF_BEGINNING))
            for block in range(1, _GGUF_BLOCKS + 1):
                stream.seek(max(0, size * block // _GGUF_BLOCKS - _GGUF_BLOCK))
                digest.update(stream.read(_GGUF_BLOCK))
    absolute = str(Path(path).expanduser().resolve())
    return ModelFingerprint(
        path=absolute, config_sha256=digest.hexdigest(), weights_bytes=total or None, digest_of="contents"
    )


# --- The newest results of `bench` and `tune` in the state folder, for ``GET /v1/measurements``. ---

MAX_RESULTS: Final = 20
READ_S: Final = 2.0
# Decoding holds the event loop up: under 1 ms for each MiB. A result of twenty points has half a MiB.
MAX_BYTES: Final = 8 * 1024**2


class Measurement(Struct, frozen=True, kw_only=True):
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
    failed: int = 0
    output_tokens: int = 0
    asked_tokens: int | None = None
    fault: str = ""


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
        self._reading = OneRead(self._read, "measurements")

    async def newest(self) -> list[Measurement]:
        """The newest first; none without a state folder that can be read within READ_S, or without a thread for it."""
        with suppress(TimeoutError, LauncherError):
            return await self._reading.result(READ_S)
        return []

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
    loads = [
        (runs, speed)
        for runs in by_load(points)
        if not runs.unranked and (speed := runs.value(OUTPUT_TOKENS)) is not None
    ]
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
