"""llama.cpp's answers to planning: settings, memory and rules of `kind = "llama.cpp"`. Pure.

Sources are those of build 11434.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Final

from launcher.base.errors import LauncherError
from launcher.base.text import GIB, MIB, format_size
from launcher.config.schema import Config, Model
from launcher.engines.llama_cpp.arguments import (
    check_arguments,
    count_of,
    numa_argument,
    pools,
    value_of,
)
from launcher.machine.topology import CpuInfo
from launcher.models.profile import SHAPE_KEYS, ModelProfile
from launcher.plan.plan import (
    DEFAULT_MAX_MODEL_LEN,
    Demand,
    EffectiveConfig,
    Facts,
    Finding,
    ModelNeeds,
    Planning,
    Rule,
    Slot,
    Subject,
    warning,
)
from launcher.plan.rules_host import KERNEL_RULES

CELLS: Final = 256
"""The context of each request is a multiple of this (src/llama-context.cpp, GGML_PAD of n_ctx_seq)."""
MAX_REQUESTS: Final = 256
"""LLAMA_MAX_SEQ (src/llama-cparams.h)."""
DEFAULT_BATCH: Final = 2048
"""--batch-size: tokens of one step (common/common.h)."""
DEFAULT_UBATCH: Final = 512
"""--ubatch-size: tokens that are computed together (common/common.h)."""
MAX_CACHE_RAM_BYTES: Final = 8 * GIB
"""llama-server's own default of --cache-ram, 8192 MiB."""
# Bytes of 32 elements of the KV cache, by the types that --cache-type-k and --cache-type-v take (common/arg.cpp,
# kv_cache_types; blocks in ggml/src/ggml-common.h).
_ELEMENTS: Final = 32
_TYPES: Final = {
    "f32": 128, "f16": 64, "bf16": 64, "q8_0": 34, "q4_0": 18, "q4_1": 20, "iq4_nl": 18, "q5_0": 22, "q5_1": 24,
}  # fmt: skip
_DEFAULT_TYPE: Final = "f16"
# The process without weights, KV cache and compute buffers: see `demand_of`.
PROCESS_BYTES: Final = 128 * MIB
# Activations of a token, as float32: gate and up projection; input, residual, q, k, v and output of attention.
_WIDE_COPIES: Final = 2
_NARROW_COPIES: Final = 6
_FLOAT: Final = 4
# The attention mask: float32, and its copy in float16 for flash attention.
_MASK_BYTES: Final = 4 + 2
# Logits in the compute buffer, and their copy for the sampler.
_LOGITS_BYTES: Final = 2 * _FLOAT
# Part of the largest weight file kept in the page cache while other instances read it.
MAX_PAGE_CACHE_BYTES: Final = 2 * GIB


