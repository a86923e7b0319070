"""Rules on processor, memory, NUMA and kernel settings. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from launcher.base.build import REMEDY
from launcher.base.text import counted, format_size
from launcher.base.watched_file import FileCondition
from launcher.doctor.build_jobs import JOB_BYTES, build_jobs
from launcher.doctor.facts import Facts
from launcher.doctor.rows import Report, Row, Tier, Verdict, fail, ok, warn
from launcher.engines.numactl import MemPolicy
from launcher.engines.vllm.software import Version, parse_release, zentorch_mismatch

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


# A larger difference between nodes means unevenly populated channels; the slowest node then limits equal instances.
UNEVEN_MEMORY: Final = 0.10
_X86: Final = frozenset({"AuthenticAMD", "GenuineIntel", "HygonGenuine"})


def cpu(facts: Facts, _: Matrix) -> Iterator[Row]:
    """ZenTorch is for Zen 4 and later; vLLM's own kernels run on the others."""
    host = facts.host
    zen = f", {host.zen}" if host.zen else ""
    cores = len(facts.topology.cores)
    yield ok("cpu", f"{host.brand or host.vendor or 'unknown'}{zen}, {cores} cores, {host.logical_cpus} cpus")


def vector_units(facts: Facts, _: Matrix) -> Iterator[Row]:
    """vLLM's x86 wheel has an AVX-512 and an AVX2 build; without either it crashes with SIGILL."""
    flags = facts.host.flags
    if facts.host.vendor not in _X86:
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


def bfloat16(facts: Facts, _: Matrix) -> Iterator[Row]:
    flags = facts.host.flags
    if "avx512_bf16" in flags or "bf16" in flags:
        yield ok("bf16", "bfloat16 instructions available")
    else:
        yield warn(
            "bf16", "no bfloat16 instructions: bfloat16 models are computed in float32",
            "use AMD Zen 4, Intel Cooper Lake or later", Tier.DEGRADED,
        )  # fmt: skip


def amx(facts: Facts, _: Matrix) -> Iterator[Row]:
    """Intel only; on some processors, bfloat16 with --enforce-eager crashes on a short first prompt (vLLM 0.32)."""
    if "amx_bf16" in facts.host.flags:
        yield ok(
            "amx", "AMX with bfloat16 available",
            'with --enforce-eager set dtype = "float32": vLLM 0.32 crashes with SIGILL in bfloat16',
        )  # fmt: skip
    else:
        yield ok("amx", "no AMX (Intel only)" if facts.host.zen else "no AMX")


def numa(facts: Facts, _: Matrix) -> Iterator[Row]:
    """One instance belongs on one node: vLLM's worker binds its memory to the node of its first cpu."""
    topology = facts.topology
    if not topology.has_numa:
        yield warn(
            "numa", "the kernel has no NUMA support: memory cannot be bound", "boot a kernel with CONFIG_NUMA",
            Tier.DEGRADED,
        )  # fmt: skip
        return
    nodes = [node for node in topology.numa_nodes if node.cpus]
    sockets = max(1, len(topology.sockets))
    each = len(nodes) / sockets
    shape = f"{counted(sockets, 'socket')}, {counted(len(nodes), 'node')} with cpus"
    bare = len(topology.numa_nodes) - len(nodes)
    if bare:
        shape += f", {bare} without cpus (these get no instance)"
    if each <= 1:
        advice = "an instance can use all memory channels of its socket; over 64 cores, run several instances per socket"
    else:
        smallest = min(node.memory_bytes for node in nodes)
        advice = (
            f"NPS{each:g}: plan at least one instance per node (strategy per-node); each instance must fit into "
            f"{format_size(smallest)}; a larger model needs NPS1 in the firmware"
        )
    yield ok("numa", shape, advice)


def smt(facts: Facts, _: Matrix) -> Iterator[Row]:
    """Two cpus of a core share its vector units; the planner uses one cpu of each core."""
    if any(len(core.cpus) > 1 for core in facts.topology.cores):
        yield ok("smt", "on: one cpu of each core is used, unless layout.use_smt is true")
    else:
        yield ok("smt", "off or not supported")


