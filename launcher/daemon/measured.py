"""The measured layout of a deployment: fingerprints of this machine, and what `tune` remembered."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import launcher
from launcher.bench.result import Software
from launcher.config.schema import EngineKind
from launcher.daemon.deployment import Deployment
from launcher.errors import LauncherError
from launcher.host.hardware import Hardware, read_hardware
from launcher.host.state_folder import state_folder
from launcher.planning.model_files import read_model_json
from launcher.planning.model_profile import find_model
from launcher.tuning.best_file import recall
from launcher.tuning.fingerprint import Fingerprint, ModelFingerprint
from launcher.tuning.remembered import Limits, choose, judge

_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".gguf", ".pt"})


def with_measured_layout(deployment: Deployment, environ: Mapping[str, str] = os.environ) -> Deployment:
    """The deployment with the verdict of `tune` beside it, if one is remembered. Reads files: milliseconds."""
    try:
        remembered = recall(state_folder(None, environ, os.geteuid()))
    except LauncherError:  # a user without a home folder has no results either
        return deployment
    if not remembered:
        return deployment
    now = fingerprint_of(deployment)
    best = choose(remembered, now)
    if best is None:
        return deployment
    cpus = [slot.placement.cpus.format() for slot in deployment.plan.slots]
    limits = [
        Limits(max_num_seqs=model.max_num_seqs, max_num_batched_tokens=model.max_num_batched_tokens)
        for model in deployment.config.models
    ]
    return replace(deployment, measured=judge(best, now, cpus, limits))


def fingerprint_of(deployment: Deployment) -> Fingerprint:
    """Of this machine, the engine's software and the models."""
    return Fingerprint(
        hardware=hardware_of(deployment), software=software_of(deployment),
        models=tuple(model_fingerprint(model.path) for model in deployment.config.models),
    )  # fmt: skip


def hardware_of(deployment: Deployment, *, live: bool = True) -> Hardware:
    """`live` is False for a deployment on another machine (--machine, --snapshot)."""
    return read_hardware(deployment.topology, Path("/") if live else None)


def software_of(deployment: Deployment) -> Software:
    stack, engine = deployment.stack, deployment.config.engine
    name = "vllm" if engine.kind is EngineKind.VLLM else Path(engine.command[0]).name
    image = f" in image {stack.image.removeprefix('sha256:')[:12]}" if stack.image else ""
    return Software(
        numa_launcher=launcher.__version__, engine=f"{name}{image}", vllm=stack.vllm, torch=stack.torch,
        zentorch=stack.zentorch, python=stack.python_version,
    )  # fmt: skip


def model_fingerprint(path: str) -> ModelFingerprint:
    """By config.json and the size of the weight files, which are not read. A repository id may not be cached yet."""
    try:
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
