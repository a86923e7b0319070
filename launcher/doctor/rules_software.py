"""Rules on the engine's software, compilers, and numa-launcher itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from launcher.build import REMEDY
from launcher.doctor.build_jobs import JOB_BYTES, build_jobs
from launcher.doctor.compatibility import Matrix, versions_row
from launcher.doctor.facts import Facts
from launcher.doctor.report import Row, Tier, fail, ok, warn
from launcher.engines.software_versions import parse_release
from launcher.sizes import format_size

# vLLM's documentation, "CPU - build wheel from source": gcc/g++ >= 12.3.0.
COMPILER_SINCE: Final = (12, 3)


def tcmalloc(facts: Facts, _: Matrix) -> Iterator[Row]:
    software = facts.software
    if software.tcmalloc is not None:
        yield ok("tcmalloc", software.tcmalloc)
    elif software.tcmalloc_off:
        yield warn(
            "tcmalloc", "switched off by engine.tcmalloc", 'set engine.tcmalloc = "auto"', Tier.DEGRADED
        )
    elif software.is_vllm:
        yield warn(
            "tcmalloc", "libtcmalloc_minimal.so.4 not found: the C library's malloc is slower",
            "apt-get install libtcmalloc-minimal4 (Debian, Ubuntu) or dnf install gperftools-libs", Tier.DEGRADED,
        )  # fmt: skip
    else:
        yield ok("tcmalloc", "not set for a custom command")


def openmp(facts: Facts, _: Matrix) -> Iterator[Row]:
    """torch includes its own libgomp, which vLLM preloads."""
    software = facts.software
    if software.openmp:
        yield ok("openmp", ", ".join(software.openmp))
    elif software.is_vllm:
        yield warn(
            "openmp", "no OpenMP runtime found", "apt-get install libgomp1, or reinstall torch", Tier.DEGRADED
        )


def engine(facts: Facts, matrix: Matrix) -> Iterator[Row]:
    software = facts.software
    check = "vllm" if software.is_vllm else "engine"
    if software.trouble is not None:
        yield fail(check, software.trouble.message, software.trouble.remedy)
        return
    if not software.is_vllm:
        yield ok(check, f"custom command: {software.command}")
    elif software.vllm is None:
        yield warn(
            check, f"{software.command}: unknown version",
            "set engine.command to a script of a Python environment, or to its Python",
        )  # fmt: skip
    else:
        yield ok(check, f"{software.vllm} ({software.command})")
        yield versions_row(matrix, software.vllm, software.torch, software.zentorch)


def zentorch(facts: Facts, matrix: Matrix) -> Iterator[Row]:
    """vLLM uses it on AMD processors with AVX-512 only (platforms/__init__.py)."""
    software = facts.software
    if not software.is_vllm:
        return
    found = f"zentorch {software.zentorch}" if software.zentorch else "no zentorch"
    if facts.host.vendor != "AuthenticAMD" or "avx512f" not in facts.host.flags:
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


def compiler(facts: Facts, _: Matrix) -> Iterator[Row]:
    """torch.compile needs a C++ compiler at each start; building vLLM from source needs 12.3 or newer."""
    found = facts.compiler
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


def jobs(facts: Facts, _: Matrix) -> Iterator[Row]:
    """For building vLLM from source: one compiler takes about 2 GB."""
    host, cpus = facts.host, len(facts.topology.allowed)
    available = min(
        host.memory_available_bytes, facts.topology.memory_limit_bytes or host.memory_available_bytes
    )
    count = build_jobs(cpus, available)
    yield ok(
        "build-jobs",
        f"{count} parallel jobs to build vLLM here (scripts/build-vllm-cpu): {cpus} cpus, {format_size(available)} free, "
        f"{format_size(JOB_BYTES)} each",
    )  # fmt: skip


def launcher_build(facts: Facts, _: Matrix) -> Iterator[Row]:
    match facts.build:
        case "stale":
            yield warn("build", "compiled libraries do not match the sources: the Python sources run", REMEDY)
        case "compiled":
            yield ok("build", "numa-launcher runs compiled libraries")
        case "python":
            yield ok("build", "numa-launcher runs Python sources")


def layout(facts: Facts, _: Matrix) -> Iterator[Row]:
    if facts.measured is None:
        yield ok("layout", "none was measured on this machine", "numa-launcher tune finds the fastest one")
    else:
        yield ok("layout", f"measured on {facts.measured}")


SOFTWARE_RULES: Final = (tcmalloc, openmp, engine, zentorch, compiler, jobs, launcher_build, layout)
