"""Rules on processor, memory, NUMA, kernel settings, and numa-launcher itself. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from launcher.base.build import REMEDY
from launcher.base.text import counted, format_size
from launcher.base.watched_file import FileCondition
from launcher.doctor.facts import Facts
from launcher.doctor.rows import Report
from launcher.engines.checks import Check, Row, Tier, fail, ok, warn
from launcher.engines.numactl import MemPolicy

# A larger difference between nodes means unevenly populated channels; the slowest node then limits equal instances.
UNEVEN_MEMORY: Final = 0.10


def cpu(facts: Facts) -> Iterator[Row]:
    host = facts.host
    zen = f", {host.zen}" if host.zen else ""
    cores = len(facts.topology.cores)
    yield ok("cpu", f"{host.brand or host.vendor or 'unknown'}{zen}, {cores} cores, {host.logical_cpus} cpus")


def numa(facts: Facts) -> Iterator[Row]:
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


def smt(facts: Facts) -> Iterator[Row]:
    """Two cpus of a core share its vector units; the planner uses one cpu of each core."""
    if any(len(core.cpus) > 1 for core in facts.topology.cores):
        yield ok("smt", "on: one cpu of each core is used, unless layout.use_smt is true")
    else:
        yield ok("smt", "off or not supported")


def allowed(facts: Facts) -> Iterator[Row]:
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


def memory(facts: Facts) -> Iterator[Row]:
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


def memory_limit(facts: Facts) -> Iterator[Row]:
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


def cpu_quota(facts: Facts) -> Iterator[Row]:
    """The cgroup's limit on cpu time, which neither cpuset nor affinity shows."""
    quota, cpus = facts.topology.cpu_quota, len(facts.topology.allowed)
    if quota is None or quota >= cpus:
        yield ok("cpu-quota", "no cgroup limit on the time of the allowed cpus")
    else:
        yield warn(
            "cpu-quota", f"the cgroup allows the time of {float(quota):g} of {counted(cpus, 'cpu')}",
            "the plan respects it; raise it (CPUQuota=, docker --cpus, limits.cpu of a pod) to use the rest",
        )  # fmt: skip


def numactl(facts: Facts) -> Iterator[Row]:
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


def container(facts: Facts) -> Iterator[Row]:
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


def hugepages(facts: Facts) -> Iterator[Row]:
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


def numa_balancing(facts: Facts) -> Iterator[Row]:
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


def governor(facts: Facts) -> Iterator[Row]:
    """Token generation sleeps and wakes constantly; a governor that follows the load reacts too late."""
    governors = facts.kernel.governors
    if governors is None:
        yield ok("governor", "frequency controlled by firmware or hypervisor")
    elif governors == {"performance"}:
        yield ok("governor", "performance")
    else:
        yield warn("governor", ", ".join(sorted(governors)), "cpupower frequency-set --governor performance")


HOST_RULES: Final = (
    cpu, numa, smt, allowed, cpu_quota, memory, memory_limit, numactl, container, hugepages,
    numa_balancing, governor,
)  # fmt: skip


# --- Rules on numa-launcher itself, its files and models. ---


def launcher_build(facts: Facts) -> Iterator[Row]:
    match facts.build:
        case "stale":
            yield warn("build", "compiled libraries do not match the sources: the Python sources run", REMEDY)
        case "compiled":
            yield ok("build", "numa-launcher runs compiled libraries")
        case "python":
            yield ok("build", "numa-launcher runs Python sources")


def layout(facts: Facts) -> Iterator[Row]:
    if facts.measured is None:
        yield ok("layout", "none was measured on this machine", "numa-launcher tune finds the fastest one")
    else:
        yield ok("layout", f"measured on {facts.measured}")


def models(facts: Facts) -> Iterator[Row]:
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


def files(facts: Facts) -> Iterator[Row]:
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


OWN_RULES: Final = (launcher_build, layout, files, models)


# --- All rules, in the order of their rows. ---

Rule = Callable[[Facts], Iterator[Row]]


def examine(facts: Facts, checks: Sequence[Check]) -> Report:
    """Rows about the host, the engine's software, and numa-launcher itself. `checks`: the engine's."""
    engine = (row for check in checks for row in check(facts.software, facts.host, facts.topology))
    return Report((*_rows(HOST_RULES, facts), *engine, *_rows(OWN_RULES, facts)))


def _rows(rules: Sequence[Rule], facts: Facts) -> Iterator[Row]:
    return (row for rule in rules for row in rule(facts))
