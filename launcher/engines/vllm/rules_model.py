"""Rules on models that vLLM's CPU backend supports. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from launcher.base.text import GIB, format_size
from launcher.config.schema import Model, Runtime
from launcher.engines.vllm.settings import (
    DEFAULT_BLOCK_SIZE,
    KV_ELEMENT_BYTES,
    WEIGHT_PREPACK,
    lacks_kv_bytes,
)
from launcher.models.description import versions
from launcher.models.layers import LayerKind
from launcher.models.profile import UNKNOWN, ModelProfile
from launcher.plan.plan import EffectiveConfig, Finding, Rule, Subject, violation, warning

_BLOCK_STEP: Final = 32
_LENGTH: Final = "max_position_embeddings"
# What vLLM's CPU backend runs everywhere, and with AMX (vllm/model_executor/kernels/linear/scaled_mm/cpu.py, 0.32).
_CPU_QUANTIZATIONS: Final = frozenset({"awq", "gptq", "compressed-tensors"})
_AMX_QUANTIZATIONS: Final = frozenset({"fp8"})
# v1/attention/backends/cpu_attn.py, get_supported_head_sizes. With 16, vLLM starts and then answers 500.
_HEAD_SIZES: Final = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})
# The only latent width that the kernel without AMX supports (v1/attention/backends/mla/cpu_mla.py).
_LATENT: Final = 576
_COMPRESSED: Final = "DeepseekV4"
# transformers/dynamic_module_utils.py, resolve_trust_remote_code
_REMOTE_CODE: Final = "contains custom code"


def block_size(subject: Subject) -> Iterator[Finding]:
    """The CPU attention kernels work on blocks of 32 tokens (vllm/platforms/cpu.py)."""
    for model, profile in subject.models():
        if model.block_size % _BLOCK_STEP and not profile.mla:
            below = max(_BLOCK_STEP, model.block_size // _BLOCK_STEP * _BLOCK_STEP)
            yield violation(
                "block-size",
                f"cannot use block_size = {model.block_size} for {model.name!r}: it is not a multiple of "
                f"{_BLOCK_STEP}",
                f"set block_size to {below}, or remove it for {DEFAULT_BLOCK_SIZE}",
            )


def latent_attention(subject: Subject) -> Iterator[Finding]:
    """Without AMX vLLM has a reference kernel for multi-head latent attention, of one width."""
    if "amx_tile" in subject.topology.cpu.flags:
        return
    for model, profile in subject.models():
        if (profile.architecture or "").startswith(_COMPRESSED):
            continue  # its latent has a kernel and blocks of its own
        latent = sum(its.head_bytes for its in profile.layers[:1]) // profile.kv_element_bytes
        if profile.mla and latent and latent != _LATENT:
            yield violation(
                "latent-width",
                f"cannot run {model.name!r} here: its latent has {latent} elements, and without AMX vLLM's kernel "
                f"takes {_LATENT}",
                "use a machine with AMX, or set VLLM_MLA_DISABLE=1 in engine.env",
            )
        elif profile.mla:
            yield warning(
                "latent-reference",
                f"{model.name!r} has latent attention, which vLLM computes with a reference kernel on CPUs without "
                "AMX: no chunked prefill, no prefix caching, blocks of 16 tokens",
                "expect slow prompts; set max_model_len no higher than needed",
            )


def head_size(subject: Subject) -> Iterator[Finding]:
    """The CPU attention is compiled for these head sizes."""
    for model, profile in subject.models():
        sizes = {
            its.head_size or its.head_bytes // (2 * profile.kv_element_bytes)
            for its in profile.layers
            if its.kind is not LayerKind.STATE and not profile.mla
        }
        for size in sorted(sizes - _HEAD_SIZES):
            if "head_dim" in profile.assumed:
                yield _assumed_head(model.name, size)
                continue
            yield violation(
                "head-size",
                f"cannot run {model.name!r} on CPU: its attention heads have {size} elements, but vLLM's kernels support "
                f"{', '.join(map(str, sorted(_HEAD_SIZES)))}",
                "use another model",
            )


def _assumed_head(name: str, size: int) -> Finding:
    return warning(
        "head-size",
        f"the attention heads of {name!r} may have {size} elements, which vLLM's CPU kernels do not support: its "
        "config.json has no head_dim, and hidden_size / num_attention_heads is a guess",
        "check the first start; vLLM ends with an error if the size is right",
    )


def assumed_sizes(subject: Subject) -> Iterator[Finding]:
    """Sizes that neither config.json, its class nor the weights give."""
    for model, profile in subject.models():
        if missing := _missing(model, profile):
            length = (
                f"; vLLM is started with --max-model-len {model.planned_len}" if _LENGTH in missing else ""
            )
            yield warning(
                "assumed-size",
                f"config.json of {model.name!r} has no {', '.join(missing)}, and its class is not known: the plan assumes "
                f"the usual{length}",
                "set max_model_len and memory.kv_cache, or add the keys to config.json",
            )


def _missing(model: EffectiveConfig, profile: ModelProfile) -> list[str]:
    return [key for key in profile.assumed if key != _LENGTH or model.assumes_length]


def stale_defaults(subject: Subject) -> Iterator[Finding]:
    """Defaults of configuration classes change with vLLM and transformers."""
    ours, theirs = versions().vllm, subject.facts.engine.get("vllm")
    if theirs is None or _release(theirs) == _release(ours):
        return
    for model, profile in subject.models():
        if "defaults" in profile.sources:
            yield warning(
                "class-defaults",
                f"config.json of {model.name!r} leaves sizes to its class: the plan takes those of vLLM {ours}, but this is "
                f"{theirs}",
                "check the KV cache size in the first start's log, or set max_model_len and memory.kv_cache",
            )


def _release(version: str) -> list[str]:
    return version.split(".")[:2]


def engine_said(subject: Subject) -> Iterator[Finding]:
    """The engine's answer, or what is known of its CPU backend. It may be wrong about a start: no refusal."""
    for model, profile in subject.models():
        yield from doubts_of(model.name, profile)


