"""The layouts that a search compares on one machine. Plans come from the caller, which knows models and engine.

1. Default: as configured. Then one instance per socket, which spans nodes where a socket has several, and one instance
   over the whole machine; then the strategies by instances per socket; then other numbers of reserved cores.
2. A layout whose plan has violations is refused, with them as its cause.
3. Of layouts whose plans place the same cpus and memory only the first is measured.
4. At most `MOST` layouts; the others are left out, and said to be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal

from msgspec.structs import replace

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.base.text import counted
from launcher.config.schema import Config, Strategy
from launcher.machine.topology import Topology
from launcher.measure.tune.model import Candidate, Candidates, Layout, LeftOut, Stack

PlanOf = Callable[[Layout], dict[str, Any]]
"""The JSON of `plan --json` for the configuration with a layout; raises LauncherError where there is none."""

# Visits grow with the layouts: at 24 the search takes about 60 starts of an engine.
MOST: Final = 24
# AMD's published layouts give an instance 32 to 128 cores. Below 8 the fixed work of an engine step dominates.
_CORES_PER_INSTANCE: Final = 8
# Machines too small for that: down to a quarter of the socket.
_MOST_ON_SMALL_SOCKETS: Final = 4
# AMD's 32-core recipe leaves 16 of 144 cores free.
_CORES_PER_RESERVED: Final = 8
_CUT: Final = (Strategy.INTERLEAVED, Strategy.CONTIGUOUS, Strategy.L3_ALIGNED)
# Around the 2,048 tokens that vLLM's API server takes on CPUs (vllm/engine/arg_utils.py, 0.32).
_BATCHED_TOKENS: Final = (1024, 4096, 8192)
_WHOLE_MACHINE: Final = "one instance over the whole machine"


def find_candidates(
    topology: Topology,
    config: Config,
    plan_of: PlanOf,
    stacks: Sequence[Stack] = (),
    wanted: Callable[[Layout], bool] = lambda _: True,
) -> Candidates:
    """What to measure on `topology`. `stacks`: the first is the one that the configuration runs; empty: as configured.

    Raises LauncherError when the configured layout itself has no plan."""
    default = _planned(_default(config, stacks), topology, plan_of)
    if isinstance(default, LeftOut):
        raise LauncherError(
            f"cannot tune: the configured layout has no plan: {default.cause}",
            "correct the configuration until `numa-launcher plan` shows no violations",
        )
    entered, refused, left_out = (
        [replace(default, is_default=True)],
        _whole_machine(topology),
        [],
    )
    seen = {_placed(default)}
    for layout in filter(wanted, _layouts(topology, config, stacks)):
        found = _planned(layout, topology, plan_of)
        if isinstance(found, LeftOut):
            refused.append(found)
        elif _placed(found) not in seen:
            seen.add(_placed(found))
            if len(entered) < MOST:
                entered.append(found)
            else:
                left_out.append(
                    LeftOut(layout=layout, label=found.label, cause=f"not among the first {MOST} layouts")
                )
    seen = {_placed(each) for each in entered}
    for i, best in enumerate(tuple(entered)):
        # Another layout's refinements may be equal to these: they are measured only where that layout is the best.
        its_own = set(seen)
        for layout in _refinements(best.layout, topology, config, default.plan):
            each = _planned(layout, topology, plan_of)
            if isinstance(each, Candidate) and _placed(each) not in its_own:
                its_own.add(_placed(each))
                entered.append(replace(each, refines=i))
    return Candidates(entered=entered, refused=refused, left_out=left_out)


def _planned(layout: Layout, topology: Topology, plan_of: PlanOf) -> Candidate | LeftOut:
    try:
        plan = plan_of(layout)
    except LauncherError as error:
        return LeftOut(layout=layout, label=_label(layout, None, topology), cause=error.message)
    label = _label(layout, plan, topology)
    if plan["violations"]:
        return LeftOut(
            layout=layout, label=label, cause="; ".join(each["message"] for each in plan["violations"])
        )
    return Candidate(layout=layout, label=label, plan=plan)


def _default(config: Config, stacks: Sequence[Stack]) -> Layout:
    layout = config.layout
    return Layout(
        strategy=layout.strategy, instances_per_socket=layout.instances_per_socket, reserve_cores=layout.reserve_cores,
        span_nodes=layout.span_nodes, stack=stacks[0] if stacks else None,
    )  # fmt: skip


def _whole_machine(topology: Topology) -> list[LeftOut]:
    """Refused where there are several sockets; on one socket it is the layout of one instance per socket."""
    if len(topology.sockets) == 1:
        return []
    cause = (
        "the planner places an instance of one rank on one socket: vLLM's worker binds its memory to the node of its first "
        f"cpu, so the memory of the other {counted(len(topology.sockets) - 1, 'socket')} would not be used"
    )
    return [LeftOut(layout=None, label=_WHOLE_MACHINE, cause=cause)]


def _layouts(topology: Topology, config: Config, stacks: Sequence[Stack]) -> Iterator[Layout]:
    """In the order in which they are worth measuring; each with every stack before the next."""
    for layout in _layouts_of_one_stack(topology, config):
        for stack in stacks or (None,):
            yield replace(layout, stack=stack)


def _layouts_of_one_stack(topology: Topology, config: Config) -> Iterator[Layout]:
    its, counts = config.layout, _counts(topology, config)
    nodes = _nodes_per_socket(topology, config)

    def layout(strategy: Strategy, count: int | Literal["auto"], reserve: int | Literal["auto"]) -> Layout:
        spans = isinstance(count, int) and count < nodes
        return Layout(
            strategy=strategy, instances_per_socket=count, reserve_cores=reserve, span_nodes=its.span_nodes or spans
        )  # fmt: skip

    cut = sorted(_CUT, key=lambda strategy: strategy is not its.strategy)  # the configured one first
    yield layout(cut[0], its.instances_per_socket, its.reserve_cores)
    yield layout(cut[0], 1, its.reserve_cores)
    yield layout(Strategy.PER_NODE, "auto", its.reserve_cores)
    for count in counts:
        yield from (layout(strategy, count, its.reserve_cores) for strategy in cut)
    for count in counts:
        yield from (layout(cut[0], count, reserve) for reserve in _reserves(topology, config))


def _counts(topology: Topology, config: Config) -> list[int]:
    """Instances per socket: fewer than its nodes; then on each node powers of 2, or the divisors of its L3 caches."""
    cores, nodes = _cores_per_socket(topology, config), _nodes_per_socket(topology, config)
    least = min(_CORES_PER_INSTANCE, max(1, cores // _MOST_ON_SMALL_SOCKETS))
    domains = max(1, len(topology.l3_domains) // max(1, len(topology.sockets) * nodes))
    odd = domains & (domains - 1)  # with 12 L3 caches: 1, 2, 3, 4, 6, 12
    divisors = {n for n in range(1, domains + 1) if domains % n == 0}
    on_each_node = sorted({*divisors, 2}) if odd else [1 << k for k in range(cores.bit_length())]
    spanning = [n for n in range(1, nodes) if nodes % n == 0]
    return [*spanning, *(n * nodes for n in on_each_node if n == 1 or cores // (n * nodes) >= least)]


def _reserves(topology: Topology, config: Config) -> list[int | Literal["auto"]]:
    """Other numbers of reserved cores than the configured one."""
    some = _cores_per_socket(topology, config) * len(topology.sockets) // _CORES_PER_RESERVED
    choices: list[int | Literal["auto"]] = ["auto", 0, some]
    return [choice for choice in dict.fromkeys(choices) if choice != config.layout.reserve_cores]


def _usable(topology: Topology, config: Config) -> CpuSet:
    wanted = config.layout.cpus
    return topology.allowed if wanted is None else topology.allowed & CpuSet.parse(wanted)


def _cores_per_socket(topology: Topology, config: Config) -> int:
    """Of the socket that has the fewest."""
    usable = _usable(topology, config)
    cores = Counter(core.key.socket for core in topology.cores if core.cpus & usable)
    return min(cores.values(), default=1)


def _nodes_per_socket(topology: Topology, config: Config) -> int:
    usable = _usable(topology, config)
    parts = {(core.key.socket, core.node) for core in topology.cores if core.cpus & usable}
    return max(Counter(socket for socket, _ in parts).values(), default=1)


def _refinements(
    best: Layout, topology: Topology, config: Config, default: dict[str, Any]
) -> Iterator[Layout]:
    """Other reserves, where the race had them with another strategy only, and other limits of requests and tokens than
    those of the default's plan."""
    slot = default["slots"][0]
    seqs, tokens = slot["max_num_seqs"], slot["max_num_batched_tokens"]
    yield from (replace(best, reserve_cores=reserve) for reserve in _reserves(topology, config))
    yield from (replace(best, max_num_seqs=each) for each in (max(1, seqs // 2), seqs * 2, seqs * 4))
    yield from (replace(best, max_num_batched_tokens=each) for each in _BATCHED_TOKENS if each != tokens)
    yield replace(best, max_num_seqs=seqs * 2, max_num_batched_tokens=_BATCHED_TOKENS[-1])


def _placed(candidate: Candidate) -> tuple[object, ...]:
    """Equal for layouts that run the same instances on the same cpus and memory. Limits are those of the plan: memory may
    lower them."""
    keys = (
        "model",
        "cpus",
        "omp_cpus",
        "membind",
        "kv_cache_bytes",
        "max_num_seqs",
        "max_num_batched_tokens",
    )
    slots = tuple(tuple(slot[key] for key in keys) for slot in candidate.plan["slots"])
    return slots, candidate.layout.stack


def _label(layout: Layout, plan: dict[str, Any] | None, topology: Topology) -> str:
    count: int | str = layout.instances_per_socket
    if plan is not None and isinstance(count, str):
        sizes = Counter((slot["model"], slot["socket"]) for slot in plan["slots"])
        count = max(sizes.values(), default=0)
    text = f"{layout.strategy.value} x {count}"
    if len(topology.sockets) > 1:
        text += " per socket"
    return ", ".join((text, *_label_details(layout, plan, topology)))


def _label_details(layout: Layout, plan: dict[str, Any] | None, topology: Topology) -> Iterator[str]:
    if plan is None:
        yield f"reserve_cores {layout.reserve_cores}"
    elif plan["reserved"]:
        reserved = CpuSet.parse(plan["reserved"])
        cores = sum(bool(core.cpus & reserved) for core in topology.cores)
        yield f"{counted(cores, 'core')} reserved"
    if layout.max_num_seqs is not None:
        yield f"max_num_seqs {layout.max_num_seqs}"
    if layout.max_num_batched_tokens is not None:
        yield f"max_num_batched_tokens {layout.max_num_batched_tokens}"
    if layout.stack is not None:
        yield layout.stack


# --- A configuration with a candidate's layout. ---

_LIMITS: Final = ("max_num_seqs", "max_num_batched_tokens")


def limits_of(layout: Layout) -> dict[str, int]:
    """The keys of [[models]] that a layout sets."""
    return {key: value for key in _LIMITS if (value := getattr(layout, key)) is not None}


Overriding = Callable[[Sequence[str], Iterable[str]], tuple[int, ...]]
"""Indices of the words of engine.args that override keys of [[models]]."""


def with_layout(config: Config, layout: Layout, overriding: Overriding) -> Config:
    """`config`: that of `layout.stack`."""
    limits, args = limits_of(layout), config.engine.args
    dropped = overriding(args, limits)
    args = tuple(word for index, word in enumerate(args) if index not in dropped)
    return replace(
        config,
        engine=replace(config.engine, args=args),
        models=tuple(replace(model, **limits) for model in config.models),
        layout=replace(
            config.layout, strategy=layout.strategy, instances_per_socket=layout.instances_per_socket,
            reserve_cores=layout.reserve_cores, span_nodes=layout.span_nodes,
        ),
    )  # fmt: skip
