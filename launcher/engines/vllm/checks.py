"""Checks of vLLM's software, for `doctor`. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, Self

from launcher.base.text import format_size
from launcher.engines.build_jobs import JOB_BYTES, build_jobs
from launcher.engines.checks import Check, Software, preloaded
from launcher.engines.vllm.software import Version, parse_release, zentorch_mismatch
from launcher.machine.topology import Topology
from launcher.plan.check_rows import Row, Tier, Verdict, fail, ok, warn

if TYPE_CHECKING:
    from launcher.machine.hardware import HostFacts

# --- Versions of vLLM, torch and zentorch that match, from compatibility.toml. ---


@dataclass(frozen=True, slots=True)
class VersionSet:
    """Versions published for each other."""

    vllm: tuple[str, ...]
    torch: str
    zentorch: str


@dataclass(frozen=True, slots=True)
class Matrix:
    sets: tuple[VersionSet, ...]
    plugin_from: Version
    plugin_to: Version

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError for a set without a known source."""
        raw: Mapping[str, Any] = tomllib.loads(text)
        sources = raw["sources"]
        for entry in (*raw["set"], raw["plugin"]):
            if entry["source"] not in sources:
                raise ValueError(f"compatibility.toml: no source named {entry['source']!r}")
        return cls(
            tuple(VersionSet(tuple(one["vllm"]), one["torch"], one["zentorch"]) for one in raw["set"]),
            parse_release(raw["plugin"]["from"]),
            parse_release(raw["plugin"]["to"]),
        )

    def set_for(self, vllm: str) -> VersionSet | None:
        """The set of a vLLM version; None when the table does not have it."""
        release = parse_release(vllm)
        return next((one for one in self.sets if release in map(parse_release, one.vllm)), None)


def versions_row(matrix: Matrix, vllm: str, torch: str | None, zentorch: str | None) -> Row:
    installed = ", ".join(
        f"{name} {version}"
        for name, version in (("vLLM", vllm), ("torch", torch), ("zentorch", zentorch))
        if version
    )
    if torch is None:
        return Row(
            "versions", Verdict.FAIL, f"{installed}: no torch", "reinstall vLLM with its torch", Tier.FALLBACK
        )
    known = matrix.set_for(vllm)
    mismatch = zentorch_mismatch(torch, zentorch)
    if mismatch is not None:
        remedy = (
            f"pip install zentorch=={known.zentorch}"
            if known
            else "install the zentorch with torch's version number"
        )
        return Row("versions", Verdict.WARN, mismatch, remedy, Tier.DEGRADED)
    if known is None:
        return _unknown(matrix, installed, vllm, zentorch)
    if parse_release(torch) != parse_release(known.torch):
        return Row(
            "versions", Verdict.WARN, f"{installed}: this vLLM was built against torch {known.torch}",
            f"pip install torch=={known.torch} (the CPU build)", Tier.DEGRADED,
        )  # fmt: skip
    if zentorch is not None and parse_release(zentorch) != parse_release(known.zentorch):
        return Row(
            "versions", Verdict.WARN, f"{installed}: published together with zentorch {known.zentorch}",
            f"pip install zentorch=={known.zentorch}",
        )  # fmt: skip
    return Row("versions", Verdict.OK, f"{installed}: compatible")


def _unknown(matrix: Matrix, installed: str, vllm: str, zentorch: str | None) -> Row:
    newest = matrix.sets[-1]
    if zentorch is not None and matrix.plugin_from <= parse_release(vllm)[:2] <= matrix.plugin_to:
        return Row(
            "versions", Verdict.WARN,
            f"{installed}: zentorch is a plugin of this old vLLM and lists its supported versions at start",
            f"read the instance's log for 'Plugin supports versions', or use vLLM {newest.vllm[-1]}",
        )  # fmt: skip
    return Row(
        "versions", Verdict.WARN, f"{installed}: not a known combination",
        f"if it does not start, use vLLM {newest.vllm[-1]} with torch {newest.torch} and zentorch {newest.zentorch}",
    )  # fmt: skip


# --- Rules on allocator, OpenMP, vLLM, ZenTorch and compilers. ---

# vLLM's documentation, "CPU - build wheel from source": gcc/g++ >= 12.3.0.
COMPILER_SINCE: Final = (12, 3)


