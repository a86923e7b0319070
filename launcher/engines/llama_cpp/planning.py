"""llama.cpp's answers to planning: settings, memory and rules of `kind = "llama.cpp"`. Pure.

Sources are those of build 11434.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Final

from msgspec import Struct

from launcher.base.errors import LauncherError
from launcher.base.text import GIB, MIB, format_size
from launcher.config.schema import Config, Model
from launcher.engines.llama_cpp.arguments import (
    DEFAULT_BATCH,
    DEFAULT_UBATCH,
    check_arguments,
    count_of,
    embeds_or_ranks,
    keeps_all,
    numa_argument,
    pooling_of,
    ranks,
    repacks,
    value_of,
)
from launcher.machine.topology import CpuInfo
from launcher.models.layers import LayerKind
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
    violation,
    warning,
)
from launcher.plan.rules_host import KERNEL_RULES

CELLS: Final = 256
"""The context of each request is a multiple of this (src/llama-context.cpp, GGML_PAD of n_ctx_seq)."""
MAX_REQUESTS: Final = 256
"""LLAMA_MAX_SEQ (src/llama-cparams.h)."""
MAX_CACHE_RAM_BYTES: Final = 8 * GIB
"""llama-server's own default of --cache-ram, 8192 MiB."""
# Bytes of 32 elements of the KV cache, by the types that --cache-type-k and --cache-type-v take (common/arg.cpp,
# kv_cache_types; blocks in ggml/src/ggml-common.h).
_ELEMENTS: Final = 32
_TYPES: Final = {
    "f32": 128, "f16": 64, "bf16": 64, "q8_0": 34, "q4_0": 18, "q4_1": 20, "iq4_nl": 18, "q5_0": 22, "q5_1": 24,
}  # fmt: skip
_DEFAULT_TYPE: Final = "f16"
# The process without weights, KV cache and buffers, as measured (`demand_of`): its code, threads and heap, and each word
# and merge of the tokenizer in llama.cpp's tables.
PROCESS_BYTES: Final = 40 * MIB
_TOKENIZER_ENTRY_BYTES: Final = 220
_FLOAT: Final = 4
# Logits in the compute buffer and in the output buffer (src/llama-context.cpp, output_reserve).
_LOGITS_BYTES: Final = 2 * _FLOAT
# One candidate of a sampler, llama_token_data: each request has as many as the vocabulary has words.
_CANDIDATE_BYTES: Final = 12
# Rows of hidden_size that the graph holds beside the widest part of a layer, and the rows of that part: gate, up and
# their product; Q and the result of attention.
_NARROW_ROWS: Final = 5
_WIDE_ROWS: Final = 3
_QUERY_ROWS: Final = 2
# Rows of a recurrent layer, and of its convolution (measured with mamba2: `demand_of`).
_RECURRENT_ROWS: Final = 5
_CONVOLUTION_ROWS: Final = 2
# One element of the attention mask: float16 for flash attention, which is on by default, else float32.
_MASK_BYTES: Final = 2
_MASK_BYTES_WITHOUT_FLASH: Final = 4
DEFAULT_CHECKPOINTS: Final = 32
"""--ctx-checkpoints: states and windows of one request that are kept to go back to (common/common.h)."""
_UNREAD_REMEDY: Final = (
    "set memory.kv_cache, and max_model_len and max_num_seqs in [[models]] so that it holds max_num_seqs requests: "
    "llama.cpp allocates the context of all of them at its start"
)
# Architectures whose ranks are read from the last token of an input, as of all others from the first
# (src/llama-graph.cpp, llm_graph_input_cls::set_input).
_RANKED_BY_LAST_TOKEN: Final = {"qwen3", "qwen3vl"}
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
        max_num_seqs=1 if _embeds_alone(config, profile) else min(model.max_num_seqs, MAX_REQUESTS),
        max_num_batched_tokens=batch,
        step_tokens=_step_tokens(config, profile, batch, length or DEFAULT_MAX_MODEL_LEN), block_size=CELLS,
        kv_cache_dtype=None if k == v == _DEFAULT_TYPE else f"{k}/{v}",
        kv_element_bytes=math.ceil(_element_bytes(k, v)),
        kv_bytes=config.memory.size_of("kv_cache") if given else None,
        kv_source="memory.kv_cache" if given else "memory.kv_cache = auto", eager=True,
        hybrid=_slides(config, profile), ubatch_tokens=_ubatch_tokens(config, batch),
        assumes_length=length is None and profile.known,
    )  # fmt: skip


