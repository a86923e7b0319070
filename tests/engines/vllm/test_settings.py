"""What engine.args and engine.env make of [[models]], down to the ledger."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.examples import examples
from support.plans import make_plan
from support.synthetic import EPYC, Machine

from launcher.base.errors import LauncherError
from launcher.base.text import GIB
from launcher.config.schema import Config, Engine, EngineKind, Layout, Memory, Model
from launcher.engines.make import engine_type
from launcher.engines.vllm.demand import KV_STEP_BYTES, MAX_PAGE_CACHE_BYTES, pool_for
from launcher.engines.vllm.settings import effective_config
from launcher.machine.topology import CpuInfo
from launcher.models.layers import KvLayers, LayerKind
from launcher.models.profile import ModelProfile
from launcher.plan.plan import Facts, LedgerRow, Plan

PROFILE = ModelProfile(
    weights_bytes=2 * GIB, kv_bytes_per_token=32 * 1024, max_model_len=4096, num_attention_heads=32,
    num_kv_heads=8, layers=(KvLayers(LayerKind.FULL, 8, heads=8, head_bytes=512),), kv_source="config.json: 8 layers",
    hidden_size=1024, intermediate_size=4096, vocab_size=32_000, file_bytes=GIB, head_bytes=64 * 2**20,
    weights_source="headers",
)  # fmt: skip
LATENT = replace(PROFILE, mla=True, num_kv_heads=1, layers=(KvLayers(LayerKind.FULL, 8, head_bytes=1152),))
AMX = CpuInfo("GenuineIntel", "Xeon 6", 6, frozenset({"avx512f", "amx_tile"}))


def serving(
    args: tuple[str, ...] = (), env: dict[str, str] | None = None, profile: ModelProfile = PROFILE,
    cpu: CpuInfo = EPYC, kv_cache: str = "auto", **model: Any,
) -> Any:  # fmt: skip
    entry = Model(name="m", path="/m", **model)
    config = Config(
        models=(entry,), engine=Engine(args=args, env=env or {}), memory=Memory(kv_cache=kv_cache)
    )
    return effective_config(entry, config, profile, cpu)


def plan_for(
    machine: Machine, profile: ModelProfile = PROFILE, memory: Memory | None = None, *, count: int = 2,
    args: tuple[str, ...] = (), facts: Facts | None = None, **model: Any,
) -> Plan:  # fmt: skip
    config = Config(
        models=(Model(name="m", path="/m", **model),),
        layout=Layout(instances_per_socket=count, reserve_cores=0),
        memory=memory or Memory(),
        engine=Engine(args=args),
    )
    return make_plan(machine.topology(), config, {"m": profile}, facts or Facts())


def test_defaults() -> None:
    its = serving()
    assert (its.max_model_len, its.max_num_seqs, its.step_tokens, its.block_size) == (4096, 64, 2048, 128)
    assert (its.kv_element_bytes, its.eager, its.hybrid, its.kv_bytes) == (2, False, True, None)
    assert serving(profile=replace(PROFILE, max_model_len=None)).planned_len == 2048
    assert serving(tensor_parallel_size=4).step_tokens == 4 * 2048
    assert serving(max_num_seqs=1, max_model_len=512).step_tokens == 512


def test_arguments_win() -> None:
    args = ("--max-model-len", "1k", "--max-num-seqs=8", "--block-size", "64", "--max-num-batched-tokens", "4K",
            "--enforce-eager", "--disable-hybrid-kv-cache-manager", "--kv-cache-dtype", "fp8")  # fmt: skip
    its = serving(args, max_model_len=4096, max_num_seqs=2, block_size=32, max_num_batched_tokens=16)
    assert (its.max_model_len, its.max_num_seqs, its.step_tokens, its.block_size) == (1000, 8, 4096, 64)
    assert (its.kv_element_bytes, its.eager, its.hybrid) == (1, True, False)
    assert serving(("--max-model-len", "-1")).max_model_len == 4096
    with pytest.raises(LauncherError, match="cannot use --max-model-len 'long'"):
        serving(("--max-model-len", "long"))


@pytest.mark.parametrize(
    ("case", "size", "source"),
    [
        ({}, None, "memory.kv_cache = auto"),
        ({"kv_cache": "3GiB"}, 3 * GIB, "memory.kv_cache"),
        ({"args": ("--kv-cache-memory-bytes", "2G"), "kv_cache": "3GiB"}, 2 * GIB,
         "engine.args --kv-cache-memory-bytes"),
        ({"env": {"VLLM_CPU_KVCACHE_SPACE": "5"}, "args": ("--kv-cache-memory-bytes", "2G")}, 5 * GIB,
         "engine.env VLLM_CPU_KVCACHE_SPACE"),
        ({"env": {"VLLM_CPU_KVCACHE_SPACE": "0.5"}}, None, "memory.kv_cache = auto"),
    ],
)  # fmt: skip
def test_who_sizes_the_kv_cache(case: dict[str, Any], size: int | None, source: str) -> None:
    its = serving(**case)
    assert (its.kv_bytes, its.kv_source) == (size, source)


FLAGS = ("--max-model-len", "--max_num_seqs", "--max-num-batched-tokens", "--block-size", "-tp", "--dtype",
         "--kv-cache-memory-bytes", "--kv-cache-dtype", "--quantization", "--performance-mode", "--config",
         "--max-num-active-seqs", "--max-num-queued-reqs")  # fmt: skip
VALUES = (
    "8",
    "0",
    "-1",
    "4k",
    "1.5K",
    "",
    "None",
    "auto",
    "\u0661",
    "9" * 5000,
    "9" * 400 + ".5k",
    "1e9",
    "{}",
)


@settings(max_examples=examples(300))
@given(
    st.lists(st.tuples(st.sampled_from(FLAGS), st.sampled_from(VALUES), st.booleans()), max_size=3),
    st.sampled_from(VALUES),
)
def test_whatever_engine_args_say_is_a_configuration_or_an_error(
    given_args: list[tuple[str, str, bool]], space: str
) -> None:
    words = [(f"{flag}={value}",) if joined else (flag, value) for flag, value, joined in given_args]
    try:
        its = serving(tuple(word for pair in words for word in pair), {"VLLM_CPU_KVCACHE_SPACE": space})
    except LauncherError as error:
        assert error.message.startswith("cannot ")  # noqa: PT017  one of two good ends
    else:
        assert min(its.max_num_seqs, its.step_tokens, its.block_size, its.tensor_parallel_size) > 0


@pytest.mark.parametrize("flag", ["--max-num-active-seqs", "--max_num_queued_reqs"])
@pytest.mark.parametrize("joined", [True, False])
def test_a_second_limit_of_running_requests_is_refused(flag: str, *, joined: bool) -> None:
    """The proxy binds up to one limit; below it the engine would queue, or answer 503."""
    with pytest.raises(LauncherError, match=f"cannot set '{flag}") as caught:
        serving((f"{flag}=4",) if joined else (flag, "4"))
    assert "max_num_seqs" in caught.value.remedy


@pytest.mark.parametrize("joined", [True, False])
def test_a_second_size_of_the_kv_cache_is_refused(*, joined: bool) -> None:
    """The engine would allocate so many blocks, whatever bytes were planned for them."""
    flag = "--num-gpu-blocks-override"
    with pytest.raises(LauncherError, match=f"cannot set '{flag}") as caught:
        serving((f"{flag}=9000",) if joined else (flag, "9000"))
    assert "memory.kv_cache" in caught.value.remedy


def test_throughput_mode_doubles_the_default_step() -> None:
    mode = ("--performance-mode", "throughput")
    assert serving(mode).step_tokens == 4096
    assert serving((*mode, "--max-num-batched-tokens", "1024")).step_tokens == 1024
    assert serving(mode, max_num_seqs=1, max_model_len=512).step_tokens == 512
    assert serving(("--performance-mode", "balanced")).step_tokens == 2048


def test_latent_attention_without_amx_runs_prompts_in_one_step() -> None:
    its = serving(profile=LATENT, block_size=64)
    assert (its.block_size, its.step_tokens) == (16, 4096)
    assert serving(profile=LATENT, cpu=AMX).block_size == 128


def test_an_fp8_cache_takes_half() -> None:
    plain, half = serving(), serving(("--kv-cache-dtype", "fp8_e5m2"))
    assert pool_for(PROFILE, half, 1).block_bytes * 2 == pool_for(PROFILE, plain, 1).block_bytes
    asked = serving(profile=replace(PROFILE, kv_cache_dtype="fp8"))
    assert asked.kv_element_bytes == 1


def test_every_figure_has_a_source_and_they_add_up() -> None:
    (row,) = plan_for(Machine(cores=8, node_bytes=64 * GIB)).ledger
    assert [(line.what, line.slot) for line in row.lines] == [
        ("reserve", None), ("page cache", None),
        *((what, slot) for slot in (0, 1) for what in ("weights", "peak", "overhead", "KV")),
    ]  # fmt: skip
    assert all(line.source for line in row.lines)
    assert sum(line.size_bytes for line in row.lines) == row.total_bytes - row.left_bytes
    sources = {line.what: line.source for line in row.lines}
    assert sources["weights"] == "headers"
    assert sources["reserve"] == "5 %, at most 8 GiB"
    assert "a quarter of the weights, measured, the output projection packed (64 MiB)" in sources["peak"]
    assert "2048 tokens a step" in sources["overhead"]
    assert "64 requests of 4096 tokens" in sources["KV"]
    assert row.page_cache_bytes == GIB


def test_activations_follow_the_step() -> None:
    machine = Machine(cores=8, node_bytes=64 * GIB)
    small, large = (
        plan_for(machine, count=1, max_num_batched_tokens=tokens).ledger[0].overhead_bytes
        for tokens in (1024, 9216)
    )
    assert large - small == 8192 * (2 * 4096 + 6 * 1024) * 2


def test_torch_files_are_read_whole() -> None:
    machine = Machine(cores=8, node_bytes=64 * GIB)
    mapped = plan_for(machine, args=("--enforce-eager",)).ledger[0]
    whole = plan_for(machine, replace(PROFILE, unmapped_bytes=GIB), args=("--enforce-eager",)).ledger[0]
    assert whole.peak_bytes - mapped.peak_bytes == 2 * GIB
    source = next(line.source for line in whole.lines if line.what == "peak")
    assert source.startswith("packing: a quarter")
    assert source.endswith("one *.bin file (1 GiB)")


def test_the_page_cache_is_shared_and_bounded() -> None:
    row = plan_for(Machine(cores=8, node_bytes=64 * GIB), replace(PROFILE, file_bytes=40 * GIB)).ledger[0]
    assert row.page_cache_bytes == MAX_PAGE_CACHE_BYTES


def test_ranks_hold_norms_whole() -> None:
    machine = Machine(cores=8, node_bytes=64 * GIB)
    profile = replace(PROFILE, replicated_bytes=GIB)
    row = plan_for(machine, profile, count=1, tensor_parallel_size=2).ledger[0]
    assert row.weights_bytes == 3 * GIB
    assert "over 2 ranks" in next(line.source for line in row.lines if line.what == "weights")


def test_whole_gib_where_the_engine_takes_no_other() -> None:
    facts = Facts(engine={"vllm": "0.17.1"})
    machine = Machine(cores=8, node_bytes=64 * GIB)
    auto = plan_for(machine, facts=facts, max_num_seqs=20).slots[0].kv_cache_bytes
    assert auto == 3 * GIB, "20 requests of 128 MiB, and the null block"
    assert plan_for(machine, facts=facts, memory=Memory(kv_cache="1.5GiB")).slots[0].kv_cache_bytes == GIB
    assert plan_for(machine, facts=facts, memory=Memory(kv_cache="512MiB")).slots[0].kv_cache_bytes == GIB


def test_an_encoder_gets_the_smallest_cache() -> None:
    profile = ModelProfile(weights_bytes=GIB, kv_bytes_per_token=0, max_model_len=512)
    plan = plan_for(Machine(cores=8, node_bytes=64 * GIB), profile)
    assert [slot.kv_cache_bytes for slot in plan.slots] == [KV_STEP_BYTES] * 2


def test_one_model_of_two_small_caches_is_told_once() -> None:
    plan = plan_for(Machine(cores=8, node_bytes=64 * GIB), memory=Memory(kv_cache="64MiB"))
    assert [finding.code for finding in plan.violations] == ["kv-too-small"]


@pytest.mark.parametrize(
    ("machine", "count", "ranks", "waves"),
    [
        (Machine(cores=8), 2, 1, ((0,), (1,))),
        (Machine(sockets=2, cores=8), 2, 1, ((0, 2), (1, 3))),
        (Machine(sockets=2, nodes=2, cores=8), 4, 1, ((0, 2, 4, 6), (1, 3, 5, 7))),
        (Machine(sockets=2, cores=8), 1, 1, ((0, 1),)),
        (Machine(nodes=2, cores=8), 1, 2, ((0,),)),
        (Machine(sockets=2, nodes=2, cores=8, memoryless=frozenset({1})), 2, 1, ((0, 2, 3), (1,))),
    ],
)
def test_starts_are_ordered_by_node(
    machine: Machine, count: int, ranks: int, waves: tuple[tuple[int, ...], ...]
) -> None:
    config = Config(
        models=(Model(name="m", path="/m", tensor_parallel_size=ranks),),
        layout=Layout(instances_per_socket=count, reserve_cores=0, span_nodes=True),
    )
    topology = machine.topology()
    roomy = make_plan(topology, config, {"m": PROFILE})
    everyone = tuple(slot.id for slot in roomy.slots)
    assert roomy.start_order == (everyone,)
    full = tuple(
        replace(
            node, available_bytes=sum(row.planned_bytes for row in roomy.ledger if row.node == node.id) - 1
        )
        for node in topology.numa_nodes
    )
    assert make_plan(replace(topology, numa_nodes=full), config, {"m": PROFILE}).start_order == waves


def test_a_plan_without_slots_starts_nothing() -> None:
    assert plan_for(Machine(cores=1)).start_order == ()


@st.composite
def profiles(draw: st.DrawFn) -> ModelProfile:
    weights = draw(st.integers(0, 80 * GIB))
    heads, size, count = draw(st.integers(1, 64)), draw(st.integers(1, 1024)), draw(st.integers(1, 80))
    return ModelProfile(
        weights_bytes=weights,
        kv_bytes_per_token=heads * size * count,
        max_model_len=draw(st.none() | st.integers(1, 200_000)),
        num_attention_heads=heads,
        num_kv_heads=heads,
        layers=(KvLayers(LayerKind.FULL, count, heads, size),),
        hidden_size=draw(st.none() | st.integers(1, 20_000)),
        intermediate_size=draw(st.none() | st.integers(1, 60_000)),
        vocab_size=draw(st.none() | st.integers(1, 300_000)),
        replicated_bytes=draw(st.integers(0, weights)),
        head_bytes=draw(st.integers(0, 2 * GIB)),
        file_bytes=draw(st.integers(0, 10 * GIB)),
        unmapped_bytes=draw(st.integers(0, 10 * GIB)),
    )


def rows_hold(rows: tuple[LedgerRow, ...]) -> None:
    for row in rows:
        parts = (row.reserve_bytes, row.weights_bytes, row.peak_bytes, row.overhead_bytes, row.kv_bytes,
                 row.page_cache_bytes)  # fmt: skip
        assert min(parts) >= 0
        assert sum(parts) + row.left_bytes == row.total_bytes
        assert sum(line.size_bytes for line in row.lines) == sum(parts)


@settings(max_examples=examples(150), deadline=None)
@given(profiles(), st.integers(1, 512), st.integers(1, 4), st.integers(1, 2), st.booleans())
def test_any_ledger(profile: ModelProfile, gib: int, count: int, sockets: int, whole: bool) -> None:
    machine = Machine(sockets=sockets, cores=8, node_bytes=gib * GIB)
    facts = Facts(engine={"vllm": "0.17.1" if whole else "0.18.0"})
    plan = plan_for(machine, profile, count=count, facts=facts)
    rows_hold(plan.ledger)
    if not any(finding.code == "out-of-memory" for finding in plan.violations):
        assert all(row.left_bytes >= 0 for row in plan.ledger)
    for slot in plan.slots:
        assert slot.kv_cache_bytes is not None
        assert slot.kv_cache_bytes >= 0
        assert not whole or slot.kv_cache_bytes % GIB == 0
    explicit = plan_for(machine, profile, Memory(kv_cache=f"{gib}GiB"), count=count, facts=facts)
    rows_hold(explicit.ledger)
    assert {slot.kv_cache_bytes for slot in explicit.slots} == {gib * GIB}
    assert sorted(slot for wave in plan.start_order for slot in wave) == [slot.id for slot in plan.slots]


@settings(max_examples=examples(100), deadline=None)
@given(profiles(), st.integers(1, 512), st.integers(1, 300))
def test_more_requests_never_get_less(profile: ModelProfile, gib: int, seqs: int) -> None:
    machine, memory = Machine(cores=8, node_bytes=gib * GIB), Memory(instance_overhead="2GiB")
    fewer, more = (
        plan_for(machine, profile, memory, max_num_seqs=n).slots[0].kv_cache_bytes for n in (seqs, seqs + 1)
    )
    assert fewer is not None
    assert more is not None
    assert fewer <= more


@pytest.mark.parametrize(
    ("args", "given", "kind", "known", "context"),
    [
        ((), None, EngineKind.VLLM, 4096, 4096),
        ((), 1000, EngineKind.VLLM, 4096, 1000),
        (("--max-model-len", "2k"), 1000, EngineKind.VLLM, 4096, 2000),
        (("--max-model-len=auto",), 1000, EngineKind.VLLM, 4096, 4096),
        (("--max-model-len", "2k"), 1000, EngineKind.COMMAND, None, 1000),  # the arguments of another engine
        ((), None, EngineKind.VLLM, None, 2048),
        ((), None, EngineKind.COMMAND, None, None),
    ],
)
def test_the_context(
    args: tuple[str, ...], given: int | None, kind: EngineKind, known: int | None, context: int | None
) -> None:
    model = Model(name="m", path="/m", max_model_len=given)
    config = Config(models=(model,), engine=Engine(kind, args=args))
    profile = replace(PROFILE, max_model_len=known)
    assert engine_type(kind).planning.settings(model, config, profile, None).max_model_len == context


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--max-num-seqs", "8"), {"max_num_seqs": 8}),
        (("--max-num-seqs=8",), {"max_num_seqs": 8}),
        (("--max_num_seqs", "8"), {"max_num_seqs": 8}),
        (("--max_num-seqs=8",), {"max_num_seqs": 8}),
        (("--max-num-seqs", "4", "--seed", "1", "--max_num_seqs=8"), {"max_num_seqs": 8}),
        (("-tp", "2"), {"tensor_parallel_size": 2}),
        (("-tp=2",), {"tensor_parallel_size": 2}),
        (("--tensor_parallel_size=2",), {"tensor_parallel_size": 2}),
        (("--dtype", "half"), {"dtype": "float16"}),
        (("--dtype=float",), {"dtype": "float32"}),
        (("-q", "awq"), {"quantization": "awq"}),
        (("--quantization=None",), {"quantization": None}),
        (("--max-num-batched-tokens", "4K"), {"max_num_batched_tokens": 4096, "step_tokens": 4096}),
        (("--block_size=64",), {"block_size": 64}),
        (("--kv-cache-memory-bytes=1.5g",), {"kv_bytes": 1_500_000_000}),
    ],
)
def test_every_spelling_of_an_argument(args: tuple[str, ...], expected: dict[str, Any]) -> None:
    plan = plan_for(Machine(cores=8, node_bytes=64 * GIB), args=args, quantization="gptq", dtype="float32")
    for its in (*plan.models, *(slot.effective for slot in plan.slots)):
        assert {key: getattr(its, key) for key in expected} == expected
    assert {len(slot.placement.omp_cpus) for slot in plan.slots} == {expected.get("tensor_parallel_size", 1)}
    other = Config(models=(Model(name="m", path="/m"),), engine=Engine(EngineKind.COMMAND, args=args))
    its = engine_type(other.engine.kind).planning.settings(other.models[0], other, PROFILE, None)
    assert its.max_num_seqs == 64, "the arguments of another engine"


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--max-num-seqs", "0"), "it is less than 1"),
        (("--max-num-seqs", "4k"), "it is not a number"),
        (("--max-num-seqs",), "it has no value"),
        (("--max-num-seqs", "--seed", "1"), "it has no value"),
        (("--max-model-len", "1.5K"), "it is not a number"),
        (("--dtype", "int8"), "vLLM takes auto, bfloat16"),
        (("--max-num-seq", "8"), "it is short for --max-num-seqs"),
        (("--tensor_par=2",), "it is short for --tensor-parallel-size"),
        (("-t", "2"), "it is short for --tensor-parallel-size"),
        (("-qawq",), "it is short for --quantization"),
        (("--served-model", "x"), "it is short for --served-model-name"),
        (("--config", "vllm.yaml"), "the launcher sets it"),
        (("--seed", "1", "--", "--max-num-seqs", "8"), "it is short for"),
    ],
)
def test_arguments_that_cannot_be_planned_with(args: tuple[str, ...], why: str) -> None:
    with pytest.raises(LauncherError, match=f"cannot .* in engine.args: {re.escape(why)}") as caught:
        plan_for(Machine(cores=8, node_bytes=64 * GIB), args=args)
    assert caught.value.remedy
