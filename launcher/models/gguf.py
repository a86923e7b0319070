"""Headers of *.gguf files: metadata and tensor sizes (github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3).

vLLM 0.32 itself loads none; a plugin may. llama.cpp's server loads nothing else.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Sequence
from io import SEEK_END
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

from msgspec import Struct

from launcher.models.layers import MAX_LAYERS
from launcher.models.weight_files import Tensor, open_model_file

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
# Scalars of metadata: struct format by type number.
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_MATRIX: Final = 2
_ARRAY: Final = 9
# Elements and bytes of one block, by tensor type (ggml/src/ggml-common.h, gguf-py/gguf/constants.py). Without 42, Q2_0: 64
# elements in llama.cpp, 128 in forks that write the same number.
_BLOCKS: Final = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18),
}  # fmt: skip
# Types of matrices that llama.cpp reorders for a CPU with AVX2 where their rows are a multiple of 8 (ggml/src/ggml-cpu/
# repack.cpp): Q4_0, Q4_K, IQ4_NL, MXFP4. Seen with build 11549, which leaves Q2_K to Q8_0 beside them as they are.
_REPACKED: Final = frozenset({2, 12, 20, 39})
_REPACKED_ROWS: Final = 8
# Limit of the header's size: a vocabulary of a million words takes about 30 MB.
_MAX_HEADER_BYTES: Final = 512 * 1024**2
# Arrays within arrays: llama.cpp takes none (ggml/src/gguf.cpp).
_MAX_NESTING: Final = 16
# GGUF_DEFAULT_ALIGNMENT (ggml/include/gguf.h).
_ALIGNMENT: Final = 32
# GGUF's name -> config.json's name.
_KEYS: Final = {
    "block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "embedding_length": "hidden_size",
    "attention.key_length": "head_dim", "context_length": "max_position_embeddings",
    "attention.sliding_window": "sliding_window", "attention.kv_lora_rank": "kv_lora_rank",
    "feed_forward_length": "intermediate_size", "rope.dimension_count": "qk_rope_head_dim",
}  # fmt: skip

# Tensors that only a recurrent layer has: Mamba and gated delta nets, short convolutions, RWKV (llama-arch.cpp).
_RECURRENT: Final = re.compile(r"blk\.(?P<layer>\d{1,5})\.(?:ssm_|shortconv\.|time_mix_).*")
_KEYS_OF_LAYER: Final = re.compile(r"blk\.(?P<layer>\d{1,5})\.attn_(?:k|k_b|kv_a_mqa)\.weight")
_STATE_ELEMENT_BYTES: Final = 4
# LLAMA_POOLING_TYPE_LAST (include/llama.h).
_POOLING_LAST: Final = 3
# Architectures without a KV cache (src/llama-model.cpp, create_memory; build 11434).
_WITHOUT_CACHE: Final = {
    "bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe", "neo-bert", "eurobert", "modern-bert",
    "gemma-embedding", "dream", "llada", "llada-moe", "rnd1", "clef",
}  # fmt: skip

# GGUF's architecture -> config.json's model_type, where it decides more than sizes.
_MODEL_TYPES: Final = {"deepseek2": "deepseek_v2"}


# Architectures whose sliding layers keep the tokens of their window alone, and of how many layers in a row the last one is
# full where the header does not say it (src/models/*.cpp: swa_type, set_swa_pattern). Seen with build 11549, which ignores
# the window in the header of a Llama. There are more; their layers are planned as full ones.
_WINDOWED: Final = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}


class Gguf(Struct, frozen=True):
    metadata: dict[str, Any]
    """Scalars and strings; arrays of numbers as lists, arrays of strings (the vocabulary) as their length."""
    tensors: tuple[Tensor, ...]
    repacked: frozenset[str] = frozenset()
    """Names of the matrices that llama.cpp holds in an order of its own, for a CPU with AVX2."""
    unknown_types: frozenset[int] = frozenset()
    """Types of tensors whose size is taken from the places of their data in the file."""

    @property
    def describes_text(self) -> bool:
        """It has a language model's metadata: not the later parts of a split model, nor an encoder of pictures (mmproj)."""
        return f"{self.metadata.get('general.architecture')}.block_count" in self.metadata

    def of_architecture(self, key: str) -> Any:
        """The value of a key that begins with the name of the architecture; None without it."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}")

    def number(self, key: str) -> int | None:
        """A number of the architecture, such as "ssm.state_size"; of a list, one for each layer, the largest."""
        value = self.of_architecture(key)
        found = max(value, default=None) if isinstance(value, list) else value
        return int(found) if isinstance(found, int) else None

    @property
    def tokenizer_entries(self) -> int:
        """Words and merges of the tokenizer."""
        keys = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
        return sum(n for key in keys if isinstance(n := self.metadata.get(key), int))

    @property
    def splits_inputs(self) -> bool:
        """An embedding is made from the last token."""
        return self.number("pooling_type") == _POOLING_LAST

    @property
    def computed_whole(self) -> bool:
        """llama.cpp keeps no KV cache of it."""
        return self.metadata.get("general.architecture") in _WITHOUT_CACHE

    @property
    def keeps_windows(self) -> bool:
        """Sliding layers keep the tokens of their window alone (src/llama-kv-cache-iswa.cpp)."""
        return self.metadata.get("general.architecture") in _WINDOWED and bool(
            self.number("attention.sliding_window")
        )

    def _layer_types(self) -> list[str]:
        """The kind of each layer under config.json's names, for `keeps_windows`. Raises ValueError for a pattern of other
        layers."""
        pattern = self.of_architecture("attention.sliding_window_pattern")
        layers = range(min(self.number("block_count") or 0, MAX_LAYERS))
        if pattern is None:
            pattern = _WINDOWED[str(self.metadata["general.architecture"])]
        if isinstance(pattern, list) and len(pattern) == len(layers):
            slides = [bool(its) for its in pattern]
        elif isinstance(pattern, int) and pattern >= 0:
            slides = [not pattern or layer % pattern < pattern - 1 for layer in layers]
        else:
            raise ValueError(f"attention.sliding_window_pattern of {len(layers)} layers is {pattern!r:.60}")
        return ["sliding_attention" if its else "full_attention" for its in slides]

    @property
    def keeps_latent(self) -> bool:
        """llama.cpp keeps one latent of a token (src/llama-hparams.cpp, is_mla), and no V beside it (src/llama-kv-cache.cpp,
        has_v)."""
        return bool(self.number("attention.key_length_mla") and self.number("attention.value_length_mla"))

    @property
    def recurrent_widths(self) -> tuple[int, int]:
        """The widths of a recurrent layer and of its convolution; zeros without."""
        inner, state = self.number("ssm.inner_size") or 0, self.number("ssm.state_size") or 0
        return inner, inner + 2 * (self.number("ssm.group_count") or 0) * state

    @property
    def state_bytes(self) -> int | None:
        """The recurrent state of one sequence in one layer, in 32-bit numbers (src/llama-hparams.cpp, n_embd_r and n_embd_s;
        src/llama-model.cpp, recurrent_type_r and _s; build 11434). None where the header does not give it."""
        width, heads = self.number("embedding_length") or 0, self.number("attention.head_count") or 0
        kernel = self.number("ssm.conv_kernel")
        if head := self.number("wkv.head_size"):  # RWKV
            # llama.cpp's default for RWKV 6 (src/models/rwkv6.cpp).
            return width * (head + (self.number("token_shift_count") or 2)) * _STATE_ELEMENT_BYTES
        if taps := self.number("shortconv.l_cache"):  # LFM2
            return width * (taps - 1) * _STATE_ELEMENT_BYTES
        if head := self.number("kda.head_dim"):  # Kimi delta attention
            return heads * head * (3 * ((kernel or 4) - 1) + head) * _STATE_ELEMENT_BYTES
        inner, state = self.number("ssm.inner_size"), self.number("ssm.state_size")
        if not inner or not state:
            return None
        _, convolution = self.recurrent_widths
        return (max((kernel or 0) - 1, 0) * convolution + state * inner) * _STATE_ELEMENT_BYTES

    def as_config(self) -> dict[str, Any]:
        """The metadata under config.json's keys. Raises ValueError for a list without values."""
        architecture = str(self.metadata.get("general.architecture", ""))
        kind = _MODEL_TYPES.get(architecture, architecture)
        config: dict[str, Any] = {"model_type": kind, "architectures": [architecture or None]}
        for ours, theirs in _KEYS.items():
            value = self.metadata.get(f"{architecture}.{ours}")
            if value is not None:
                config[theirs] = _largest(f"{architecture}.{ours}", value)
        if self.keeps_windows:
            config["layer_types"] = self._layer_types()
        words = self.metadata.get(f"{architecture}.vocab_size") or self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(words, int):
            config["vocab_size"] = words
        return config