def effective_config(
    model: Model, config: Config, profile: ModelProfile, _cpu: CpuInfo | None = None
) -> EffectiveConfig:
    """The settings of instances of `model`: [[models]] where engine.args do not override them. The memory plan lowers
    `max_num_seqs` to what the KV cache of a slot holds (`Planning.whole_requests`).

    Raises LauncherError for arguments and variables that only the launcher sets, and for keys of [[models]] that
    llama.cpp cannot follow."""
    engine = config.engine
    check_arguments(engine.args, engine.env)
    _check_model(model)
    length = model.max_model_len or profile.max_model_len
    batch = (
        count_of(engine.args, engine.env, "--batch-size", "LLAMA_ARG_BATCH") or model.max_num_batched_tokens
    )
    given = config.memory.kv_cache != "auto"
    k, v = _types(config)
    return EffectiveConfig(
        name=model.name, dtype="auto", quantization=None, tensor_parallel_size=1,
        max_model_len=DEFAULT_MAX_MODEL_LEN if length is None and profile.known else length,
        max_num_seqs=min(model.max_num_seqs, MAX_REQUESTS), max_num_batched_tokens=batch,
        step_tokens=batch or DEFAULT_BATCH, block_size=CELLS,
        kv_cache_dtype=None if k == v == _DEFAULT_TYPE else f"{k}/{v}",
        kv_element_bytes=-(-(_TYPES[k] + _TYPES[v]) // (2 * _ELEMENTS)),
        kv_bytes=config.memory.size_of("kv_cache") if given else None,
        kv_source="memory.kv_cache" if given else "memory.kv_cache = auto", eager=True, hybrid=False,
        assumes_length=length is None and profile.known,
    )  # fmt: skip


def _check_model(model: Model) -> None:
    if model.tensor_parallel_size not in {1, "auto"}:
        raise LauncherError(
            f"cannot use tensor_parallel_size = {model.tensor_parallel_size} of model {model.name!r}: an instance of "
            "llama.cpp is one process without ranks",
            "remove tensor_parallel_size",
        )
    if model.quantization is not None:
        raise LauncherError(
            f"cannot use quantization = {model.quantization!r} of model {model.name!r}: a GGUF file contains its types",
            "remove quantization; set `path` to a file in the wanted type",
        )


def _types(config: Config) -> tuple[str, str]:
    """The types of K and V. Raises LauncherError for one that is not known."""
    found = []
    for option, variable in (
        ("--cache-type-k", "LLAMA_ARG_CACHE_TYPE_K"),
        ("--cache-type-v", "LLAMA_ARG_CACHE_TYPE_V"),
    ):
        text = value_of(config.engine.args, option) or config.engine.env.get(variable, _DEFAULT_TYPE)
        if text not in _TYPES:
            raise LauncherError(
                f"cannot use {option} {text!r}: its size is not known", f"write one of {', '.join(_TYPES)}"
            )
        found.append(text)
    return found[0], found[1]


def context_of(planned_len: int) -> int:
    """Tokens that llama-server reserves for one request of at most `planned_len` tokens."""
    return -(-planned_len // CELLS) * CELLS


def request_bytes(serving: EffectiveConfig, profile: ModelProfile, config: Config) -> int:
    """KV cache of one request: K and V of `context_of` tokens in all layers, and its recurrent states.

    Sliding layers are counted as full ones: a GGUF header does not name them for all architectures, and their
    checkpoints (--ctx-checkpoints) are then covered."""
    k, v = _types(config)
    scale = Fraction(_TYPES[k] + _TYPES[v], 2 * _ELEMENTS) / profile.kv_element_bytes
    tokens = context_of(serving.planned_len) * (profile.kv_bytes_per_token or 0)
    return math.ceil(tokens * scale) + sum(its.count * its.state_bytes for its in profile.kv_layers)


def cache_ram_bytes(of_request: int) -> int:
    """Size of the prompt cache: one request of full length, because larger prompts than the cache are not kept
    (tools/server/server-task.cpp, server_prompt_cache), and at most llama-server's default; whole MiB."""
    return min(MAX_CACHE_RAM_BYTES, -(-of_request // MIB) * MIB)


def _cache_ram(config: Config, of_request: int) -> int:
    given = count_of(config.engine.args, config.engine.env, "--cache-ram", "LLAMA_ARG_CACHE_RAM")
    return cache_ram_bytes(of_request) if given is None else given * MIB


def demand_of(
    slot: Slot, nodes: tuple[int, ...], config: Config, profile: ModelProfile, _facts: Facts
) -> Demand:
    """The memory of one slot.

    1. Weights are the tensors of the file as stored. With `--load-mode none` the process reads them into memory of its
       own, also those that it repacks; nothing is added while it converts them.
    2. KV cache: each request owns a context of `context_of` tokens, which is allocated and cleared at the start.
    3. Overhead: the process, the prompt cache when it is full, and the compute buffers of one ubatch.

    Measured with build 11549 (xllamacpp), 473 MiB of float16 weights and 4 requests of 8192 tokens (384 MiB): 900 MiB
    resident when ready; 1011 MiB after eight prompts of 1500 tokens, of which the prompt cache holds about 71 of its 96 MiB.
    Planned are 1134 MiB: 9 % more than measured with the rest of the prompt cache added (1036 MiB). With 616 MiB of
    weights, a vocabulary of 128,000 and 2 requests of 32,768 tokens (256 MiB) 972 MiB were resident after prompts of 700
    tokens, 1095 with a full prompt cache; planned are 1254, 15 % more. With 397 MiB in Q4_0, the peak while loading was
    the 607 MiB that were resident when ready (160 of them KV cache). Mixtures of experts and prompts near the end of a long
    context were not measured."""
    serving = slot.effective
    need = request_bytes(serving, profile, config)
    given = serving.kv_bytes
    overhead, source = _overhead(config, profile, serving, need)
    return Demand(
        slot,
        nodes[:1],
        weights_bytes=profile.weights_bytes or 0,
        overhead_bytes=overhead,
        page_cache_bytes=min(profile.file_bytes, MAX_PAGE_CACHE_BYTES),
        need_bytes=need,
        cap_bytes=need * serving.max_num_seqs,
        given_bytes=given
        if given is None or given < need or not need
        else _down(given, need, serving.max_num_seqs),
        known=profile.known,
        guessed=bool(set(profile.assumed) & SHAPE_KEYS),
        unknown_why=profile.unread or "its files are not on this machine",
        step_bytes=max(1, need),
        sources=(
            ("weights", profile.weights_source),
            ("overhead", source),
            (
                "page cache",
                f"largest weight file, at most {format_size(MAX_PAGE_CACHE_BYTES)}; shared on the node",
            ),
            ("KV", _kv_source(serving, profile, config, need)),
        ),
    )


def _kv_source(serving: EffectiveConfig, profile: ModelProfile, config: Config, need: int) -> str:
    each = f"requests of {context_of(serving.planned_len)} tokens, {format_size(need)} each"
    types = "/".join(_types(config))
    return f"{serving.kv_source}; {each}, at most {serving.max_num_seqs}; types {types}; {profile.kv_source}"


def _down(given: int, need: int, most: int) -> int:
    return min(given // need, most) * need


def _overhead(config: Config, profile: ModelProfile, serving: EffectiveConfig, need: int) -> tuple[int, str]:
    cache = _cache_ram(config, need)
    if config.memory.instance_overhead != "auto":
        return config.memory.size_of("instance_overhead") + cache, (
            f"memory.instance_overhead, and {format_size(cache)} of prompt cache"
        )
    engine = config.engine
    ubatch = count_of(engine.args, engine.env, "--ubatch-size", "LLAMA_ARG_UBATCH") or DEFAULT_UBATCH
    ubatch = min(ubatch, serving.step_tokens)
    wide, narrow = profile.intermediate_size or 0, profile.hidden_size or 0
    outputs = serving.step_tokens if pools(engine.args, engine.env) else serving.max_num_seqs
    compute = ubatch * (_WIDE_COPIES * wide + _NARROW_COPIES * narrow) * _FLOAT
    compute += ubatch * context_of(serving.planned_len) * _MASK_BYTES
    compute += outputs * (profile.vocab_size or 0) * _LOGITS_BYTES
    return PROCESS_BYTES + compute + cache, (
        f"{format_size(PROCESS_BYTES)} process; {format_size(cache)} prompt cache (--cache-ram); {format_size(compute)} "
        f"compute buffers of {ubatch} tokens"
    )


def needs_of(model: EffectiveConfig, profile: ModelProfile) -> ModelNeeds:
    """The needs of a model as its file's header gives them."""
    layers, per_token = profile.kv_layers, profile.kv_bytes_per_token or 0
    states = sum(its.count * its.state_bytes for its in layers)
    scaled = per_token * model.kv_element_bytes // profile.kv_element_bytes
    return ModelNeeds(
        name=model.name, heads=profile.num_attention_heads, latent=profile.mla, quantization=None,
        max_model_len=model.planned_len, kv_bytes_per_token=scaled, state_bytes=states,
        request_bytes=context_of(model.planned_len) * scaled + states, weights_bytes=profile.weights_bytes or 0,
        layers=layers, sources=("headers", *(("assumed",) if profile.assumed else ())),
    )  # fmt: skip


# --- Rules. ---


def fewer_requests(subject: Subject) -> Iterator[Finding]:
    """Each request owns a whole context: memory for max_num_seqs of them is not always there."""
    for model in subject.plan.models:
        its = [slot.effective.max_num_seqs for slot in subject.plan.slots if slot.model.name == model.name]
        asked = next(one.max_num_seqs for one in subject.config.models if one.name == model.name)
        if its and min(its) < asked:
            some = str(min(its)) if min(its) == max(its) else f"{min(its)} to {max(its)}"
            yield warning(
                "fewer-requests",
                f"an instance of {model.name!r} computes {some} requests at once, not max_num_seqs = {asked}: llama.cpp "
                f"reserves the KV cache of {context_of(model.planned_len)} tokens for each, and at most {MAX_REQUESTS}",
                "lower max_model_len to the longest request that clients send, or lower max_num_seqs",
            )


def keys_without_effect(subject: Subject) -> Iterator[Finding]:
    """Keys of [[models]] that are options of vLLM only."""
    usual = Model(name="-", path="-")
    for model in subject.config.models:
        keys = ("dtype", "block_size", "weight_prepack", "trust_remote_code")
        found = [key for key in keys if getattr(model, key) != getattr(usual, key)]
        if found:
            yield warning(
                "no-effect",
                f"{', '.join(found)} of model {model.name!r} {'has' if len(found) == 1 else 'have'} no effect with "
                "llama.cpp: a GGUF file contains its types",
                f"remove {', '.join(found)}",
            )


def mapped_weights(subject: Subject) -> Iterator[Finding]:
    """Pages of a mapped file are on the node whose process read them first, also those of an earlier instance."""
    engine = subject.config.engine
    mode = value_of(engine.args, "--load-mode") or ""
    nodes = {slot.placement.node for slot in subject.plan.slots}
    if "mmap" in mode or mode == "auto":
        yield warning(
            "mapped-weights",
            f"engine.args set --load-mode {mode}: instances share the pages of the file"
            + (", which are on any of the nodes" if len(nodes) > 1 else "; the plan counts them for each"),
            "remove --load-mode: the launcher sets none, which reads the weights into memory of the slot's node",
        )


RULES: Final[tuple[Rule, ...]] = (
    numa_argument, fewer_requests, keys_without_effect, mapped_weights, *KERNEL_RULES,
)  # fmt: skip

PLANNING: Final = Planning(
    settings=effective_config, rules=RULES, demand=demand_of, needs=needs_of, whole_requests=True
)
