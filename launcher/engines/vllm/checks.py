"""Checks of vLLM's software and of the processor for it, for `doctor`. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from msgspec import Struct

from launcher.base.text import format_size
from launcher.engines.build_jobs import JOB_BYTES, build_jobs
from launcher.engines.checks import Check, Installed, Row, Tier, Verdict, allocator_row, fail, ok, warn
from launcher.engines.vllm.software import Version, parse_release, zentorch_mismatch
from launcher.machine.topology import Topology

if TYPE_CHECKING:
    from launcher.machine.hardware import HostFacts

# --- Versions of vLLM, torch and zentorch that match, from compatibility.toml. ---


class VersionSet(Struct, frozen=True):
    """Versions published for each other."""

    vllm: tuple[str, ...]
    torch: str
    zentorch: str


class Matrix(Struct, frozen=True):
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


# --- Checks of the processor. ---

_X86: Final = frozenset({"AuthenticAMD", "GenuineIntel", "HygonGenuine"})


def vector_units(_software: Installed, host: HostFacts, _topology: Topology) -> Iterator[Row]:
    """vLLM's x86 wheel has an AVX-512 and an AVX2 build; without either it crashes with SIGILL."""
    flags = host.flags
    if host.vendor not in _X86:
        yield ok("avx512", "not an x86 processor: vLLM uses its build for this architecture")
    elif "avx512f" in flags:
        yield ok("avx512", "AVX-512 available")
    elif "avx2" in flags:
        yield warn(
            "avx512", "no AVX-512: vLLM runs its AVX2 build, about half as fast, without ZenTorch",
            "use AMD Zen 4 or later, or enable AVX-512 for the virtual machine", Tier.FALLBACK,
        )  # fmt: skip
    else:
        yield fail(
            "avx512", "neither AVX-512 nor AVX2: vLLM crashes with SIGILL",
            "use another machine, or enable the processor's instruction sets for the virtual machine",
        )  # fmt: skip


def bfloat16(_software: Installed, host: HostFacts, _topology: Topology) -> Iterator[Row]:
    flags = host.flags
    if "avx512_bf16" in flags or "bf16" in flags:
        yield ok("bf16", "bfloat16 instructions available")
    else:
        yield warn(
            "bf16", "no bfloat16 instructions: bfloat16 models are computed in float32",
            "use AMD Zen 4, Intel Cooper Lake or later", Tier.DEGRADED,
        )  # fmt: skip


def amx(_software: Installed, host: HostFacts, _topology: Topology) -> Iterator[Row]:
    """Intel only; on some processors, bfloat16 with --enforce-eager crashes on a short first prompt (vLLM 0.32)."""
    if "amx_bf16" in host.flags:
        yield ok(
            "amx", "AMX with bfloat16 available",
            'with --enforce-eager set dtype = "float32": vLLM 0.32 crashes with SIGILL in bfloat16',
        )  # fmt: skip
    else:
        yield ok("amx", "no AMX (Intel only)" if host.zen else "no AMX")


# --- Checks of allocator, OpenMP, vLLM, ZenTorch and compilers. ---

# vLLM's documentation, "CPU - build wheel from source": gcc/g++ >= 12.3.0.
COMPILER_SINCE: Final = (12, 3)


def tcmalloc(software: Installed, _host: HostFacts, _topology: Topology) -> Iterator[Row]:
    yield allocator_row(software) or warn(
        "tcmalloc", "libtcmalloc_minimal.so.4 not found: the C library's malloc is slower",
        "apt-get install libtcmalloc-minimal4 (Debian, Ubuntu) or dnf install gperftools-libs", Tier.DEGRADED,
    )  # fmt: skip


def openmp(software: Installed, _host: HostFacts, _topology: Topology) -> Iterator[Row]:
    """torch includes its own libgomp, which vLLM preloads."""
    if software.openmp:
        yield ok("openmp", ", ".join(software.openmp))
    else:
        yield warn(
            "openmp", "no OpenMP runtime found", "apt-get install libgomp1, or reinstall torch", Tier.DEGRADED
        )


def engine(matrix: Matrix, software: Installed, _host: HostFacts, _topology: Topology) -> Iterator[Row]:
    stack = software.stack
    if software.trouble is not None:
        yield fail("vllm", software.trouble.message, software.trouble.remedy)
    elif stack is not None and stack.vllm is not None:
        yield ok("vllm", f"{stack.vllm} ({' '.join(stack.command)})")
        if stack.cpu_build is False:
            yield fail(
                "vllm-build", f"vLLM {stack.vllm} is no CPU build: it finds no device and does not start",
                "run scripts/quickstart, or pip install 'numa-launcher[vllm]' in an environment of its own",
            )  # fmt: skip
        yield versions_row(matrix, stack.vllm, stack.torch, stack.zentorch)
    elif stack is not None:
        yield warn(
            "vllm", f"{' '.join(stack.command)}: unknown version",
            "set engine.command to a script of a Python environment, or to its Python",
        )  # fmt: skip


def zentorch(matrix: Matrix, software: Installed, host: HostFacts, _topology: Topology) -> Iterator[Row]:
    """vLLM uses it on AMD processors with AVX-512 only (platforms/__init__.py)."""
    version, vllm = (None, None) if software.stack is None else (software.stack.zentorch, software.stack.vllm)
    found = f"zentorch {version}" if version else "no zentorch"
    if host.vendor != "AuthenticAMD" or "avx512f" not in host.flags:
        yield ok("zentorch", f"{found}; vLLM uses it on AMD Zen 4 and later only")
    elif version is None:
        known = matrix.set_for(vllm) if vllm else None
        wanted = f"=={known.zentorch}" if known else ""
        yield warn(
            "zentorch", "not installed: vLLM runs its own kernels", f"pip install zentorch{wanted}",
            Tier.DEGRADED,
        )  # fmt: skip
    else:
        yield ok("zentorch", found)


def compiler(software: Installed, _host: HostFacts, _topology: Topology) -> Iterator[Row]:
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


def jobs(_software: Installed, host: HostFacts, topology: Topology) -> Iterator[Row]:
    """For building vLLM from source: one compiler takes about 2 GB."""
    cpus, free = len(topology.allowed), host.memory_available_bytes
    available = min(free, topology.memory_limit_bytes or free)
    count = build_jobs(cpus, available)
    yield ok(
        "build-jobs",
        f"{count} parallel jobs to build vLLM here (scripts/build-vllm-cpu): {cpus} cpus, {format_size(available)} free, "
        f"{format_size(JOB_BYTES)} each",
    )  # fmt: skip


def checks_by(matrix: Matrix) -> tuple[Check, ...]:
    """All checks, in the order of their rows. `matrix`: the versions that match."""
    return (
        vector_units, bfloat16, amx, tcmalloc, openmp, partial(engine, matrix), partial(zentorch, matrix), compiler, jobs,
    )  # fmt: skip