def recurrent_layers(tensors: Iterable[Tensor]) -> frozenset[int]:
    """The layers that keep a recurrent state, by their tensors."""
    return _layers(tensors, _RECURRENT)


def attention_layers(tensors: Iterable[Tensor], kv_heads: object) -> frozenset[int]:
    """The layers that keep keys and values: those with a projection of keys, but where the header has KV heads of each
    layer, none without (kimi-linear). A layer with a recurrent part and fused projections (qwen3next) has none."""
    found = _layers(tensors, _KEYS_OF_LAYER)
    if isinstance(kv_heads, list):
        found -= {layer for layer, heads in enumerate(kv_heads) if heads == 0}
    return found


def _layers(tensors: Iterable[Tensor], form: re.Pattern[str]) -> frozenset[int]:
    return frozenset(int(match["layer"]) for tensor in tensors if (match := form.fullmatch(tensor.name)))


def _largest(key: str, value: Any) -> Any:
    """The largest value of a list, which has one for each layer."""
    if not isinstance(value, list):
        return value
    if not value:
        raise ValueError(f"{key} is a list without values")
    return max(value)


def read_gguf(file: Path) -> Gguf:
    """The header of one file. Raises OSError; ValueError for another format or a truncated file."""
    with open_model_file(file) as stream:
        try:
            file_bytes = stream.seek(0, SEEK_END)
            stream.seek(0)
            return _read(_Reader(stream), file.name, file_bytes)
        except (struct.error, EOFError, UnicodeDecodeError) as error:
            raise ValueError(f"{file.name} ends within its header, or is corrupt: {error}") from error


