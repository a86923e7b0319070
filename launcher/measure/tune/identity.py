"""What must be the same when a run is resumed, as flat names and values, and how two of them differ. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from launcher.base.errors import RefusedError
from launcher.base.text import format_size
from launcher.machine.hardware import Hardware
from launcher.measure.bench.result import Software

# Values that may be secrets: only whether they differ is kept.
_SECRET: Final = ("configuration.engine.env.",)
_MOST_SHOWN: Final = 3


def identity_of(parts: Mapping[str, Any]) -> dict[str, str]:
    """Flat: {"configuration.layout.strategy": '"interleaved"', ...} from plain values."""
    return {name: _digest(value) if name.startswith(_SECRET) else value for name, value in _flat("", parts)}


def refuse_changes(run: str, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises RefusedError that names what has changed."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not names:
        return
    shown = [
        f"{name}: {before.get(name, 'not set')}, now {now.get(name, 'not set')}"
        for name in names[:_MOST_SHOWN]
    ]
    more = [f"{len(names) - _MOST_SHOWN} more"] * (len(names) > _MOST_SHOWN)
    raise RefusedError(
        f"cannot resume '{run}': it was begun with other values: {'; '.join([*shown, *more])}",
        "undo the changes, or begin a new run without --resume",
    )


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list | tuple) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from _flat(f"{name}.{index}", inner)
    elif value is not None:
        yield name, json.dumps(value)


def _digest(value: str) -> str:
    return f"sha256 {hashlib.sha256(value.encode()).hexdigest()[:12]}"


# --- What a measured layout depends on, and how two of these differ. ---

# MemTotal of one machine differs between kernels by what they reserve for themselves.
_SAME_MEMORY: Final = 0.01
# A hypervisor adds and takes memory while its guests run (balloon, hotplug); seen: a fifth within an hour.
_SAME_VIRTUAL_MEMORY: Final = 0.5


class ModelFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """One served model. None: its files are not on this machine."""

    path: str
    config_sha256: str | None
    weights_bytes: int | None
    digest_of: str = "config.json"
    """The part of the model that `config_sha256` is taken from: "contents" for a model in GGUF."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    hardware: Hardware
    software: Software
    models: tuple[ModelFingerprint, ...]


def differences(measured: Fingerprint, now: Fingerprint) -> tuple[str, ...]:
    """What has changed, as "governor powersave → performance"; empty when the measurement still holds.

    A fact that is unknown on either side is not compared: SMBIOS needs root, a container's image hides its versions."""
    return (
        *_models(measured.models, now.models),
        *_hardware(measured.hardware, now.hardware),
        *_software(measured.software, now.software),
    )


def _models(measured: tuple[ModelFingerprint, ...], now: tuple[ModelFingerprint, ...]) -> Iterator[str]:
    before, after = ([model.path for model in models] for models in (measured, now))
    if before != after:
        yield f"model {', '.join(before)} → {', '.join(after)}"
        return
    for old, new in zip(measured, now, strict=True):
        if _known(old.config_sha256, new.config_sha256):
            yield f"{new.digest_of} of {new.path}"
        if _known(old.weights_bytes, new.weights_bytes):
            yield f"weights of {new.path} {_size(old.weights_bytes)} → {_size(new.weights_bytes)}"


def _known(old: Any, new: Any) -> bool:
    """Both are known, and they differ."""
    return old is not None and new is not None and old != new


def _size(size_bytes: int | None) -> str:
    return "none" if size_bytes is None else format_size(size_bytes)


def _switch(on: bool) -> str:
    return "on" if on else "off"


# Field of Hardware -> its words, and how a value is written. The kernel, memory and its limit have rules of their own.
_FIELDS: Final[dict[str, tuple[str, Callable[[Any], str]]]] = {
    "cpu_model": ("processor", str),
    "sockets": ("sockets", str),
    "cores": ("cores", str),
    "smt": ("SMT", _switch),
    "allowed_cpus": ("allowed cpus", str),
    "numa_nodes": ("NUMA nodes", str),
    "memory_modules": ("memory modules", str),
    "memory_speed_mts": ("memory speed", "{} MT/s".format),
    "governor": ("governor", str),
    "boost": ("boost", _switch),
    "transparent_hugepages": ("transparent huge pages", str),
    "virtual": ("virtual machine", lambda yes: "yes" if yes else "no"),
}


def _hardware(measured: Hardware, now: Hardware) -> Iterator[str]:
    for field, (words, written) in _FIELDS.items():
        old, new = getattr(measured, field), getattr(now, field)
        if _known(old, new):
            yield f"{words} {written(old)} → {written(new)}"
    same = _SAME_VIRTUAL_MEMORY if measured.virtual and now.virtual else _SAME_MEMORY
    if abs(now.memory_bytes - measured.memory_bytes) > same * measured.memory_bytes:
        yield f"memory {_size(measured.memory_bytes)} → {_size(now.memory_bytes)}"
    if measured.memory_limit_bytes != now.memory_limit_bytes:
        yield f"memory limit {_size(measured.memory_limit_bytes)} → {_size(now.memory_limit_bytes)}"
    if measured.cpu_quota != now.cpu_quota:
        yield f"cpu time limit {_quota(measured.cpu_quota)} → {_quota(now.cpu_quota)}"
    old_kernel, new_kernel = _series(measured.kernel), _series(now.kernel)
    if _known(old_kernel, new_kernel):
        yield f"kernel {old_kernel} → {new_kernel}"


def _quota(cpus: float | None) -> str:
    return "none" if cpus is None else f"{cpus:g} cpus"


def _series(kernel: str | None) -> str | None:
    """6.8 of 6.8.0-45-generic: a security update is no other kernel."""
    return None if kernel is None else ".".join(kernel.split(".")[:2])


def _software(measured: Software, now: Software) -> Iterator[str]:
    """Not the version of numa-launcher itself, or of Python: they start what the plan says either way."""
    if measured.engine != now.engine:
        yield f"engine {measured.engine} → {now.engine}"
        return
    if _known(measured.engine_version, now.engine_version):
        yield f"{now.engine} {measured.engine_version} → {now.engine_version}"
    for name in ("vllm", "torch", "zentorch"):
        old, new = getattr(measured, name), getattr(now, name)
        if old != new:
            yield f"{name} {old or 'none'} → {new or 'none'}"