def _slides(config: Config, profile: ModelProfile) -> bool:
    """Whether sliding layers keep their window only, as far as the launcher knows. Those of a server that embeds are planned
    as full ones."""
    args, env = config.engine.args, config.engine.env
    return profile.keeps_windows and not embeds_or_ranks(args, env) and not keeps_all(args, env)


def _step_tokens(config: Config, profile: ModelProfile, batch: int | None, length: int) -> int:
    """Tokens of one step. A server that embeds or ranks computes each input in one ubatch, and refuses a longer one
    (tools/server/server-context.cpp, can_split: "input is too large to process"), unless it reads the last token only;
    its batch is no larger than its ubatch (tools/server/server.cpp)."""
    engine = config.engine
    if not embeds_or_ranks(engine.args, engine.env):
        return batch or DEFAULT_BATCH
    given = _ubatch(config)
    usual = DEFAULT_UBATCH if _reads_last_token(config, profile) else context_of(length)
    sizes = [size for size in (given, batch) if size]
    return min(sizes, default=usual)


def _reads_last_token(config: Config, profile: ModelProfile) -> bool:
    """Whether a vector is made from the last token; scores have a pooling of their own."""
    args, env = config.engine.args, config.engine.env
    pooling = pooling_of(args, env)
    return profile.splits_inputs if pooling is None else pooling == "last"


def _embeds_alone(config: Config, profile: ModelProfile) -> bool:
    """Whether an instance embeds or ranks one input at a time. Several inputs are cut into ubatches with as many tokens of
    each, if the model has a KV cache (src/llama-kv-cache.cpp, init_batch: split_equal), and the vector or score of a longer
    input is made from its part in the last ubatch, without an error. The last token is in that part."""
    args, env = config.engine.args, config.engine.env
    if profile.computed_whole or not embeds_or_ranks(args, env):
        return False
    if ranks(args, env):
        return profile.architecture not in _RANKED_BY_LAST_TOKEN
    return not _reads_last_token(config, profile)


def _ubatch(config: Config) -> int | None:
    return count_of(config.engine.args, config.engine.env, "--ubatch-size", "LLAMA_ARG_UBATCH")


def _ubatch_tokens(config: Config, batch: int | None) -> int:
    """As large as the batch for 0 (src/llama-context.cpp)."""
    given, most = _ubatch(config), batch or DEFAULT_BATCH
    return min(DEFAULT_UBATCH if given is None else given or most, most)


def _check_model(model: Model) -> None:
    if "," in model.name:
        raise LauncherError(
            f"cannot use the name {model.name!r} of a model: llama-server splits --alias at commas, and would answer with a "
            "part of it",
            "set a name without commas; `aliases` may have them",
        )
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


def _element_bytes(k: str, v: str) -> Fraction:
    return Fraction(_TYPES[k] + _TYPES[v], 2 * _ELEMENTS)


def token_bytes(serving: EffectiveConfig, profile: ModelProfile, size: int) -> Fraction:
    """K and V of one token, in the types of the KV cache. `size` counts them in the profile's elements. A latent is kept as
    K alone (src/llama-kv-cache.cpp, has_v)."""
    k, v = (serving.kv_cache_dtype or f"{_DEFAULT_TYPE}/{_DEFAULT_TYPE}").split("/")
    return size * _element_bytes(k, k if profile.mla else v) / profile.kv_element_bytes


class RequestMemory(Struct, frozen=True):
    """Memory of one request of full length, in bytes."""

    kv: int
    """K and V of all layers."""
    states: int
    """Its recurrent states."""
    checkpoints: int
    """Copies of its recurrent states and windows, to go back to (--ctx-checkpoints)."""
    draft: int = 0
    """K and V of a draft model."""

    @property
    def total(self) -> int:
        return self.kv + self.states + self.checkpoints + self.draft