def doubts_of(name: str, profile: ModelProfile) -> Iterator[Finding]:
    """The reasons against a start of one model: the engine's own words where it was asked, else what vLLM 0.32's CPU
    backend is known to lack (models/cpu_backend.py). The same in `plan` and `doctor`."""
    if profile.cpu_gap:
        yield warning(
            "cpu-backend",
            f"vLLM 0.32 cannot build {name!r} on CPU: it has {profile.cpu_gap}",
            "use another model, or a vLLM whose CPU backend supports it",
        )
    if profile.engine_refusal:
        yield warning(
            "engine-refuses",
            f"the engine does not take {name!r}: {profile.engine_refusal}",
            "set models.trust_remote_code = true if you trust the code that comes with it, or use another model"
            if _REMOTE_CODE in profile.engine_refusal
            else "expect the start to end with this; correct the model's files or engine.args, or use another vLLM",
        )
    if profile.engine_trouble:
        yield warning(
            "engine-silent",
            f"the engine was asked about {name!r} without success, so the plan takes the figures of its files: "
            f"{profile.engine_trouble}",
            "ask again with numa-launcher plan --ask-engine; memory.kv_cache and max_model_len go before all figures",
        )


def engine_not_asked(subject: Subject) -> Iterator[Finding]:
    """Figures of a model, or whether it can run at all, are guesses that the engine's answer would replace."""
    if subject.config.engine.runtime is not Runtime.HOST:
        return
    for model, profile in subject.models():
        guesses = [] if profile.asked else list(_guesses(subject, model, profile))
        if guesses:
            yield warning(
                "engine-not-asked",
                f"vLLM was not asked about {model.name!r}, and the plan rests on guesses: {'; '.join(guesses)}",
                "run numa-launcher plan --ask-engine where vLLM is installed (some 20 seconds, once: the answer is kept)",
            )