class _Reader:
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._left = _MAX_HEADER_BYTES

    @property
    def position(self) -> int:
        """Bytes that are read."""
        return _MAX_HEADER_BYTES - self._left

    def take(self, count: int) -> bytes:
        self._left -= count
        if self._left < 0:
            raise EOFError("it claims more than 512 MiB")
        found = self._stream.read(count)
        if len(found) < count:
            raise EOFError("no more bytes")
        return found

    def number(self, form: str) -> Any:
        (value,) = struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))
        return value

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def raw_text(self) -> bytes:
        """llama.cpp reads texts as bytes: a token of a vocabulary may be a part of a character."""
        return self.take(self.number("Q"))

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.raw_text().decode(errors="replace")
        if kind == _ARRAY:
            return self._array(1)
        if kind not in _SCALARS:
            raise EOFError(f"unknown value type {kind}")
        return self.number(_SCALARS[kind])

    def _array(self, depth: int) -> Any:
        its, count = self.number("I"), self.number("Q")
        if its in _SCALARS:
            raw = self.take(struct.calcsize(_SCALARS[its]) * count)
            return [value for (value,) in struct.iter_unpack(f"<{_SCALARS[its]}", raw)]
        if its not in {_STRING, _ARRAY}:
            raise EOFError(f"unknown array type {its}")
        if depth > _MAX_NESTING:
            raise EOFError(f"more than {_MAX_NESTING} arrays within each other")
        skip: Callable[[], Any] = self.raw_text if its == _STRING else lambda: self._array(depth + 1)
        for _ in range(count):
            skip()
        return count


class _Entry(Struct, frozen=True):
    """A tensor as the header lists it."""

    name: str
    shape: tuple[int, ...]
    kind: int
    """The number of its type."""
    offset: int
    """The begin of its data, from that of the first tensor's."""


def _read(reader: _Reader, name: str, file_bytes: int) -> Gguf:
    if reader.take(4) != _MAGIC:
        raise ValueError(f"{name} is not a GGUF file")
    version = reader.number("I")
    if version not in _VERSIONS:
        raise ValueError(f"{name} is GGUF version {version}; only versions 2 and 3 are supported")
    tensors, pairs = reader.number("Q"), reader.number("Q")
    metadata = {}
    for _ in range(pairs):
        key = reader.text()
        metadata[key] = reader.value(reader.number("I"))
    entries = [_entry(reader) for _ in range(tensors)]
    found = _sized(entries, name, _begin_of_data(reader.position, metadata), file_bytes)
    repacked = frozenset(
        its.name for its, entry in zip(found, entries, strict=True)
        if entry.kind in _REPACKED and its.rows and its.rows % _REPACKED_ROWS == 0
    )  # fmt: skip
    unknown = frozenset(entry.kind for entry in entries if entry.kind not in _BLOCKS)
    return Gguf(metadata, found, repacked, unknown)


def _entry(reader: _Reader) -> _Entry:
    name = reader.text()
    shape = tuple(reader.number("Q") for _ in range(reader.number("I")))
    return _Entry(name, shape, kind=reader.number("I"), offset=reader.number("Q"))


def _begin_of_data(position: int, metadata: dict[str, Any]) -> int:
    given = metadata.get("general.alignment")
    alignment = given if isinstance(given, int) and given > 0 else _ALIGNMENT
    return -(-position // alignment) * alignment


def _sized(entries: Sequence[_Entry], file: str, begin: int, file_bytes: int) -> tuple[Tensor, ...]:
    """The tensors with their sizes; of a type that is not known, all bytes up to the next tensor or the end of the file.

    Raises ValueError for a file that ends before the data of a tensor (src/llama-model-loader.cpp: "data is not within the
    file bounds")."""
    places = sorted({entry.offset for entry in entries})
    following = dict(pairwise([*places, max(0, file_bytes - begin)]))
    found, last = [], 0
    for entry in entries:
        elements = prod(entry.shape)
        if entry.kind in _BLOCKS:
            per_block, block_bytes = _BLOCKS[entry.kind]
            stored = elements // per_block * block_bytes
        else:
            stored = max(0, following[entry.offset] - entry.offset)
        # Shapes begin with the shortest stride.
        rows = entry.shape[-1] if len(entry.shape) == _MATRIX else 0
        found.append(Tensor(entry.name, elements, stored, len(entry.shape), floating=False, rows=rows))
        last = max(last, begin + entry.offset + stored)
    if file_bytes < last:
        raise ValueError(
            f"{file} has {file_bytes} of {last} bytes: it is truncated, copy or download it again"
        )
    return tuple(found)
