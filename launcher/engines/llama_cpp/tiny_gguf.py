"""Makes a tiny GGUF model with random weights to try the launcher with llama.cpp.

    python -m launcher.engines.llama_cpp.tiny_gguf OUT_FILE

A two-layer Llama of 1.6 million parameters whose tokens are bytes and the beginnings of a few words; nothing is
downloaded, and numpy is all that it needs. Its responses are random words.
"""

from __future__ import annotations

import argparse
import os
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from msgspec import Struct

from launcher.engines.tiny_model import (
    CONTEXT,
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    SPECIAL,
    TEMPLATE,
    Weights,
    random_weights,
)

# GGUF (ggml/docs/gguf.md), version 3: types of values, alignment of tensors.
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
ALIGNMENT: Final = 32
# Tensors as transformers names them, and as GGUF does (gguf-py/gguf/tensor_mapping.py).
_NAMES: Final = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
# llama_token_type
NORMAL, CONTROL = 1, 3

# Changed when the model changes; a file of another recipe is replaced.
_RECIPES: Final = "numa-launcher tiny model, GGUF recipe"
RECIPE: Final = f"{_RECIPES} 1"
WORDS: Final = (
    "a", "and", "answers", "are", "at", "balance", "bandwidth", "between", "binds", "by", "cache", "channels", "chip",
    "chips", "core", "cores", "each", "every", "fast", "from", "hello", "in", "instance", "instances", "is", "its",
    "keeps", "latency", "layer", "layers", "light", "local", "machine", "many", "memory", "near", "node", "nodes",
    "of", "on", "one", "pages", "pinned", "queue", "quick", "reads", "remote", "requests", "runs", "serves", "shares",
    "slot", "small", "socket", "sockets", "starts", "steady", "streams", "tensors", "that", "the", "them", "threads",
    "to", "token", "tokens", "two", "waits", "warm", "weights", "where", "while", "with", "words", "works", "your",
)  # fmt: skip


# --- GGUF files. ---


class Tensor(Struct, frozen=True):
    """A tensor of a file; its values are made when they are written."""

    name: str
    shape: tuple[int, ...]
    """In numpy's order."""
    type: int
    """Its number in enum ggml_type."""
    size: int
    """Bytes of `data`."""
    data: Callable[[], bytes]


def float32(name: str, values: Weights) -> Tensor:
    return Tensor(name, values.shape, 0, values.nbytes, values.astype("<f4").tobytes)


def write_gguf(file: Path, pairs: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
    """Writes `file`: metadata of bool, int (u32), float (f32), str, and lists of str or int (i32); then the tensors."""
    with file.open("wb") as out:
        out.write(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(pairs)))
        for key, value in pairs.items():
            _put_string(out, key)
            _put(out, value)
        offset = 0
        for its in tensors:
            _put_string(out, its.name)
            shape = its.shape[::-1]
            out.write(struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, its.type, offset))
            offset += -(-its.size // ALIGNMENT) * ALIGNMENT
        for its in tensors:
            out.write(bytes(-out.tell() % ALIGNMENT))
            out.write(its.data())
        out.write(bytes(-out.tell() % ALIGNMENT))


def _put(out: BinaryIO, value: Any) -> None:
    match value:
        case bool():
            out.write(struct.pack("<I?", _BOOL, value))
        case int():
            out.write(struct.pack("<II", _U32, value))
        case float():
            out.write(struct.pack("<If", _F32, value))
        case str():
            out.write(struct.pack("<I", _STRING))
            _put_string(out, value)
        case [str(), *_]:
            out.write(struct.pack("<IIQ", _ARRAY, _STRING, len(value)))
            for word in value:
                _put_string(out, word)
        case _:
            out.write(struct.pack(f"<IIQ{len(value)}i", _ARRAY, _I32, len(value), *value))


def _put_string(out: BinaryIO, text: str) -> None:
    data = text.encode()
    out.write(struct.pack("<Q", len(data)) + data)


# --- The model. ---


def make(file: Path) -> None:
    """Writes the model to `file` atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    os.close(descriptor)
    building = Path(name)
    try:
        tokens, merges = vocabulary()
        # Tokens that are no whole word are hardly ever chosen.
        words = {"Ġ" + word for word in WORDS}
        weights = random_weights(len(tokens), (i for i, token in enumerate(tokens) if token not in words))
        tensors = [float32(gguf_name(name), values) for name, values in weights.items()]
        write_gguf(building, _metadata(tokens, merges), tensors)
        building.chmod(0o644)  # mkstemp creates it for the owner only; the service runs as another user
        building.rename(file)
    finally:
        building.unlink(missing_ok=True)


def _begins_with(file: Path, recipe: str) -> bool:
    """Whether `file` is a model of this or, by the beginning of its name, any recipe."""
    try:
        with file.open("rb") as found:
            return recipe.encode() in found.read(256)
    except OSError:
        return False


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE: every byte, and the words with all their beginnings."""
    tokens = [*SPECIAL, *byte_characters()]
    merges = []
    for word in WORDS:
        text = "Ġ" + word  # U+0120 is the blank before it
        for end in range(2, len(text) + 1):
            if text[:end] not in tokens:
                tokens.append(text[:end])
                merges.append(f"{text[: end - 1]} {text[end - 1]}")
    return tokens, merges


def byte_characters() -> list[str]:
    """The character that stands for each byte in GPT-2's vocabulary (bytes_to_unicode, openai/gpt-2, encoder.py): itself if
    printable in Latin-1, else one from U+0100 on."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return [chr(byte) if byte in itself else chr(0x100 + others.index(byte)) for byte in range(256)]


def _metadata(tokens: list[str], merges: list[str]) -> dict[str, Any]:
    return {
        "general.name": RECIPE,
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": CONTEXT,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": HEADS // 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.dimension_count": HIDDEN // HEADS,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if token in SPECIAL else NORMAL for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": SPECIAL.index("<s>"),
        "tokenizer.ggml.eos_token_id": SPECIAL.index("</s>"),
        "tokenizer.ggml.padding_token_id": SPECIAL.index("<pad>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def gguf_name(name: str) -> str:
    """The name in GGUF of a tensor that has this one in transformers."""
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.{kind}"


def main(arguments: list[str] | None = None) -> int:
    """0: the file is the model. 2: it is another file."""
    parser = argparse.ArgumentParser(
        description="Make a tiny random-weight GGUF model for trying things out."
    )
    parser.add_argument("out_file", type=Path, metavar="OUT_FILE")
    file = parser.parse_args(arguments).out_file.absolute()
    if _begins_with(file, RECIPE):
        print(f"{file}: the tiny model is there already")
        return 0
    if file.exists() and not _begins_with(file, _RECIPES):
        print(f"cannot make the tiny model: {str(file)!r} is another file", file=sys.stderr)
        print("choose a path that does not exist", file=sys.stderr)
        return 2
    make(file)
    print(f"{file}: a tiny model with random weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