def request_memory(serving: EffectiveConfig, profile: ModelProfile, checkpoints: int) -> RequestMemory:
    """Sliding layers keep their window and one ubatch, whole cells of 256 tokens (src/llama-kv-cache-iswa.cpp), where the
    profile says so. Others are counted as full ones: a GGUF header does not name them for all architectures. Their
    checkpoints take the rest of that first. Of a header that gives a window and no full layer it is not known whether
    llama.cpp uses the window: those of Llama and Phi 3 it does not.

    A checkpoint holds the recurrent state of the request and the cells of its windows; a conversation of short turns fills
    their number (tools/server/server-context.cpp, create_checkpoint)."""
    tokens = context_of(serving.planned_len)
    layers = profile.kv_layers
    kv = tokens * token_bytes(serving, profile, profile.kv_bytes_per_token or 0)
    states = sum(its.count * its.state_bytes for its in layers)
    mixed = serving.hybrid or len({its.kind for its in layers} - {LayerKind.STATE}) > 1
    windows = [
        (min(its.window, tokens), token_bytes(serving, profile, its.count * its.token_bytes(1)))
        for its in layers if its.window and mixed
    ]  # fmt: skip
    copies = checkpoints * sum(window * each for window, each in windows)
    spare = sum(
        (tokens - min(tokens, context_of(window + serving.ubatch_tokens))) * each for window, each in windows
    )
    if serving.hybrid:
        kv, spare = kv - spare, Fraction(0)
    return RequestMemory(
        math.ceil(kv), states, checkpoints * states + max(0, math.ceil(copies - spare)),
        # The draft's own types of K and V are 16 bits each, whatever the model's are (common/common.h).
        draft=tokens * profile.added.token_bytes,
    )  # fmt: skip


