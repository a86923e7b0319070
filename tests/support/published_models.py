"""Descriptions and weight headers of the models in launcher/measure/bench/published.toml, as they are published."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Tensors = Iterator[tuple[str, tuple[int, ...]]]


def _described(architecture: str, kind: str, sizes: tuple[int, ...], **more: Any) -> Json:
    """`sizes`: hidden, intermediate, layers, heads, KV heads, vocabulary, longest context."""
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
        "max_position_embeddings",
    )  # fmt: skip
    return {
        "architectures": [architecture], "model_type": kind, "torch_dtype": "bfloat16",
        **dict(zip(names, sizes, strict=True)), **more,
    }  # fmt: skip


def _qwen3(*sizes: int, tied: bool = True) -> Json:
    return _described("Qwen3ForCausalLM", "qwen3", sizes, head_dim=128, tie_word_embeddings=tied)


def _llama(*sizes: int, head_dim: int = 128, tied: bool = False) -> Json:
    rope = {
        "rope_type": "llama3", "factor": 32.0 if tied else 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    return _described(
        "LlamaForCausalLM", "llama", sizes, head_dim=head_dim, tie_word_embeddings=tied, rope_scaling=rope
    )


def _gemma3(text: Json) -> Json:
    """The parts as published: what Gemma3TextConfig fills in is left out."""
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        "num_attention_heads": 16, "image_size": 896, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    rope = {"rope_type": "linear", "factor": 8.0}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
        "mm_tokens_per_image": 256, "vision_config": vision,
        "text_config": {"model_type": "gemma3_text", "rope_scaling": rope, "sliding_window": 1024, **text},
    }  # fmt: skip


_PHI_ROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48}

CONFIGS: dict[str, Json] = {
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32, 8, 151936, 40960, tied=False),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, 8, 151936, 40960),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, 8, 151936, 40960),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, 8, 151936, 40960),
    "Llama-3.2-1B": _llama(2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64, tied=True),
    "Llama-3.2-3B": _llama(3072, 8192, 28, 24, 8, 128256, 131072, tied=True),
    "Llama-3.1-8B": _llama(4096, 14336, 32, 32, 8, 128256, 131072),
    "Llama-3.3-70B": _llama(8192, 28672, 80, 64, 8, 128256, 131072),
    "gemma-3-1b-it": _described(
        "Gemma3ForCausalLM", "gemma3_text", (1152, 6912, 26, 4, 1, 262144, 32768), head_dim=256, sliding_window=512,
        sliding_window_pattern=6, query_pre_attn_scalar=256,
    ),
    "gemma-3-4b-it": _gemma3({"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}),
    "gemma-3-12b-it": _gemma3(
        {
            "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16,
            "num_key_value_heads": 8,
        }
    ),
    "phi-4": _described(
        "Phi3ForCausalLM", "phi3", (5120, 17920, 40, 40, 10, 100352, 16384), tie_word_embeddings=False
    ),
    "Phi-4-mini-instruct": _described(
        "Phi3ForCausalLM", "phi3", (3072, 8192, 32, 24, 8, 200064, 131072), tie_word_embeddings=True,
        original_max_position_embeddings=4096, partial_rotary_factor=0.75, rope_scaling=_PHI_ROPE, sliding_window=262144,
    ),
    "Mixtral-8x7B": _described(
        "MixtralForCausalLM", "mixtral", (4096, 14336, 32, 32, 8, 32000, 32768), num_local_experts=8,
        num_experts_per_tok=2, sliding_window=None, tie_word_embeddings=False,
    ),
    "Qwen2.5-3B": _described(
        "Qwen2ForCausalLM", "qwen2", (2048, 11008, 36, 16, 2, 151936, 32768), tie_word_embeddings=True,
        use_sliding_window=False, sliding_window=32768, max_window_layers=36,
    ),
    "Qwen2.5-7B": _described(
        "Qwen2ForCausalLM", "qwen2", (3584, 18944, 28, 28, 4, 152064, 131072), tie_word_embeddings=False,
        use_sliding_window=False, sliding_window=131072, max_window_layers=28,
    ),
    "gpt-j-6b": {
        "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16,
        "n_positions": 2048, "n_inner": None, "rotary_dim": 64, "vocab_size": 50400, "activation_function": "gelu_new",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
}  # fmt: skip

# Weights of the vision tower and of the projector to the text's width.
_TOWER = 412_442_352


def _tensors(config: Json) -> Tensors:
    if config["model_type"] == "gptj":
        return _gptj(config)
    return _decoder(config)


def _gptj(its: Json) -> Tensors:
    wide, vocabulary = its["n_embd"], its["vocab_size"]
    yield "transformer.wte.weight", (vocabulary, wide)
    yield "transformer.ln_f.weight", (2 * wide,)
    yield "lm_head.weight", (vocabulary, wide)
    yield "lm_head.bias", (vocabulary,)
    for layer in range(its["n_layer"]):
        at = f"transformer.h.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield f"{at}.attn.{name}.weight", (wide, wide)
        yield f"{at}.mlp.fc_in.weight", (4 * wide, wide)
        yield f"{at}.mlp.fc_out.weight", (wide, 4 * wide)
        yield f"{at}.biases", (4 * wide + 3 * wide,)


def _decoder(config: Json) -> Tensors:
    gemma = config["model_type"].startswith("gemma3")
    its = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208} if gemma else {}
    its = {**its, **config.get("text_config", config)}
    head = its.get("head_dim") or (256 if gemma else its["hidden_size"] // its["num_attention_heads"])
    wide, vocabulary = its["hidden_size"], its["vocab_size"]
    prefix = "language_model.model" if "vision_config" in config else "model"
    yield f"{prefix}.embed_tokens.weight", (vocabulary, wide)
    yield f"{prefix}.norm.weight", (wide,)
    if not (gemma or its.get("tie_word_embeddings")):
        yield "lm_head.weight", (vocabulary, wide)
    if "vision_config" in config:
        yield "vision_tower.all", (_TOWER,)
        yield "multi_modal_projector.all", (1152 * wide + 1152,)
    for layer in range(its["num_hidden_layers"]):
        yield from _layer(f"{prefix}.layers.{layer}", its, head)


def _layer(at: str, its: Json, head: int) -> Tensors:
    gemma, kind = its["model_type"].startswith("gemma3"), its["model_type"]
    wide, inner = its["hidden_size"], its["intermediate_size"]
    query, key = its["num_attention_heads"] * head, its["num_key_value_heads"] * head
    projections = {"q_proj": query, "k_proj": key, "v_proj": key}
    if kind == "phi3":
        projections = {"qkv_proj": query + 2 * key}
    for name, rows in projections.items():
        yield f"{at}.self_attn.{name}.weight", (rows, wide)
    yield f"{at}.self_attn.o_proj.weight", (wide, query)
    experts = its.get("num_local_experts")
    if experts:
        yield f"{at}.block_sparse_moe.gate.weight", (experts, wide)
    for place in [f"block_sparse_moe.experts.{expert}" for expert in range(experts)] if experts else ["mlp"]:
        yield f"{at}.{place}.gate_up_proj.weight", (2 * inner, wide)
        yield f"{at}.{place}.down_proj.weight", (wide, inner)
    if kind == "qwen2":
        yield f"{at}.self_attn.biases", (query + 2 * key,)
    yield f"{at}.norms", ((4 if gemma else 2) * wide + (2 * head if gemma or kind == "qwen3" else 0),)


def write(name: str, folder: Path) -> Path:
    """The model's folder, with the headers of its weights; the weights are a hole."""
    folder.mkdir(parents=True)
    config = CONFIGS[name]
    (folder / "config.json").write_text(json.dumps(config))
    header: Json = {}
    end = 0
    for tensor, shape in _tensors(config):
        begin, end = end, end + 2 * prod(shape)
        header[tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(file, 8 + len(raw) + end)
    return folder