def _guesses(subject: Subject, model: EffectiveConfig, profile: ModelProfile) -> Iterator[str]:
    if profile.unread:
        yield f"its description is not understood ({profile.unread})"
    if profile.class_gap and profile.file_format != "gguf":
        yield profile.class_gap
    if missing := _missing(model, profile):
        yield f"the usual {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} assumed"
    if _has_unknown_state(profile):
        yield "the size of its recurrent states is not known"
    if profile.cpu_gap or (profile.quantization and profile.quantization not in _quantizations(subject)):
        yield "whether the CPU backend has its kernels is read from its description alone"


def float16_on_zen(subject: Subject) -> Iterator[Finding]:
    """ZenTorch computes bfloat16 and float32 only (vllm/platforms/zen_cpu.py)."""
    for model, _ in subject.models():
        if model.dtype == "float16" and subject.topology.cpu.is_zen:
            yield violation(
                "float16-on-zen",
                f"cannot run {model.name!r} as float16: AMD Zen computes bfloat16 and float32",
                'set dtype = "bfloat16"',
            )


def divides(profile: ModelProfile, ranks: int) -> bool:
    """Whether the heads of a model are known to split evenly over `ranks`, as in `tensor_parallel`, and nothing says that
    the width of its feed-forward layers does not (model_executor/layers/linear.py, divide)."""
    heads, kv_heads = profile.num_attention_heads, profile.num_kv_heads
    if heads is None or kv_heads is None or "num_key_value_heads" in profile.assumed:
        return False
    width = profile.intermediate_size or 0
    return not heads % ranks and not (kv_heads % ranks and ranks % kv_heads) and not width % ranks


def tensor_parallel(subject: Subject) -> Iterator[Finding]:
    """vLLM splits heads over ranks; KV heads are split, or each is repeated on as many ranks."""
    for model, profile in subject.models():
        ranks = model.tensor_parallel_size
        heads, kv_heads = profile.num_attention_heads, profile.num_kv_heads
        if ranks == 1 or heads is None or kv_heads is None:
            continue
        uneven_kv = kv_heads % ranks and ranks % kv_heads
        if uneven_kv and not heads % ranks and "num_key_value_heads" in profile.assumed:
            yield warning(
                "tensor-parallel-heads",
                f"{model.name!r} may not split over {ranks} ranks: its config.json has no num_key_value_heads",
                "set tensor_parallel_size to 1, or check the first start",
            )
        elif heads % ranks or uneven_kv:
            what = f"{kv_heads} KV heads" if not heads % ranks else f"{heads} attention heads"
            yield violation(
                "tensor-parallel-heads",
                f"cannot split {model.name!r} over {ranks} ranks: its {what} are not divisible",
                "set tensor_parallel_size to a divisor of the head counts",
            )


def context_length(subject: Subject) -> Iterator[Finding]:
    """vLLM refuses a max_model_len above the model's own."""
    for model, profile in subject.models():
        own = profile.max_model_len
        if own is not None and model.planned_len > own:
            yield violation(
                "max-model-len",
                f"cannot serve {model.name!r} with max_model_len = {model.planned_len}: its config.json allows "
                f"{own}",
                f"set max_model_len to at most {own}",
            )


def quantization(subject: Subject) -> Iterator[Finding]:
    """vLLM refuses a method that differs from the checkpoint's; the CPU backend knows a few."""
    known = _quantizations(subject)
    for model, profile in subject.models():
        asked = model.quantization if model.quantization in _CPU_QUANTIZATIONS else None
        if asked and profile.quantization and asked != profile.quantization:
            yield violation(
                "quantization-differs",
                f"cannot load {model.name!r} as {asked}: its config.json says {profile.quantization}",
                f'set quantization = "{profile.quantization}", or remove it',
            )
        elif profile.quantization and profile.quantization not in known:
            yield warning(
                "quantization-cpu",
                f"{model.name!r} is quantized with {profile.quantization}; vLLM on this CPU documents "
                f"{', '.join(sorted(known))}",
                "use a checkpoint with one of these, or an unquantized one",
            )
        if profile.file_format == "gguf":
            yield warning(
                "gguf",
                f"{model.name!r} has GGUF files, which vLLM 0.32 cannot load without a plugin",
                'use safetensors, or engine.kind = "command" with a server that reads GGUF',
            )