def _checkpoints(config: Config) -> int:
    engine = config.engine
    if embeds_or_ranks(engine.args, engine.env):
        return 0
    given = count_of(engine.args, engine.env, "--ctx-checkpoints", "LLAMA_ARG_CTX_CHECKPOINTS")
    return DEFAULT_CHECKPOINTS if given is None else given


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

    1. Weights are the tensors of the file as stored, and the files that engine.args name. With `--load-mode none` the
       process reads them into memory of its own, also those that it repacks; nothing is added while it converts them. An
       embedding that is the output projection as well is there twice where it is repacked for that.
    2. KV cache: each request owns a context of `context_of` tokens and its recurrent states, which are allocated and
       cleared at the start; its checkpoints come with its prompts.
    3. Overhead: the process, the prompt cache when it is full, and the compute buffers of one ubatch.

    Measured with build 11549 (xllamacpp: an extension of Python, about 20 MiB more than llama-server), after prompts of
    600 tokens in every request; planned is without the prompt cache, which was empty:

    ==================================================== ============== ============
    model, requests x context                            measured (MiB) planned (MiB)
    ==================================================== ============== ============
    160 M, F16, 4 x 8192 (512 of KV cache)               887            901 (+1.5 %)
    222 M, F16, vocabulary of 128,000, 2 x 32,768 (256)  763            802 (+5.1 %)
    300 M, 8 experts, Q8_0, vocabulary of 64,000, 2 x 4096 418          432 (+3.3 %)
    182 M, Q4_0 repacked, 8 x 2048 (256)                 456            446 (-2.1 %)
    94 M, F16, 4 x 2048 (128)                            377            379 (+0.5 %)
    94 M, Q4_0 repacked, 4 x 2048 (128)                  247            249 (+0.9 %)
    126 M, 8 experts, Q8_0, 4 x 2048 in q8_0 (68)        252            260 (+3.3 %)
    94 M, Q4_0 repacked, 7 of 8 layers slide, 4 x 2048   178            180 (+0.6 %)
    ==================================================== ============== ============

    Compute buffers of eight shapes and recurrent states (mamba2) are those that the server reports at its start. Of the
    second, the mask of a prompt near the end of its context was not touched. The last four are those of
    tests/engine/llama_server/test_ledger.py, which holds them to 5 %."""
    serving = slot.effective
    request = request_memory(serving, profile, _checkpoints(config))
    need, given = request.total, serving.kv_bytes
    overhead, source = _overhead(config, profile, serving, need)
    copy = profile.output_copy_bytes if repacks(config.engine.args, config.engine.env) else 0
    again = [f"{format_size(copy)} of it again, repacked as the output"] if copy else []
    return Demand(
        slot,
        nodes[:1],
        weights_bytes=(profile.weights_bytes or 0) + copy + profile.added.size_bytes,
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
        unknown_remedy="" if profile.unread is None else _UNREAD_REMEDY,
        step_bytes=max(1, need),
        sources=(
            ("weights", ", and ".join([profile.weights_source, *again, *profile.added.names])),
            ("overhead", source),
            (
                "page cache",
                f"largest weight file, at most {format_size(MAX_PAGE_CACHE_BYTES)}; shared on the node",
            ),
            ("KV", _kv_source(serving, profile, request)),
        ),
    )


def _kv_source(serving: EffectiveConfig, profile: ModelProfile, request: RequestMemory) -> str:
    each = f"requests of {context_of(serving.planned_len)} tokens, {format_size(request.total)} each"
    parts = (("checkpoints", request.checkpoints), ("the draft model", request.draft))
    of = "".join(f", {format_size(size)} of it {name}" for name, size in parts if size)
    types = serving.kv_cache_dtype or f"{_DEFAULT_TYPE}/{_DEFAULT_TYPE}"
    return (
        f"{serving.kv_source}; {each}{of}, at most {serving.max_num_seqs}; types {types}; {profile.kv_source}"
    )


def _down(given: int, need: int, most: int) -> int:
    return min(given // need, most) * need


def _overhead(config: Config, profile: ModelProfile, serving: EffectiveConfig, need: int) -> tuple[int, str]:
    cache = _cache_ram(config, need)
    if config.memory.instance_overhead != "auto":
        return config.memory.size_of("instance_overhead") + cache, (
            f"memory.instance_overhead, and {format_size(cache)} of prompt cache"
        )
    pooled = embeds_or_ranks(config.engine.args, config.engine.env)
    ubatch = serving.step_tokens if pooled else serving.ubatch_tokens
    compute = ubatch * (_row_bytes(profile) + _mask_bytes(config, profile) * context_of(serving.planned_len))
    vocabulary, requests = profile.vocab_size or 0, serving.max_num_seqs
    compute += (ubatch if pooled else requests) * vocabulary * _LOGITS_BYTES
    process = PROCESS_BYTES + profile.tokenizer_entries * _TOKENIZER_ENTRY_BYTES
    process += requests * vocabulary * _CANDIDATE_BYTES
    return process + compute + cache, (
        f"{format_size(process)} process; {format_size(cache)} prompt cache (--cache-ram); {format_size(compute)} "
        f"compute buffers of {ubatch} tokens"
    )


def _row_bytes(profile: ModelProfile) -> int:
    """Activations of one token in the compute buffer: float32, at the widest part of a layer. The mixture of experts
    computes `experts_used` rows of a token at once (src/llama-graph.cpp, build_moe_ffn)."""
    narrow = profile.hidden_size or 0
    heads = max((its.head_size for its in profile.kv_layers), default=0)
    expert, used = profile.expert_size or 0, profile.experts_used
    # Results of the experts replace their products where they are no wider.
    results = used * narrow if narrow > expert else 0
    inner, convolution = profile.recurrent_widths
    wide = (
        _WIDE_ROWS * (0 if used else profile.intermediate_size or 0),
        _WIDE_ROWS * used * expert + results,
        _QUERY_ROWS * heads * (profile.num_attention_heads or 0),
        _RECURRENT_ROWS * inner + _CONVOLUTION_ROWS * convolution,
    )
    return (_NARROW_ROWS * narrow + max(wide)) * _FLOAT


def _mask_bytes(config: Config, profile: ModelProfile) -> int:
    """Bytes for one token of the context and one that is computed. Without flash attention the products of Q and K are in
    memory as well (src/llama-graph.cpp, build_attn_mha)."""
    engine = config.engine
    if not profile.kv_bytes_per_token:  # recurrent layers only
        return 0
    text = value_of(engine.args, "--flash-attn") or engine.env.get("LLAMA_ARG_FLASH_ATTN", "auto")
    if text in {"off", "disabled", "false", "0"}:
        return _MASK_BYTES_WITHOUT_FLASH + _FLOAT * (profile.num_attention_heads or 0)
    return _MASK_BYTES


def needs_of(model: EffectiveConfig, profile: ModelProfile) -> ModelNeeds:
    """The needs of a model as its file's header gives them."""
    request = request_memory(model, profile, checkpoints=0)
    scaled = math.ceil(token_bytes(model, profile, profile.kv_bytes_per_token or 0))
    return ModelNeeds(
        name=model.name, heads=profile.num_attention_heads, latent=profile.mla, quantization=None,
        max_model_len=model.planned_len, kv_bytes_per_token=scaled, state_bytes=request.states,
        request_bytes=request.total, weights_bytes=profile.weights_bytes or 0,
        layers=profile.kv_layers, sources=("headers", *(("assumed",) if profile.assumed else ())),
    )  # fmt: skip


# --- Rules. ---


