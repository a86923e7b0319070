"""Rules on vLLM with ZenTorch. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from launcher.config.schema import Model
from launcher.engines.arguments import value_of
from launcher.plan import Finding, violation
from launcher.planning.rules import Rule, Subject

WEIGHT_PREPACK: Final = "VLLM_ZENTORCH_WEIGHT_PREPACK"
_FP8: Final = "fp8"


def _uses_zentorch(subject: Subject) -> bool:
    """vLLM uses its Zen platform on such a CPU with an importable zentorch (vllm/platforms/__init__.py)."""
    return subject.topology.cpu.is_zen and subject.facts.zentorch is not None


def kv_type(subject: Subject) -> Iterator[Finding]:
    """AMD, ZenDNN-pytorch-plugin, skills/serving-llms-on-epyc/reference.md, "Known quirks": "KV cache is bf16-only
    on zentorch CPU (no fp8 KV)". vLLM 0.32 itself takes fp8 there (v1/attention/backends/cpu_attn.py)."""
    if not _uses_zentorch(subject):
        return
    asked = value_of(subject.config.engine.args, "--kv-cache-dtype")
    for model, profile in subject.models():
        by_checkpoint = asked in {None, "auto"}
        its = profile.kv_cache_dtype if by_checkpoint else str(asked)
        if its.startswith(_FP8):
            yield violation(
                "kv-fp8-on-zentorch",
                f"cannot keep the KV cache of {model.name!r} as {its!r} with ZenTorch {subject.facts.zentorch}: AMD "
                "documents a bfloat16 KV cache only",
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
    for model, profile in subject.models():
        source = _prepack_off(subject, model)
        if profile.tied_embeddings and source is not None:
            yield violation(
                "tied-without-prepack",
                f"cannot run {model.name!r} with ZenTorch and {source}: its output projection is its embedding "
                "(tie_word_embeddings), which ZenTorch then overwrites, and it answers with wrong tokens",
                f"remove {source}: prepacking is vLLM's default",
            )


def _prepack_off(subject: Subject, model: Model) -> str | None:
    """The setting that switches prepacking off, for messages; None when prepacking is on. Precedence as in
    engines/vllm.py: engine.env, then [[models]], then the inherited environment."""
    by_env = subject.config.engine.env.get(WEIGHT_PREPACK)
    if by_env is not None:
        return f"{WEIGHT_PREPACK}={by_env} in engine.env" if _is_zero(by_env) else None
    if model.weight_prepack is not None:
        return None if model.weight_prepack else "weight_prepack = false"
    inherited = subject.facts.weight_prepack
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