def _quantizations(subject: Subject) -> frozenset[str]:
    amx = "amx_tile" in subject.topology.cpu.flags
    return _CPU_QUANTIZATIONS | (_AMX_QUANTIZATIONS if amx else frozenset())


def weights_format(subject: Subject) -> Iterator[Finding]:
    """Tensorizer's files (--load-format tensorizer) have no header that is read here."""
    for model, profile in subject.models():
        if profile.file_format == "tensors":
            yield warning(
                "weights-format",
                f"the weights of {model.name!r} are *.tensors files, whose headers are not read: the plan counts the "
                "size of the files",
                'add "--load-format", "tensorizer" to engine.args, and check the memory at the first start',
            )


def kv_cache_type(subject: Subject) -> Iterator[Finding]:
    """The CPU's attention stores K and V in the model's type or in fp8, a latent in the model's type only."""
    for model, profile in subject.models():
        asked = model.kv_cache_dtype
        if asked in {None, "auto"}:
            continue
        if profile.mla or asked not in KV_ELEMENT_BYTES:
            yield violation(
                "kv-cache-dtype",
                f"cannot keep the KV cache of {model.name!r} as {asked!r}: vLLM on CPU takes "
                + ("auto for latent attention" if profile.mla else "auto, fp8, fp8_e4m3 and fp8_e5m2"),
                "remove --kv-cache-dtype from engine.args",
            )


def kv_whole_gib(subject: Subject) -> Iterator[Finding]:
    """Older vLLM takes VLLM_CPU_KVCACHE_SPACE only, an integer of GiB."""
    if not lacks_kv_bytes(subject.facts):
        return
    for model, _ in subject.models():
        asked = model.kv_bytes
        if asked is not None and asked % GIB:
            yield warning(
                "kv-not-whole-gib",
                f"{model.kv_source} is {format_size(asked)}, but vLLM {subject.facts.engine.get('vllm', '')} accepts "
                f"whole GiB only: {model.name!r} gets {max(1, asked // GIB)} GiB",
                f'set memory.kv_cache = "{max(1, asked // GIB)}GiB"',
            )


def sliding_window(subject: Subject) -> Iterator[Finding]:
    """With the hybrid manager off, sliding layers beside full ones keep every token (kv_cache_utils.py)."""
    for model, profile in subject.models():
        if not model.hybrid and {LayerKind.SLIDING, LayerKind.FULL} <= {
            its.kind for its in profile.kv_layers
        }:
            yield warning(
                "sliding-window-full",
                f"{model.name!r} has layers with a window of {profile.sliding_window} tokens, but with "
                "--disable-hybrid-kv-cache-manager they keep all of them",
                "remove --disable-hybrid-kv-cache-manager from engine.args",
            )


def unknown_state(subject: Subject) -> Iterator[Finding]:
    """A recurrent layer whose state config.json does not describe is not in the ledger."""
    for model, profile in subject.models():
        if _has_unknown_state(profile):
            yield warning(
                "state-unknown",
                f"{model.name!r} has recurrent layers whose state its config.json does not describe: the plan counts "
                "none for them",
                "set memory.kv_cache, and check the memory at the first start",
            )


def _has_unknown_state(profile: ModelProfile) -> bool:
    return any(its.kind is LayerKind.STATE and not its.state_bytes for its in profile.layers)


