"""Settings, memory and rules of `kind = "llama.cpp"`."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from support.plans import make_plan
from support.synthetic import Machine

from launcher.base.errors import LauncherError
from launcher.base.text import GIB, MIB
from launcher.config.schema import Config, Engine, EngineKind, Layout, Memory, Model
from launcher.engines.llama_cpp.planning import PLANNING, cache_ram_bytes, effective_config
from launcher.models.layers import KvLayers, LayerKind
from launcher.models.profile import AddedFiles, ModelProfile
from launcher.plan.plan import EffectiveConfig, Plan

# An 8B in Q4_K_M: 32 layers x 8 KV heads x 128, K and V in 16 bits.
PROFILE = ModelProfile(
    weights_bytes=5 * GIB, kv_bytes_per_token=131_072, max_model_len=131_072, num_attention_heads=32,
    hidden_size=4096, intermediate_size=14_336, vocab_size=128_256, file_bytes=5 * GIB, weights_source="headers of m.gguf",
)  # fmt: skip


def config(
    *args: str, memory: Memory | None = None, env: dict[str, str] | None = None, **model: Any
) -> Config:
    engine = Engine(kind=EngineKind.LLAMA_CPP, args=args, env=env or {})
    return Config(
        models=(Model(**{"name": "m", "path": "/m.gguf"} | model),), engine=engine, memory=memory or Memory()
    )


def settings(its: Config) -> EffectiveConfig:
    return effective_config(its.models[0], its, PROFILE)


def plan(its: Config, node_gib: int = 64) -> Plan:
    return make_plan(Machine(cores=16, node_bytes=node_gib * GIB).topology(), its, {"m": PROFILE})


def codes(its: Plan) -> list[str]:
    return [finding.code for finding in its.findings]


def test_a_path_alone_is_planned() -> None:
    """64 requests of 131,072 tokens need 1 TiB: the node holds two."""
    its = plan(config())
    (slot,) = its.slots
    assert not its.violations
    assert (slot.effective.max_num_seqs, slot.kv_cache_bytes) == (2, 2 * 16 * GIB)
    assert codes(its) == ["fewer-requests"]
    assert "computes 2 requests at once, not max_num_seqs = 64" in its.warnings[0].message


def test_shorter_requests_are_all_there() -> None:
    its = plan(config(max_model_len=4096))
    assert its.slots[0].effective.max_num_seqs == 64
    assert its.slots[0].kv_cache_bytes == 64 * 512 * MIB
    assert its.findings == ()


def test_a_request_that_does_not_fit_is_refused_with_its_size() -> None:
    its = plan(config(), node_gib=24)
    (found,) = its.violations
    assert found.code == "out-of-memory"
    assert "one request of full length needs 16 GiB" in found.remedy


def test_weights_larger_than_a_node_are_refused_without_ranks_that_it_has_not() -> None:
    topology = Machine(nodes=4, cores=4, node_bytes=6 * GIB).topology()
    (found, *_) = make_plan(topology, config(max_model_len=4096), {"m": PROFILE}).violations
    assert found.code == "out-of-memory"
    assert "tensor_parallel_size" not in found.remedy


@pytest.mark.parametrize(
    ("kv_cache", "requests", "size"),
    [("5GiB", 10, 5 * GIB), ("5300MiB", 10, 5 * GIB), ("60GiB", 64, 32 * GIB)],
)
def test_a_given_kv_cache_holds_whole_requests(kv_cache: str, requests: int, size: int) -> None:
    (slot,) = plan(config(memory=Memory(kv_cache=kv_cache), max_model_len=4096)).slots
    assert (slot.effective.max_num_seqs, slot.kv_cache_bytes) == (requests, size)


def test_a_kv_cache_below_one_request_is_a_violation() -> None:
    its = plan(config(memory=Memory(kv_cache="256MiB"), max_model_len=4096))
    assert "kv-too-small" in codes(its)


def test_the_ledger_has_every_figure_with_its_source() -> None:
    (row,) = plan(config(max_model_len=4096, max_num_seqs=8)).ledger
    lines = {line.what: line for line in row.lines}
    assert lines["weights"].size_bytes == 5 * GIB
    assert lines["KV"].size_bytes == 8 * 512 * MIB
    assert "512 MiB prompt cache (--cache-ram)" in lines["overhead"].source
    # Process and candidates of 8 requests, prompt cache, then ubatch x (3 wide + 5 narrow) x 4, mask, and logits.
    compute = 512 * (3 * 14_336 + 5 * 4096) * 4 + 512 * 4096 * 2 + 8 * 128_256 * 8
    assert lines["overhead"].size_bytes == 40 * MIB + 8 * 128_256 * 12 + 512 * MIB + compute


@pytest.mark.parametrize(
    ("types", "share"),
    [(("f16", "f16"), 64), (("q8_0", "q8_0"), 34), (("f32", "f16"), 96), (("q8_0", "q4_0"), 26)],
)
def test_types_of_the_kv_cache_scale_it(types: tuple[str, str], share: int) -> None:
    its = config("-ctk", types[0], "--cache-type-v", types[1], max_model_len=4096, max_num_seqs=1)
    assert plan(its).slots[0].kv_cache_bytes == 512 * MIB * share // 64


@pytest.mark.parametrize(("types", "share"), [(("q8_0", "f16"), 34), (("f16", "q4_0"), 64)])
def test_a_latent_is_in_the_type_of_k(types: tuple[str, str], share: int) -> None:
    """It has no V."""
    profile = replace(PROFILE, mla=True, num_kv_heads=1)
    its = of(profile, "-ctk", types[0], "-ctv", types[1], max_model_len=4096, max_num_seqs=1)
    assert its.slots[0].kv_cache_bytes == 512 * MIB * share // 64


def test_a_context_is_a_multiple_of_256() -> None:
    its = plan(config(max_model_len=1000, max_num_seqs=1))
    assert its.slots[0].kv_cache_bytes == 1024 * 131_072


def test_the_prompt_cache_holds_one_request_at_most_eight_gib() -> None:
    assert [cache_ram_bytes(size) for size in (0, 1, MIB, 100 * GIB)] == [0, MIB, MIB, 8 * GIB]
    (row,) = plan(config("--cache-ram", "2048", max_model_len=4096, max_num_seqs=8)).ledger
    assert any("2 GiB prompt cache" in line.source for line in row.lines)


def test_settings_of_arguments_and_variables() -> None:
    assert settings(config("-b", "1024")).max_num_batched_tokens == 1024
    assert settings(config(env={"LLAMA_ARG_BATCH": "512"})).step_tokens == 512
    assert settings(config(max_num_batched_tokens=256)).step_tokens == 256
    assert settings(config(max_num_seqs=1000)).max_num_seqs == 256
    assert (settings(config()).step_tokens, settings(config()).planned_len) == (2048, 131_072)


@pytest.mark.parametrize(
    ("its", "why"),
    [
        (config(tensor_parallel_size=2), "tensor_parallel_size = 2 of model 'm'"),
        (config(name="a,b"), "the name 'a,b' of a model"),
        (config(quantization="awq"), "quantization = 'awq'"),
        (config("--cache-ram", "-1"), "--cache-ram in engine.args: '-1' is no whole number"),
        (config("--cache-ram"), "--cache-ram in engine.args: it has no value"),
        (config("-ctk", "q3_0"), "--cache-type-k 'q3_0'"),
        (config(env={"LLAMA_ARG_BATCH": "many"}), "LLAMA_ARG_BATCH in engine.env: 'many'"),
    ],
)
def test_settings_that_cannot_be_followed(its: Config, why: str) -> None:
    with pytest.raises(LauncherError, match=f"cannot use {why}") as refused:
        plan(its)
    assert refused.value.remedy


def test_rules() -> None:
    short = {"max_model_len": 2048, "max_num_seqs": 4}
    assert codes(plan(config("--numa", "distribute", **short))) == ["numa-argument"]
    assert codes(plan(config("-lm", "mmap", **short))) == ["mapped-weights"]
    assert codes(plan(config(dtype="float32", block_size=64, **short))) == ["no-effect"]
    assert codes(plan(config(env={"LLAMA_ARG_NUMA": "isolate"}, **short))) == ["numa-argument"]


def test_the_needs_of_a_model() -> None:
    assert PLANNING.needs is not None
    needs = PLANNING.needs(settings(config(max_model_len=4096)), PROFILE)
    assert (needs.kv_bytes_per_token, needs.request_bytes) == (131_072, 512 * MIB)


def test_needs_and_plan_count_a_quantized_cache_alike() -> None:
    its = config("-ctk", "q8_0", "-ctv", "q8_0", max_model_len=4096, max_num_seqs=1)
    assert PLANNING.needs is not None
    needs = PLANNING.needs(settings(its), PROFILE)
    assert needs.request_bytes == plan(its).slots[0].kv_cache_bytes == 512 * MIB * 34 // 64


def of(profile: ModelProfile, *args: str, **model: Any) -> Plan:
    return make_plan(
        Machine(cores=16, node_bytes=64 * GIB).topology(), config(*args, **model), {"m": profile}
    )


# Compute buffers that build 11549 reports at its start, in MiB, with 512 tokens in one ubatch and one request.
@pytest.mark.parametrize(
    ("reported", "context", "shape"),
    [
        (34.52, 8192, {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}),
        (51.52, 32_768, {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12}),
        (36.02, 2048, {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}),
        # Queries are wider than the hidden size.
        (13.52, 512, {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 16, "head": 128}),
        # Mixtures: all experts of a token at once; results wider than products; as wide.
        (
            26.02,
            4096,
            {"hidden_size": 1024, "expert_size": 1024, "experts_used": 2, "num_attention_heads": 16},
        ),
        (38.52, 512, {"hidden_size": 1024, "expert_size": 256, "experts_used": 8, "num_attention_heads": 8}),
        (17.52, 512, {"hidden_size": 512, "expert_size": 512, "experts_used": 4, "num_attention_heads": 8}),
        # Mamba 2.
        (27.14, 2048, {"hidden_size": 768, "recurrent_widths": (1536, 1792)}),
        (21.63, 1024, {"hidden_size": 512, "recurrent_widths": (1024, 2048)}),
    ],
)
def test_compute_buffers_are_those_that_the_server_reports(
    reported: float, context: int, shape: dict[str, Any]
) -> None:
    head = shape.get("head", 64)
    attention = KvLayers(LayerKind.FULL, 1, 4, 4 * head, head_size=head)
    layers = (KvLayers(LayerKind.STATE, 1, state_bytes=1) if "recurrent_widths" in shape else attention,)
    more = {key: value for key, value in shape.items() if key != "head"}
    profile = ModelProfile(GIB, layers[0].heads * layers[0].head_bytes, context, layers=layers, **more)
    (row,) = of(profile, "--cache-ram", "0", max_model_len=context, max_num_seqs=1).ledger
    assert row.overhead_bytes / MIB - 40 == pytest.approx(reported, rel=0.11)


def test_flash_attention_switched_off_keeps_the_products() -> None:
    by = {}
    for mode in ("auto", "off"):
        (row,) = plan(config("-fa", mode, max_model_len=4096, max_num_seqs=1)).ledger
        by[mode] = row.overhead_bytes
    assert by["off"] - by["auto"] == 512 * 4096 * (2 + 4 * 32)


def test_the_tokenizer_is_in_the_process() -> None:
    sizes = [
        of(replace(PROFILE, tokenizer_entries=count), max_model_len=4096).ledger[0].overhead_bytes
        for count in (0, 400_000)
    ]
    assert sizes[1] - sizes[0] == 400_000 * 220


# --- Recurrent states, windows and their checkpoints. ---

STATE = 2 * MIB
HYBRID = replace(
    PROFILE,
    layers=(
        KvLayers(LayerKind.FULL, 8, 8, 512, head_size=128),
        KvLayers(LayerKind.STATE, 24, state_bytes=STATE),
    ),
    kv_bytes_per_token=32_768,
)


@pytest.mark.parametrize(
    ("args", "checkpoints"),
    [(("--ctx-checkpoints", "0"), 0), (("-ctxcp", "2"), 2), (("--swa-checkpoints", "8"), 8), ((), 32)],
)
def test_a_request_has_its_states_and_their_checkpoints(args: tuple[str, ...], checkpoints: int) -> None:
    its = of(HYBRID, *args, max_model_len=4096, max_num_seqs=1)
    assert its.slots[0].kv_cache_bytes == 4096 * 32_768 + 24 * STATE * (1 + checkpoints)
    assert ("checkpoints" in codes(its)) is (checkpoints > 4)


def test_a_server_that_embeds_makes_no_checkpoints() -> None:
    its = of(HYBRID, "--embedding", max_model_len=4096, max_num_seqs=1)
    assert its.slots[0].kv_cache_bytes == 4096 * 32_768 + 24 * STATE


def test_checkpoints_of_windows_are_more_than_full_layers_where_requests_are_short() -> None:
    window = 1024
    layers = (
        KvLayers(LayerKind.FULL, 5, 8, 512, head_size=128),
        KvLayers(LayerKind.SLIDING, 25, 8, 512, window, head_size=128),
    )
    profile = replace(PROFILE, layers=layers, kv_bytes_per_token=30 * 4096)
    short, long = (of(profile, max_model_len=length, max_num_seqs=1) for length in (4096, 65_536))
    spare = 4096 - (window + 512)
    assert short.slots[0].kv_cache_bytes == 4096 * 30 * 4096 + (32 * window - spare) * 25 * 4096
    assert long.slots[0].kv_cache_bytes == 65_536 * 30 * 4096
    # No full layer: Llama's header may give a window that llama.cpp does not use.
    alone = replace(profile, layers=(KvLayers(LayerKind.SLIDING, 30, 8, 512, window, head_size=128),))
    assert of(alone, max_model_len=4096, max_num_seqs=1).slots[0].kv_cache_bytes == 4096 * 30 * 4096


@pytest.mark.parametrize(
    ("length", "args", "cells"),
    [
        # As the server says it at its start (build 11549): the window of 512 and one ubatch, whole cells of 256 tokens.
        (8192, (), 1024), (8192, ("-ub", "100"), 768), (8192, ("-ub", "0"), 2560),
        (8192, ("-b", "100"), 768), (768, (), 768), (8192, ("--swa-full",), 8192),
        # Not known: planned as full layers.
        (8192, ("--embedding", "--pooling", "last"), 8192),
    ],
)  # fmt: skip
def test_sliding_layers_keep_their_window(length: int, args: tuple[str, ...], cells: int) -> None:
    layers = (
        KvLayers(LayerKind.FULL, 2, 4, 512, head_size=128),
        KvLayers(LayerKind.SLIDING, 10, 4, 512, 512, head_size=128),
    )
    profile = replace(PROFILE, layers=layers, kv_bytes_per_token=12 * 2048, keeps_windows=True)
    its = of(profile, "--ctx-checkpoints", "0", *args, max_model_len=length, max_num_seqs=1)
    assert its.slots[0].kv_cache_bytes == (2 * length + 10 * cells) * 2048
    if not args:
        with_copies = of(profile, max_model_len=length, max_num_seqs=1)
        assert with_copies.slots[0].kv_cache_bytes == (2 * length + 10 * cells + 32 * 10 * 512) * 2048


def test_states_of_unknown_size_are_said() -> None:
    layers = (KvLayers(LayerKind.FULL, 8, 8, 512), KvLayers(LayerKind.STATE, 24))
    its = of(replace(HYBRID, layers=layers), max_model_len=4096, max_num_seqs=1)
    assert codes(its) == ["states-not-planned"]


@pytest.mark.parametrize(
    ("args", "env", "size"),
    [
        ((), {}, 6), (("--no-repack",), {}, 5), (("-nr", "--repack"), {}, 6), ((), {"LLAMA_ARG_REPACK": "off"}, 5),
        (("--repack",), {"LLAMA_ARG_REPACK": "0"}, 6), ((), {"LLAMA_ARG_NO_REPACK": "0", "LLAMA_ARG_REPACK": "1"}, 5),
        (("--repack",), {"LLAMA_ARG_NO_REPACK": "1"}, 6),
    ],
)  # fmt: skip
def test_an_embedding_that_is_repacked_as_the_output_counts_twice(
    args: tuple[str, ...], env: dict[str, str], size: int
) -> None:
    its = config(*args, env=env, max_model_len=4096, max_num_seqs=1)
    profile = replace(PROFILE, output_copy_bytes=GIB)
    (row,) = make_plan(Machine(cores=16, node_bytes=64 * GIB).topology(), its, {"m": profile}).ledger
    assert row.weights_bytes == size * GIB
    weights = next(line for line in row.lines if line.what == "weights")
    assert ("1 GiB of it again, repacked as the output" in weights.source) is (size == 6)


def test_files_beside_the_model_are_in_the_plan() -> None:
    added = AddedFiles(3 * GIB, ("3 GiB of --mmproj e.gguf",), 1024, ("--spec-draft-hf",))
    its = of(replace(PROFILE, added=added), max_model_len=4096, max_num_seqs=1)
    assert its.ledger[0].weights_bytes == 8 * GIB
    assert its.slots[0].kv_cache_bytes == 4096 * (131_072 + 1024)
    assert codes(its) == ["files-not-planned"]
    assert "--spec-draft-hf" in its.findings[0].message
    weights = next(line for line in its.ledger[0].lines if line.what == "weights")
    assert weights.source == "headers of m.gguf, and 3 GiB of --mmproj e.gguf"


@pytest.mark.parametrize(("memory", "said"), [(Memory(), True), (Memory(instance_overhead="2GiB"), False)])
def test_buffers_of_an_encoder_are_not_in_the_plan(memory: Memory, said: bool) -> None:
    its = config(memory=memory, max_model_len=4096, max_num_seqs=1)
    profile = replace(PROFILE, added=AddedFiles(GIB, ("1 GiB of --mmproj e.gguf",), encoder=True))
    made = make_plan(Machine(cores=16, node_bytes=64 * GIB).topology(), its, {"m": profile})
    assert codes(made) == (["encoder-not-planned"] if said else [])
    assert not said or "memory.instance_overhead" in made.findings[0].remedy


def test_types_that_are_not_known_are_said() -> None:
    its = of(replace(PROFILE, unknown_types=(77, 99)), max_model_len=4096, max_num_seqs=1)
    assert codes(its) == ["types-not-known"]
    assert "type 77, 99" in its.findings[0].message


# --- Servers that embed or rank. ---


@pytest.mark.parametrize(
    ("args", "splits", "step"),
    [
        (("--embedding",), False, 8192), (("--rerank", "-ub", "1024"), False, 1024), (("--embedding",), True, 512),
        (("--embedding", "--pooling", "last"), False, 512), (("--embedding", "--pooling", "mean"), True, 8192),
        (("--rerank",), True, 8192),
        (("--embedding", "-b", "4096", "-ub", "2048"), False, 2048), ((), False, 2048),
    ],
)  # fmt: skip
def test_an_input_that_is_embedded_is_one_ubatch(args: tuple[str, ...], splits: bool, step: int) -> None:
    its = config(*args, max_model_len=8000)
    profile = replace(PROFILE, splits_inputs=splits)
    assert effective_config(its.models[0], its, profile).step_tokens == step


@pytest.mark.parametrize(
    ("args", "splits", "whole", "requests"),
    [
        (("--embedding",), False, False, 1), (("--embedding", "--pooling", "mean"), True, False, 1),
        (("--embedding",), False, True, 8), (("--embedding",), True, False, 8),
        (("--embedding", "--pooling", "last"), False, False, 8), ((), False, False, 8),
        (("--rerank",), False, False, 1), (("--rerank",), True, False, 1), (("--rerank",), False, True, 8),
    ],
)  # fmt: skip
def test_inputs_that_llama_cpp_would_mix_up_are_embedded_one_at_a_time(
    args: tuple[str, ...], splits: bool, whole: bool, requests: int
) -> None:
    its = of(
        replace(PROFILE, splits_inputs=splits, computed_whole=whole),
        *args,
        max_model_len=4096,
        max_num_seqs=8,
    )
    assert its.slots[0].effective.max_num_seqs == requests
    assert codes(its) == (["fewer-requests"] if requests == 1 else [])


@pytest.mark.parametrize(
    ("architecture", "requests"), [("qwen3", 8), ("qwen3vl", 8), ("qwen3moe", 1), ("llama", 1), (None, 1)]
)
def test_ranks_that_are_read_from_the_last_token_are_computed_at_once(
    architecture: str | None, requests: int
) -> None:
    its = of(replace(PROFILE, architecture=architecture), "--rerank", max_model_len=4096, max_num_seqs=8)
    assert its.slots[0].effective.max_num_seqs == requests


@pytest.mark.parametrize(("option", "verb"), [("--embedding", "embeds"), ("--rerank", "ranks")])
def test_one_input_at_a_time_is_said_with_a_remedy_that_helps(option: str, verb: str) -> None:
    (found,) = of(PROFILE, option, max_model_len=4096, max_num_seqs=8).findings
    assert found.code == "fewer-requests"
    assert f"{verb} one input at a time, not max_num_seqs = 8" in found.message
    assert ("--pooling" in found.remedy) == (option == "--embedding"), "a server with --rerank pools ranks"
    assert "layout.instances_per_socket" in found.remedy
    assert not of(PROFILE, option, max_model_len=4096, max_num_seqs=1).findings


def test_logits_of_a_server_that_embeds_are_those_of_one_ubatch() -> None:
    its = config("--embedding", "-ub", "512", "--cache-ram", "0", max_model_len=4096, max_num_seqs=1)
    (row,) = plan(its).ledger
    compute = 512 * ((3 * 14_336 + 5 * 4096) * 4 + 4096 * 2 + 128_256 * 8)
    assert row.overhead_bytes == 40 * MIB + 128_256 * 12 + compute


# --- A header that cannot be read. ---


@pytest.mark.parametrize(("kv_cache", "code"), [("auto", "memory-unknown"), ("4GiB", "memory-unchecked")])
def test_a_model_that_cannot_be_read_keeps_its_length_and_has_a_remedy_that_helps(
    kv_cache: str, code: str
) -> None:
    unread = ModelProfile(5 * GIB, None, 8192, unread="the file's header has no num_attention_heads")
    its = of(unread, memory=Memory(kv_cache=kv_cache))
    (found,) = its.findings
    assert found.code == code
    assert "num_attention_heads" in found.message
    assert "max_model_len and max_num_seqs" in found.remedy
    assert its.models[0].planned_len == 8192
    helped = of(unread, memory=Memory(kv_cache="4GiB"), max_model_len=4096, max_num_seqs=2)
    assert not helped.violations
    assert (helped.slots[0].effective.planned_len, helped.slots[0].effective.max_num_seqs) == (4096, 2)


# --- Instances over several nodes. ---


@pytest.mark.parametrize(("count", "refused"), [(1, True), (2, False)])
def test_an_instance_over_several_nodes_is_refused_once_with_a_remedy(count: int, refused: bool) -> None:
    topology = Machine(nodes=2, cores=8, node_bytes=64 * GIB).topology()
    its = config(max_model_len=2048, max_num_seqs=2)
    its = replace(its, layout=Layout(span_nodes=True, instances_per_socket=count))
    made = make_plan(topology, its, {"m": PROFILE})
    assert ("spans-nodes" in codes(made)) is refused
    if refused:
        (found,) = made.violations
        assert "over nodes 0-1" in found.message
        assert "instances_per_socket" in found.remedy
    else:
        assert not made.violations
