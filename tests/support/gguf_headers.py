"""GGUF files, as llama.cpp writes them; the tensors' data is a hole."""

from __future__ import annotations

import os
import struct
from math import prod
from pathlib import Path

# Elements and bytes of one block, by tensor type (ggml/src/ggml-common.h); of others one byte for each element.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34), 12: (256, 144), 14: (256, 210), 20: (32, 18), 39: (32, 17),
    40: (64, 36), 41: (128, 18),
}  # fmt: skip
ALIGNMENT = 32


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


def write_gguf(
    file: Path,
    *tensors: tuple[str, tuple[int, ...], int],
    extra: tuple[bytes, ...] = (),
    version: int = 3,
    entries: list[bytes] | None = None,
) -> Path:
    """A file as llama.cpp writes it. `entries`: its metadata, where it is no Llama's."""
    entries = entries or [
        entry("general.architecture", 8, text("llama")),
        entry("llama.block_count", 4, struct.pack("<I", 2)),
        entry("llama.embedding_length", 4, struct.pack("<I", 256)),
        entry("llama.attention.head_count", 4, struct.pack("<I", 4)),
        entry("llama.attention.head_count_kv", 9, struct.pack("<IQ2I", 4, 2, 2, 2)),
        entry("llama.context_length", 10, struct.pack("<Q", 4096)),
        entry("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b")),
        *extra,
    ]
    infos, end = [], 0
    for name, shape, kind in tensors:
        begin = _aligned(end)
        infos.append(text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, begin))
        elements, size = _BLOCKS.get(kind, (1, 1))
        end = begin + prod(shape) // elements * size
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(entries)) + b"".join(entries + infos)
    file.write_bytes(head)
    if infos:
        os.truncate(file, _aligned(len(head)) + end)
    return file


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