def fewer_requests(subject: Subject) -> Iterator[Finding]:
    """Each request owns a whole context: memory for max_num_seqs of them is not always there. And inputs are not always
    embedded rightly at once."""
    for model in subject.plan.models:
        its = [slot.effective.max_num_seqs for slot in subject.plan.slots if slot.model.name == model.name]
        asked = next(one.max_num_seqs for one in subject.config.models if one.name == model.name)
        if its and model.max_num_seqs == 1 < asked:
            args, env = subject.config.engine.args, subject.config.engine.env
            verb, result = ("ranks", "score") if ranks(args, env) else ("embeds", "vector")
            pooling = "" if ranks(args, env) else (
                'set "--pooling", "last" in engine.args if the model is made for it, or '
            )  # fmt: skip
            yield warning(
                "fewer-requests",
                f"an instance of {model.name!r} {verb} one input at a time, not max_num_seqs = {asked}: of several inputs "
                f"llama.cpp would make the {result} of a longer one from a part of it",
                f"{pooling}raise layout.instances_per_socket for more at once; max_num_seqs = 1 accepts it",
            )
        elif its and min(its) < asked:
            some = str(min(its)) if min(its) == max(its) else f"{min(its)} to {max(its)}"
            yield warning(
                "fewer-requests",
                f"an instance of {model.name!r} computes {some} requests at once, not max_num_seqs = {asked}: llama.cpp "
                f"reserves the KV cache of {context_of(model.planned_len)} tokens for each, and at most {MAX_REQUESTS}",
                "lower max_model_len to the longest request that clients send, or lower max_num_seqs",
            )


def memory_not_planned(subject: Subject) -> Iterator[Finding]:
    """Memory of an instance that no file's header or size gives."""
    unknown = dict.fromkeys(name for _, profile in subject.models() for name in profile.added.unknown)
    if unknown:
        yield warning(
            "files-not-planned",
            f"the memory of {', '.join(unknown)} is not in the plan: its files are not on this host",
            "download them and give their paths, or raise memory.reserve by their size",
        )
    for model, profile in subject.models():
        if profile.added.encoder and subject.config.memory.instance_overhead == "auto":
            yield warning(
                "encoder-not-planned",
                f"the compute buffers of the encoder (--mmproj) of {model.name!r} are not in the plan: they "
                "depend on the pictures or sound that clients send",
                "send the largest, and set memory.instance_overhead to what an instance then has resident beside the "
                "weights, the KV cache and the prompt cache in the plan",
            )
        if profile.unknown_types:
            yield warning(
                "types-not-known",
                f"tensors of {model.name!r} have the type {', '.join(map(str, profile.unknown_types))}, whose size is not "
                "known: it is taken from the places of their data in the file",
                "none needed if llama.cpp serves the model; a build that does not know the type refuses it at its start",
            )
        states = [its for its in profile.layers if its.kind is LayerKind.STATE and not its.state_bytes]
        if states:
            yield warning(
                "states-not-planned",
                f"the recurrent states of {model.name!r} are not in the plan: its header does not give their size",
                "compare the memory of the first instance with the plan, and raise memory.reserve by the difference",
            )


def checkpoints(subject: Subject) -> Iterator[Finding]:
    """Copies of states and windows can be larger than all else of a request."""
    count = _checkpoints(subject.config)
    for model, profile in subject.models():
        request = request_memory(model, profile, count)
        if request.checkpoints > request.total // 2:
            yield warning(
                "checkpoints",
                f"{format_size(request.checkpoints)} of the {format_size(request.total)} that a request of {model.name!r} "
                f"may need are {count} checkpoints of its states and windows: an instance computes fewer requests at once",
                'lower their number in engine.args, for example "--ctx-checkpoints", "4": a prompt that branches off '
                "earlier is then computed again",
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


def spans_nodes(subject: Subject) -> Iterator[Finding]:
    """One process has no ranks that each take memory of their node: its weights would fill the first node and be remote to
    the threads on the others, and the plan counts them on the first."""
    for slot in subject.plan.slots:
        its = slot.placement
        emulated = subject.topology.emulated_with(its.membind.first) if its.membind else its.membind
        if len(its.membind) > 1 and not its.remote and not its.membind <= emulated:
            yield violation(
                "spans-nodes",
                f"cannot start an instance over nodes {its.membind.format()}: a process of llama.cpp has its weights on one "
                "node, and threads on the others would read them remotely",
                "set layout.span_nodes = false and as many layout.instances_per_socket as a socket has nodes; for a model "
                "larger than a node, let the firmware (BIOS) make one node of each socket (NPS1)",
            )
            return


RULES: Final[tuple[Rule, ...]] = (
    spans_nodes, numa_argument, fewer_requests, memory_not_planned, checkpoints, keys_without_effect, mapped_weights,
    *KERNEL_RULES,
)  # fmt: skip

PLANNING: Final = Planning(
    settings=effective_config, rules=RULES, demand=demand_of, needs=needs_of, whole_requests=True
)
