"""What a measured layout depends on, and how two of these differ. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from launcher.bench.result import Software
from launcher.host.hardware import Hardware
from launcher.sizes import format_size

# MemTotal of one machine differs between kernels by what they reserve for themselves.
_SAME_MEMORY: Final = 0.01
# A hypervisor adds and takes memory while its guests run (balloon, hotplug); seen: a fifth within an hour.
_SAME_VIRTUAL_MEMORY: Final = 0.5


class ModelFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """One served model. None: its files are not on this machine."""

    path: str
    config_sha256: str | None
    weights_bytes: int | None


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
            yield f"config.json of {new.path}"
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
    old_kernel, new_kernel = _series(measured.kernel), _series(now.kernel)
    if _known(old_kernel, new_kernel):
        yield f"kernel {old_kernel} → {new_kernel}"


def _series(kernel: str | None) -> str | None:
    """6.8 of 6.8.0-45-generic: a security update is no other kernel."""
    return None if kernel is None else ".".join(kernel.split(".")[:2])


def _software(measured: Software, now: Software) -> Iterator[str]:
    """Not the version of numa-launcher itself, or of Python: they start what the plan says either way."""
    if measured.engine != now.engine:
        yield f"engine {measured.engine} → {now.engine}"
        return
    for name in ("vllm", "torch", "zentorch"):
        old, new = getattr(measured, name), getattr(now, name)
        if old != new:
            yield f"{name} {old or 'none'} → {new or 'none'}"
