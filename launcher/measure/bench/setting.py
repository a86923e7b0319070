"""What a result was measured on and with, in words, and how two results differ in it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from launcher.base.cpuset import CpuSet
from launcher.base.text import counted, format_size, quoted
from launcher.measure.bench.figures import duration
from launcher.measure.bench.result import BenchResult

_ABSENT: Final = "not known"
# Options of a workload that say in words what the others say.
_DESCRIPTIONS: Final = frozenset({"name", "what", "source"})
# Fields of Hardware and Software as people call them.
_NAMES: Final = {
    "cpu_model": "CPU", "numa_nodes": "NUMA nodes", "nodes_per_socket": "NUMA nodes per socket", "cpus": "logical CPUs",
    "allowed_cpus": "CPUs allowed", "cpu_quota": "CPU time limit", "memory_limit_bytes": "memory limit",
    "memory_bytes": "memory", "memory_speed_mts": "memory speed", "memory_modules": "memory modules", "smt": "SMT",
    "transparent_hugepages": "transparent huge pages", "virtual": "virtual machine", "numa_launcher": "numa-launcher",
    "vllm": "vLLM", "torch": "PyTorch", "zentorch": "ZenTorch", "python": "Python",
}  # fmt: skip


class Difference(msgspec.Struct, frozen=True):
    """One thing that is not the same in two results."""

    what: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.what}: {quoted(self.a)} in A, {quoted(self.b)} in B"


def conditions_that_differ(a: BenchResult, b: BenchResult) -> list[Difference]:
    """Hardware, model, workload, driver and SLO: where they differ, the figures are not of the same thing."""
    return [
        *_differing("hardware", hardware_facts(a), hardware_facts(b)),
        *_differing("", _request_facts(a), _request_facts(b)),
    ]


def versions_that_differ(a: BenchResult, b: BenchResult) -> list[Difference]:
    """Plan and software: often what a comparison is about."""
    return [
        *_differing("", {"plan": plan_in_words(a)}, {"plan": plan_in_words(b)}),
        *_differing("", software_facts(a), software_facts(b)),
    ]


def hardware_facts(result: BenchResult) -> dict[str, str]:
    """Properties of the machine by name, as people read them; only those that are known."""
    hardware = result.hardware
    if hardware is None:
        return {}
    shown = {
        "memory_bytes": format_size(hardware.memory_bytes),
        "memory_limit_bytes": format_size(hardware.memory_limit_bytes or 0),
        "nodes_per_socket": f"{hardware.nodes_per_socket:g}",
        "memory_speed_mts": f"{hardware.memory_speed_mts} MT/s",
    }
    return {
        _NAMES.get(name, name): shown.get(name) or _worded(value)
        for name, value in msgspec.structs.asdict(hardware).items()
        if value is not None
    }


def software_facts(result: BenchResult) -> dict[str, str]:
    return {
        _NAMES.get(name, name): str(value)
        for name, value in (msgspec.structs.asdict(result.software) if result.software else {}).items()
        if value is not None
    }


def plan_in_words(result: BenchResult) -> str:
    """`interleaved: 4 instances, 63 to 64 cpus each`."""
    slots = plan_slots(result)
    if not slots:
        return _ABSENT
    sizes = sorted(cpu_count(str(slot.get("cpus") or "")) for slot in slots)
    each = f"{sizes[0]}" if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"
    strategy = (result.plan or {}).get("strategy", "")
    cpus = "1 cpu" if sizes[-1] == 1 else f"{each} cpus"
    return f"{strategy}: {counted(len(slots), 'instance')}, {cpus} each"


def plan_slots(result: BenchResult) -> list[dict[str, Any]]:
    """The plan's slots; a result file may be of another version, or edited."""
    slots = (result.plan or {}).get("slots")
    return [slot for slot in slots if isinstance(slot, dict)] if isinstance(slots, list) else []


def cpu_count(cpulist: str) -> int:
    """Cpus in a list such as "0-3,8"; 0 where it is none."""
    try:
        return len(CpuSet.parse(cpulist))
    except ValueError:
        return 0


def workload_in_words(result: BenchResult) -> str:
    """Its own description, else its options."""
    options = result.workload_options
    described = options.get("what") or ", ".join(
        f"{name} = {_worded(value)}" for name, value in options.items()
    )
    return f"{result.workload}: {described}" if described else result.workload


def slo_in_words(result: BenchResult) -> str:
    limits = (f"{_figure(name)} ≤ {duration(limit)}" for name, limit in result.slo.items())
    return ", ".join(limits) or "none"


def _figure(limit: str) -> str:
    """ttft_p99 -> TTFT p99"""
    name, _, part = limit.partition("_")
    return f"{name if name == 'e2e' else name.upper()} {part}".strip()


def _request_facts(result: BenchResult) -> dict[str, str]:
    options = {
        f"workload's {name}": _worded(value)
        for name, value in result.workload_options.items()
        if name not in _DESCRIPTIONS
    }
    return {
        "model": result.model,
        "workload": result.workload,
        **options,
        "load generator": f"{result.driver} {result.driver_version}".strip(),
        "SLO": slo_in_words(result),
        "cores": _ABSENT if result.cores is None else str(result.cores),
    }


def _worded(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def _differing(kind: str, a: dict[str, str], b: dict[str, str]) -> Iterator[Difference]:
    for name in {**a, **b}:
        of_a, of_b = a.get(name, _ABSENT), b.get(name, _ABSENT)
        if of_a != of_b:
            yield Difference(f"{kind} {name}".strip(), of_a, of_b)
