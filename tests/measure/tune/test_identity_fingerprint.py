"""What makes a measurement stale, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from support.verdicts import FINGERPRINT, HARDWARE, MODEL, SOFTWARE

from launcher.measure.tune.identity import differences


def hardware(**changed: Any) -> tuple[str, ...]:
    return differences(FINGERPRINT, replace(FINGERPRINT, hardware=replace(HARDWARE, **changed)))


def software(**changed: Any) -> tuple[str, ...]:
    return differences(FINGERPRINT, replace(FINGERPRINT, software=replace(SOFTWARE, **changed)))


def models(*changed: Any) -> tuple[str, ...]:
    return differences(FINGERPRINT, replace(FINGERPRINT, models=changed))


def test_the_same_machine() -> None:
    assert differences(FINGERPRINT, FINGERPRINT) == ()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"cpu_model": "AMD EPYC 9965"}, "processor AMD EPYC 9755 128-Core Processor → AMD EPYC 9965"),
        ({"memory_modules": 24}, "memory modules 12 → 24"),
        ({"memory_speed_mts": 4800}, "memory speed 6000 MT/s → 4800 MT/s"),
        ({"governor": "powersave"}, "governor performance → powersave"),
        ({"boost": False}, "boost on → off"),
        ({"smt": False}, "SMT on → off"),
        ({"transparent_hugepages": "always"}, "transparent huge pages madvise → always"),
        ({"numa_nodes": 4}, "NUMA nodes 1 → 4"),
        ({"allowed_cpus": 16}, "allowed cpus 256 → 16"),
        ({"memory_limit_bytes": 64 * 1024**3}, "memory limit none → 64 GiB"),
        ({"cpu_quota": 7.5}, "cpu time limit none → 7.5 cpus"),
        ({"kernel": "6.14.0-1-generic"}, "kernel 6.8 → 6.14"),
        ({"virtual": True}, "virtual machine no → yes"),
    ],
)
def test_other_hardware(changed: dict[str, Any], reason: str) -> None:
    assert hardware(**changed) == (reason,)


@pytest.mark.parametrize(
    "changed",
    [
        {"kernel": "6.8.0-90-generic"},
        {"memory_bytes": HARDWARE.memory_bytes - 30 * 1024**2},
        {"memory_modules": None, "memory_speed_mts": None},  # not read as root
        {"governor": None, "boost": None, "transparent_hugepages": None, "kernel": None},
    ],
)
def test_what_is_no_other_hardware(changed: dict[str, Any]) -> None:
    assert hardware(**changed) == ()
    now = replace(FINGERPRINT, hardware=replace(HARDWARE, **changed))
    assert differences(now, FINGERPRINT) == ()


def test_half_of_the_memory() -> None:
    (reason,) = hardware(memory_bytes=HARDWARE.memory_bytes // 2)
    assert reason == "memory 768 GiB → 384 GiB"


def test_memory_of_a_virtual_machine_varies() -> None:
    before = replace(FINGERPRINT, hardware=replace(HARDWARE, virtual=True))
    for share, stale in ((0.75, False), (1.3, False), (0.4, True), (2.0, True)):
        size = int(HARDWARE.memory_bytes * share)
        now = replace(before, hardware=replace(before.hardware, memory_bytes=size))
        assert bool(differences(before, now)) is stale


@pytest.mark.parametrize(
    ("changed", "reasons"),
    [
        ({"vllm": "0.33.0"}, ("vllm 0.32.0 → 0.33.0",)),
        ({"zentorch": None}, ("zentorch 2.13.0.1 → none",)),
        ({"vllm": "0.33.0", "torch": "2.14.0"}, ("vllm 0.32.0 → 0.33.0", "torch 2.13.0+cpu → 2.14.0")),
        ({"engine": "llama-server", "vllm": None, "torch": None}, ("engine vllm → llama-server",)),
        ({"numa_launcher": "0.2.0", "python": "3.13.0"}, ()),
    ],
)
def test_other_software(changed: dict[str, Any], reasons: tuple[str, ...]) -> None:
    assert software(**changed) == reasons


def test_other_models() -> None:
    assert models(replace(MODEL, path="/m")) == ("model /srv/models/llama → /m",)
    assert models(MODEL, replace(MODEL, path="/m")) == ("model /srv/models/llama → /srv/models/llama, /m",)
    assert models(replace(MODEL, config_sha256="0")) == ("config.json of /srv/models/llama",)
    assert models(replace(MODEL, weights_bytes=8_000_000_000)) == (
        "weights of /srv/models/llama 14.9 GiB → 7.45 GiB",
    )
    assert models(replace(MODEL, config_sha256=None, weights_bytes=None)) == (), "not cached here"
