"""Folders of models: config.json and weight files."""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
WIDTH = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "F8_E4M3": 1}


def write_safetensors(file: Path, **tensors: tuple[str, list[int]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * WIDTH[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(file, 8 + len(raw) + offset)  # a hole: the data itself is never read


def model(folder: Path, config: dict[str, Any] | None = None, **tensors: tuple[str, list[int]]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or LLAMA))
    write_safetensors(folder / "model.safetensors", **(tensors or {"w": ("BF16", [4, 8])}))
    return str(folder)
