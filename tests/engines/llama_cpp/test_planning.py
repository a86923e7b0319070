"""Settings, memory and rules of `kind = "llama.cpp"`."""

from __future__ import annotations

from typing import Any

import pytest
from support.plans import make_plan
from support.synthetic import Machine

from launcher.base.errors import LauncherError
from launcher.base.text import GIB, MIB
from launcher.config.schema import Config, Engine, EngineKind, Memory, Model
from launcher.engines.llama_cpp.planning import PLANNING, cache_ram_bytes, effective_config
from launcher.models.profile import ModelProfile
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
    # Process, prompt cache, then ubatch x (2 wide + 6 narrow) x 4, mask, and logits of 8 requests.
    compute = 512 * (2 * 14_336 + 6 * 4096) * 4 + 512 * 4096 * 6 + 8 * 128_256 * 8
    assert lines["overhead"].size_bytes == 128 * MIB + 512 * MIB + compute


@pytest.mark.parametrize(
    ("types", "share"),
    [(("f16", "f16"), 64), (("q8_0", "q8_0"), 34), (("f32", "f16"), 96), (("q8_0", "q4_0"), 26)],
)
def test_types_of_the_kv_cache_scale_it(types: tuple[str, str], share: int) -> None:
    its = config("-ctk", types[0], "--cache-type-v", types[1], max_model_len=4096, max_num_seqs=1)
    assert plan(its).slots[0].kv_cache_bytes == 512 * MIB * share // 64


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