def tcmalloc(software: Software, _host: HostFacts, _topology: Topology) -> Iterator[Row]:
    yield preloaded(software) or warn(
        "tcmalloc", "libtcmalloc_minimal.so.4 not found: the C library's malloc is slower",
        "apt-get install libtcmalloc-minimal4 (Debian, Ubuntu) or dnf install gperftools-libs", Tier.DEGRADED,
    )  # fmt: skip


def openmp(software: Software, _host: HostFacts, _topology: Topology) -> Iterator[Row]:
    """torch includes its own libgomp, which vLLM preloads."""
    if software.openmp:
        yield ok("openmp", ", ".join(software.openmp))
    else:
        yield warn(
            "openmp", "no OpenMP runtime found", "apt-get install libgomp1, or reinstall torch", Tier.DEGRADED
        )


def engine(matrix: Matrix, software: Software, _host: HostFacts, _topology: Topology) -> Iterator[Row]:
    if software.trouble is not None:
        yield fail("vllm", software.trouble.message, software.trouble.remedy)
    elif software.vllm is None:
        yield warn(
            "vllm", f"{software.command}: unknown version",
            "set engine.command to a script of a Python environment, or to its Python",
        )  # fmt: skip
    else:
        yield ok("vllm", f"{software.vllm} ({software.command})")
        if software.cpu_build is False:
            yield fail(
                "vllm-build", f"vLLM {software.vllm} is no CPU build: it finds no device and does not start",
                "run scripts/quickstart, or pip install 'numa-launcher[vllm]' in an environment of its own",
            )  # fmt: skip
        yield versions_row(matrix, software.vllm, software.torch, software.zentorch)


def zentorch(matrix: Matrix, software: Software, host: HostFacts, _topology: Topology) -> Iterator[Row]:
    """vLLM uses it on AMD processors with AVX-512 only (platforms/__init__.py)."""
    found = f"zentorch {software.zentorch}" if software.zentorch else "no zentorch"
    if host.vendor != "AuthenticAMD" or "avx512f" not in host.flags:
        yield ok("zentorch", f"{found}; vLLM uses it on AMD Zen 4 and later only")
    elif software.zentorch is None:
        known = matrix.set_for(software.vllm) if software.vllm else None
        version = f"=={known.zentorch}" if known else ""
        yield warn(
            "zentorch", "not installed: vLLM runs its own kernels", f"pip install zentorch{version}",
            Tier.DEGRADED,
        )  # fmt: skip
    else:
        yield ok("zentorch", found)


def compiler(software: Software, _host: HostFacts, _topology: Topology) -> Iterator[Row]:
    """torch.compile needs a C++ compiler at each start; building vLLM from source needs 12.3 or newer."""
    found = software.compiler
    if found is None:
        yield warn(
            "compiler", "no C++ compiler: vLLM needs one at each start to compile the model",
            "apt-get install g++", Tier.DEGRADED,
        )  # fmt: skip
    elif parse_release(found.version) < COMPILER_SINCE:
        yield ok(
            "compiler", f"{found.command} {found.version}: sufficient to serve",
            "to build vLLM from source install 12.3 or newer (apt-get install g++-12)",
        )  # fmt: skip
    else:
        yield ok("compiler", f"{found.command} {found.version}")


def jobs(_software: Software, host: HostFacts, topology: Topology) -> Iterator[Row]:
    """For building vLLM from source: one compiler takes about 2 GB."""
    cpus, free = len(topology.allowed), host.memory_available_bytes
    available = min(free, topology.memory_limit_bytes or free)
    count = build_jobs(cpus, available)
    yield ok(
        "build-jobs",
        f"{count} parallel jobs to build vLLM here (scripts/build-vllm-cpu): {cpus} cpus, {format_size(available)} free, "
        f"{format_size(JOB_BYTES)} each",
    )  # fmt: skip


def checks_of(matrix: Matrix) -> tuple[Check, ...]:
    """All of them, in the order of their rows."""
    return (tcmalloc, openmp, partial(engine, matrix), partial(zentorch, matrix), compiler, jobs)


def checks() -> tuple[Check, ...]:
    """As `checks_of`, with the table that is part of this package."""
    text = (resources.files("launcher.engines.vllm") / "compatibility.toml").read_text(encoding="utf-8")
    return checks_of(Matrix.parse(text))