MODEL_RULES: Final[tuple[Rule, ...]] = (
    block_size, latent_attention, head_size, float16_on_zen, tensor_parallel, context_length, quantization,
    kv_cache_type, kv_whole_gib, sliding_window, unknown_state, assumed_sizes, stale_defaults, engine_said,
    engine_not_asked, weights_format,
)  # fmt: skip


# --- Rules on vLLM with ZenTorch. ---

_FP8: Final = "fp8"


def _uses_zentorch(subject: Subject) -> bool:
    """vLLM uses its Zen platform on such a CPU with an importable zentorch (vllm/platforms/__init__.py)."""
    return subject.topology.cpu.is_zen and "zentorch" in subject.facts.engine


def kv_type(subject: Subject) -> Iterator[Finding]:
    """AMD, ZenDNN-pytorch-plugin, skills/serving-llms-on-epyc/reference.md, "Known quirks": "KV cache is bf16-only
    on zentorch CPU (no fp8 KV)". vLLM 0.32 itself takes fp8 there (v1/attention/backends/cpu_attn.py)."""
    if not _uses_zentorch(subject):
        return
    for model, profile in subject.models():
        asked = model.kv_cache_dtype
        by_checkpoint = asked in {None, "auto"}
        its = profile.kv_cache_dtype if by_checkpoint else str(asked)
        if its.startswith(_FP8):
            yield violation(
                "kv-fp8-on-zentorch",
                f"cannot keep the KV cache of {model.name!r} as {its!r} with ZenTorch {subject.facts.engine['zentorch']}: "
                "AMD documents a bfloat16 KV cache only",
                "its checkpoint asks for that type: add --kv-cache-dtype bfloat16 to engine.args"
                if by_checkpoint
                else "remove --kv-cache-dtype from engine.args",
            )


def tied_embeddings(subject: Subject) -> Iterator[Finding]:
    """Without prepacking, ZenDNN may repack the weight that zentorch_linear_unary is given, in place; with tied
    embeddings that weight is read again as the other of the two (vllm/model_executor/layers/utils.py, 0.32:
    dispatch_cpu_unquantized_gemm keeps a view of it). Greedy tokens then differ from vLLM's without ZenTorch.
    zentorch 2.13.0.1 on a Zen 5 repacks in place with ZENDNNL_MATMUL_WEIGHT_CACHE=2 and not with its default of 1."""
    if not _uses_zentorch(subject):
        return
    for model in subject.config.models:
        source, profile = _prepack_off(subject, model), subject.profiles.get(model.name, UNKNOWN)
        if profile.tied_embeddings and source is not None:
            yield violation(
                "tied-without-prepack",
                f"cannot run {model.name!r} with ZenTorch and {source}: its output projection is its embedding "
                "(tie_word_embeddings), which ZenTorch then overwrites, and it answers with wrong tokens",
                f"remove {source}: prepacking is vLLM's default",
            )


def _prepack_off(subject: Subject, model: Model) -> str | None:
    """The setting that switches prepacking off, for messages; None when prepacking is on. Precedence as in
    engines/vllm/launch.py: engine.env, then [[models]], then the inherited environment."""
    by_env = subject.config.engine.env.get(WEIGHT_PREPACK)
    if by_env is not None:
        return f"{WEIGHT_PREPACK}={by_env} in engine.env" if _is_zero(by_env) else None
    if model.weight_prepack is not None:
        return None if model.weight_prepack else "weight_prepack = false"
    inherited = subject.facts.engine.get(WEIGHT_PREPACK)
    if inherited is not None and _is_zero(inherited):
        return f"{WEIGHT_PREPACK}={inherited} in the environment of this process"
    return None


def _is_zero(text: str) -> bool:
    """As vLLM reads it: bool(int(text)) (vllm/envs.py, 0.32). vLLM exits with an error for other text."""
    try:
        return int(text) == 0
    except ValueError:
        return False


ZENTORCH_RULES: Final[tuple[Rule, ...]] = (kv_type, tied_embeddings)
