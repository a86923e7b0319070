"""The tiny model that vLLM reads, as one GGUF file with weights in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from launcher.engines.llama_cpp.tiny_gguf import CONTROL, NORMAL, float32, gguf_name, write_gguf
from launcher.engines.tiny_model import TEMPLATE


def write(folder: Path, file: Path) -> None:
    """The Llama that launcher.engines.tiny_model made in `folder`, as `file`."""
    config = json.loads((folder / "config.json").read_text())
    tensors = [
        float32(gguf_name(name), _values(name, tensor.float().numpy(), config))
        for name, tensor in load_file(folder / "model.safetensors").items()
    ]
    write_gguf(file, {**_shape(config), **_tokenizer(folder, config)}, tensors)


def _values(name: str, values: np.ndarray[Any, Any], config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """llama.cpp rotates neighbours, transformers halves: rows of Q and K change places (convert_hf_to_gguf.py)."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return values
    n, (rows, columns) = config[heads], values.shape
    return values.reshape(n, 2, rows // n // 2, columns).swapaxes(1, 2).reshape(rows, columns).copy()


def _shape(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.rope.dimension_count": config["head_dim"],
        "llama.rope.freq_base": float(config["rope_theta"]),
        "llama.vocab_size": config["vocab_size"],
    }


def _tokenizer(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    whole = json.loads((folder / "tokenizer.json").read_text())
    words = sorted(whole["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["id"] for token in whole["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [word for word, _ in words],
        "tokenizer.ggml.token_type": [CONTROL if i in special else NORMAL for _, i in words],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in whole["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.padding_token_id": config["pad_token_id"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