def allowed(facts: Facts, _: Matrix) -> Iterator[Row]:
    topology = facts.topology
    if topology.apart is not None:
        yield fail("cpus", f"{topology.apart}", topology.apart.remedy)
    elif topology.allowed == topology.online:
        yield ok("cpus", f"all {len(topology.online)} online cpus may be used")
    else:
        kept = topology.online - topology.allowed
        yield warn(
            "cpus", f"{len(topology.allowed)} of {len(topology.online)} online cpus may be used, {kept} may not",
            "if this is unintended: widen the affinity (taskset -p) or the cgroup's cpuset (AllowedCPUs=, --cpuset-cpus)",
        )  # fmt: skip


def memory(facts: Facts, _: Matrix) -> Iterator[Row]:
    nodes = facts.topology.numa_nodes
    fact = ", ".join(
        f"node {node.id}: {format_size(node.available_bytes)} free of {format_size(node.memory_bytes)}"
        for node in nodes
    )
    with_cpus = [node for node in nodes if node.cpus and node.memory_known]
    empty = [str(node.id) for node in with_cpus if node.memory_bytes == 0]
    sizes = [node.memory_bytes for node in with_cpus]
    if empty:
        yield warn(
            "memory", f"{fact}; no memory of its own on node {', '.join(empty)}",
            "populate that node's memory channels: its instances read every weight from another node", Tier.DEGRADED,
        )  # fmt: skip
    elif sizes and max(sizes) - min(sizes) > UNEVEN_MEMORY * max(sizes):
        yield warn("memory", f"{fact}; nodes differ", "populate the memory channels of all nodes equally")
    else:
        yield ok("memory", fact)


def memory_limit(facts: Facts, _: Matrix) -> Iterator[Row]:
    """The cgroup's limit, which a node's meminfo does not show."""
    limit = facts.topology.memory_limit_bytes
    total = sum(node.memory_bytes for node in facts.topology.numa_nodes)
    if limit is None or limit >= total:
        yield ok("memory-limit", "no cgroup limit below the machine's memory")
    else:
        yield warn(
            "memory-limit", f"the cgroup allows {format_size(limit)} of {format_size(total)}",
            "the plan respects it; raise it (MemoryMax=, docker --memory) to use the rest",
        )  # fmt: skip


def cpu_quota(facts: Facts, _: Matrix) -> Iterator[Row]:
    """The cgroup's limit on cpu time, which neither cpuset nor affinity shows."""
    quota, cpus = facts.topology.cpu_quota, len(facts.topology.allowed)
    if quota is None or quota >= cpus:
        yield ok("cpu-quota", "no cgroup limit on the time of the allowed cpus")
    else:
        yield warn(
            "cpu-quota", f"the cgroup allows the time of {float(quota):g} of {counted(cpus, 'cpu')}",
            "the plan respects it; raise it (CPUQuota=, docker --cpus, limits.cpu of a pod) to use the rest",
        )  # fmt: skip


def numactl(facts: Facts, _: Matrix) -> Iterator[Row]:
    """Found by trying. Its permissions decide how much memory is local."""
    binding, trouble = facts.binding, facts.binding_trouble
    if binding is None:
        message, remedy = (trouble.message, trouble.remedy) if trouble else ("not searched for", "")
        yield fail("numactl", message, remedy)
        return
    if binding.numactl is None:
        what = "taskset pins the cores" if binding.taskset else "nothing pins cores or memory"
        yield warn(
            "numactl", f"not used: {binding.warning or what}", 'set engine.numactl = "auto"; see the row container',
            Tier.FALLBACK,
        )  # fmt: skip
        return
    yield ok("numactl", binding.numactl)
    if binding.policy is MemPolicy.MEMBIND:
        yield ok("memory-policy", "permitted: instances are bound to their nodes (--membind)")
    else:
        has_numa = facts.topology.has_numa
        yield warn(
            "memory-policy", binding.warning or "not bound: no NUMA nodes",
            "in a container add CAP_SYS_NICE (docker run --cap-add SYS_NICE)" if has_numa else "",
            Tier.DEGRADED,
        )  # fmt: skip


def container(facts: Facts, _: Matrix) -> Iterator[Row]:
    """Docker's default seccomp filter denies mbind and set_mempolicy without CAP_SYS_NICE."""
    kernel = facts.kernel
    where = f"in a container ({kernel.container})" if kernel.container else "not in a container"
    seccomp = {
        True: "system calls are filtered (seccomp)",
        False: "no system call filter",
        None: "filter unknown",
    }
    nice = {True: "CAP_SYS_NICE", False: "no CAP_SYS_NICE", None: "capabilities unknown"}
    fact = f"{where}, {seccomp[kernel.seccomp]}, {nice[kernel.sys_nice]}"
    if kernel.seccomp and kernel.sys_nice is False:
        yield warn(
            "container", fact,
            "if memory-policy is denied: use --cap-add SYS_NICE, or a seccomp profile with mbind and set_mempolicy",
        )  # fmt: skip
    else:
        yield ok("container", fact)


def hugepages(facts: Facts, _: Matrix) -> Iterator[Row]:
    """Weights and KV cache are GiB of anonymous memory; with 4 KiB pages nearly every access misses the TLB."""
    match facts.kernel.hugepages:
        case None:
            yield ok("hugepages", "unknown")
        case "always":
            yield ok("hugepages", "transparent huge pages: always")
        case mode:
            yield warn(
                "hugepages", f"transparent huge pages: {mode}",
                "echo always > /sys/kernel/mm/transparent_hugepage/enabled (and transparent_hugepage=always at boot)",
            )  # fmt: skip


def numa_balancing(facts: Facts, _: Matrix) -> Iterator[Row]:
    """Bound memory cannot move, so the page faults are wasted (Documentation/admin-guide/sysctl/kernel.rst)."""
    if facts.kernel.numa_balancing:
        yield warn(
            "numa-balancing", "on: it unmaps pages to sample accesses, without benefit for the instances' bound memory",
            "sysctl kernel.numa_balancing=0 (and the same in /etc/sysctl.d)",
        )  # fmt: skip
    else:
        yield ok(
            "numa-balancing", "off" if facts.kernel.numa_balancing is False else "not supported by the kernel"
        )


def governor(facts: Facts, _: Matrix) -> Iterator[Row]:
    """Token generation sleeps and wakes constantly; a governor that follows the load reacts too late."""
    governors = facts.kernel.governors
    if governors is None:
        yield ok("governor", "frequency controlled by firmware or hypervisor")
    elif governors == {"performance"}:
        yield ok("governor", "performance")
    else:
        yield warn("governor", ", ".join(sorted(governors)), "cpupower frequency-set --governor performance")


HOST_RULES: Final = (
    cpu, vector_units, bfloat16, amx, numa, smt, allowed, cpu_quota, memory, memory_limit, numactl, container, hugepages,
    numa_balancing, governor,
)  # fmt: skip


# --- Rules on the engine's software, compilers, and numa-launcher itself. ---

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
        if software.cpu_build is False:
            yield fail(
                "vllm-build", f"vLLM {software.vllm} is no CPU build: it finds no device and does not start",
                "run scripts/quickstart, or pip install 'numa-launcher[vllm]' in an environment of its own",
            )  # fmt: skip
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


def models(facts: Facts, _: Matrix) -> Iterator[Row]:
    """What the engine itself says of each model of the configuration, before its first start."""
    for its in facts.models:
        for doubt in its.doubts:
            yield warn("model", doubt.message, doubt.remedy)
        if its.request_bytes is not None:
            yield ok(
                "model",
                f"{its.name}: the engine builds it: weights {format_size(its.weights_bytes or 0)}, one request of "
                f"{its.tokens} tokens {format_size(its.request_bytes)} of KV cache",
            )


def files(facts: Facts, _: Matrix) -> Iterator[Row]:
    """Certificate and keys, which the daemon reads again when they change."""
    for file in facts.files:
        check = "certificate" if file.what.startswith("TLS") else "keys"
        if file.state is FileCondition.IN_USE:
            yield ok(check, f"{file.what} '{file.path}': can be used")
        elif file.state is FileCondition.EXPIRING:
            yield warn(check, file.why, file.remedy)
        elif "permission denied" in file.why:  # the daemon may have another user than `doctor`
            yield warn(check, file.why, f"run doctor as the daemon's user; {file.remedy}")
        else:
            yield fail(check, file.why, file.remedy)


SOFTWARE_RULES: Final = (
    tcmalloc,
    openmp,
    engine,
    zentorch,
    compiler,
    jobs,
    launcher_build,
    layout,
    files,
    models,
)


# --- Compares the facts with what vLLM needs on a many-core machine: one rule per row. ---

Rule = Callable[[Facts, Matrix], Iterator[Row]]


def examine(facts: Facts, matrix: Matrix) -> Report:
    """All rows, in the order of RULES."""
    return Report(tuple(row for rule in RULES for row in rule(facts, matrix)))


RULES: Final[tuple[Rule, ...]] = (*HOST_RULES, *SOFTWARE_RULES)
