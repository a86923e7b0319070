"""Headers of GGUF files, as llama.cpp writes them; the tensors have no data."""

from __future__ import annotations

import struct
from pathlib import Path


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
    """A header as llama.cpp writes it; the data is never read. `entries`: its metadata, where it is no Llama's."""
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
    infos = [
        text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        + struct.pack("<IQ", kind, 0)
        for name, shape, kind in tensors
    ]  # fmt: skip
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(entries))
    file.write_bytes(head + b"".join(entries) + b"".join(infos))
    return file
