"""A model with random weights, once as vLLM reads it and once as one GGUF file: the shape of a Qwen2, made with numpy.

The vocabulary is the 256 bytes and words that no text gives, so that a byte is a token; only its size matters here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np

from launcher.engines.llama_cpp import tiny_gguf
from launcher.engines.llama_cpp.tiny_gguf import CONTROL, NORMAL, Tensor, byte_characters, float32, gguf_name
from launcher.engines.tiny_model import bfloat16, write_safetensors

Array = np.ndarray[Any, Any]
CONTEXT: Final = 4096
HEAD: Final = 64  # values of a head
BLOCK: Final = 32  # values that share a scale in Q8_0 and Q4_0 (ggml/src/ggml-common.h)


@dataclass(frozen=True, slots=True)
class Shape:
    """Layers and widths."""

    hidden: int
    layers: int
    kv_heads: int
    feed_forward: int
    vocabulary: int

    @property
    def heads(self) -> int:
        """Heads of queries."""
        return self.hidden // HEAD

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Rows and columns of each, by the name in safetensors."""
        wide, narrow = self.hidden, self.kv_heads * HEAD
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, wide),
            "model.norm.weight": (wide,),
        }
        for layer in range(self.layers):
            found |= {
                f"model.layers.{layer}.{name}": shape
                for name, shape in (
                    ("input_layernorm.weight", (wide,)),
                    ("self_attn.q_proj.weight", (wide, wide)),
                    ("self_attn.k_proj.weight", (narrow, wide)),
                    ("self_attn.v_proj.weight", (narrow, wide)),
                    ("self_attn.o_proj.weight", (wide, wide)),
                    ("post_attention_layernorm.weight", (wide,)),
                    ("mlp.gate_proj.weight", (self.feed_forward, wide)),
                    ("mlp.up_proj.weight", (self.feed_forward, wide)),
                    ("mlp.down_proj.weight", (wide, self.feed_forward)),
                    ("self_attn.q_proj.bias", (wide,)),
                    ("self_attn.k_proj.bias", (narrow,)),
                    ("self_attn.v_proj.bias", (narrow,)),
                )
            }
        return found


SHAPES: Final = {
    # Qwen2.5-0.5B, 494 million parameters; and 98 million.
    "0.5b": Shape(896, 24, 2, 4864, 151_936),
    "0.1b": Shape(768, 12, 2, 2048, 32_000),
    "tiny": Shape(128, 2, 2, 256, 1024),
}


def values_of(name: str, shape: tuple[int, ...]) -> Array:
    """The same for the same name, whatever the format: 1 for norms, 0 for biases, else normal with deviation 0.02."""
    if len(shape) == 1:
        return np.full(shape, 0.0 if name.endswith("bias") else 1.0, np.float32)
    seed = np.random.SeedSequence(list(name.encode()))
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(0.02)


# --- As vLLM reads it. ---


def write_folder(shape: Shape, folder: Path) -> None:
    """config.json, model.safetensors in bfloat16, and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "bfloat16",
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "intermediate_size": shape.feed_forward,
        "vocab_size": shape.vocabulary, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True, "use_sliding_window": False,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    words = vocabulary(shape)
    added = [
        {"id": n, "content": words[n], "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for n in (0, 1)
    ]  # fmt: skip
    tokenizer = {
        "version": "1.0", "added_tokens": added, "normalizer": None, "post_processor": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": {word: n for n, word in enumerate(words)}, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": words[0], "eos_token": words[1],
            "model_max_length": CONTEXT,
        })
    )  # fmt: skip
    shapes = shape.tensors()
    write_safetensors(folder / "model.safetensors", shapes, (values_of(*each) for each in shapes.items()))


def vocabulary(shape: Shape) -> list[str]:
    """Two special tokens, the 256 bytes as GPT-2 writes them, and words."""
    words = ["<|begin|>", "<|end|>", *byte_characters()]
    return words + [f"w{n}" for n in range(shape.vocabulary - len(words))]


# --- As one GGUF file. ---


def q8_0(values: Array) -> Array:
    """Blocks of a half-float scale and 32 signed bytes (ggml-quants.c, quantize_row_q8_0_ref)."""
    blocks = values.reshape(-1, BLOCK)
    scale = np.abs(blocks).max(1, keepdims=True) / 127
    whole = np.rint(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0)).astype(np.int8)
    return np.concatenate([scale.astype("<f2").view(np.uint8), whole.view(np.uint8)], axis=1)


def q4_0(values: Array) -> Array:
    """Blocks of a half-float scale and 32 values of four bits, the first 16 in the low halves (quantize_row_q4_0_ref)."""
    blocks = values.reshape(-1, BLOCK)
    furthest = np.take_along_axis(blocks, np.abs(blocks).argmax(1, keepdims=True), 1)
    scale = furthest / -8
    shares = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale != 0)
    four = np.minimum(shares + 8.5, 15).astype(np.uint8)
    low, high = four[:, : BLOCK // 2], four[:, BLOCK // 2 :]
    return np.concatenate([scale.astype("<f2").view(np.uint8), low | high << 4], axis=1)


# The number of a type (enum ggml_type), the bytes of a value, and the bytes of all.
TYPES: Final[dict[str, tuple[int, Fraction, Callable[[Array], Array]]]] = {
    "Q4_0": (2, Fraction(18, BLOCK), q4_0), "Q8_0": (8, Fraction(34, BLOCK), q8_0), "BF16": (30, Fraction(2), bfloat16),
}  # fmt: skip


def write_gguf(shape: Shape, kind: str, file: Path) -> None:
    """Matrices of type `kind`; norms and biases are float32."""
    number, value_bytes, quantise = TYPES[kind]

    def tensor(name: str, size: tuple[int, ...]) -> Tensor:
        if len(size) == 1:
            return float32(gguf_name(name), values_of(name, size))
        stored = int(size[0] * size[1] * value_bytes)
        return Tensor(
            gguf_name(name), size, number, stored, lambda: quantise(values_of(name, size)).tobytes()
        )

    tiny_gguf.write_gguf(file, _keys(shape), [tensor(*its) for its in shape.tensors().items()])


def _keys(shape: Shape) -> dict[str, Any]:
    words = vocabulary(shape)
    return {
        "general.architecture": "qwen2",
        "general.name": "random",
        "qwen2.block_count": shape.layers,
        "qwen2.context_length": CONTEXT,
        "qwen2.embedding_length": shape.hidden,
        "qwen2.feed_forward_length": shape.feed_forward,
        "qwen2.attention.head_count": shape.heads,
        "qwen2.attention.head_count_kv": shape.kv_heads,
        "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen2.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, *[NORMAL] * (len(words) - 2)],
        "tokenizer.ggml.merges": [
            f"{words[2]} {words[3]}"
        ],  # llama.cpp wants one; it gives no token of the list
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }
