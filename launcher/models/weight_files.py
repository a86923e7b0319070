"""Headers of *.safetensors files: names, types and sizes of tensors, never their data.

A file begins with a little-endian 64-bit length and that many bytes of JSON (github.com/huggingface/safetensors,
README, "Format").
"""

from __future__ import annotations

import json
import os
import stat
import zipfile
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

from msgspec import Struct

# --- Opens files of a model. Other users may own them (the instances' user downloads them), and root reads them.

# The largest is an index of weight files: about 100 bytes for each tensor.
MAX_JSON_BYTES: Final = 256 << 20


def open_model_file(file: Path) -> BinaryIO:
    """Opens a regular file, or the target of a link; not a pipe, which could block, nor a device, which may be endless.

    Raises OSError; ValueError for another kind of file.
    """
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    stream = os.fdopen(fd, "rb")
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        stream.close()
        raise ValueError(f"{file.name} is not a regular file")
    return stream


def read_model_json(file: Path) -> bytes:
    """The content of a JSON file. Raises OSError; ValueError for other content or a file that is too large."""
    with open_model_file(file) as stream:
        data = stream.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"{file.name} has more than {MAX_JSON_BYTES >> 20} MiB")
    return data


Read = Callable[[Path], bytes]
"""`read_model_json`, or what stands for it."""


class ReadOnce:
    """A `Read` for one look at a model: its profile and its identity are of the same content, read once."""

    def __init__(self) -> None:
        self._found: dict[Path, bytes] = {}

    def __call__(self, file: Path) -> bytes:
        if file not in self._found:
            self._found[file] = read_model_json(file)
        return self._found[file]


# --- A tensor of a checkpoint, from file headers. ---


class Tensor(Struct, frozen=True):
    name: str
    elements: int
    stored_bytes: int
    dimensions: int
    floating: bool
    """Converted to the engine's type when it is loaded; packed (quantized) tensors stay as they are."""
    rows: int = 0
    """Output width of a projection; 0 for other tensors, and where several elements are packed in one."""

    def loaded_bytes(self, element_bytes: int) -> int:
        return self.elements * element_bytes if self.floating else self.stored_bytes

    @property
    def is_head(self) -> bool:
        """The output projection; with tied weights it is the embedding."""
        return self.name.endswith(("lm_head.weight", "output.weight")) and ".layers." not in self.name

    @property
    def is_embedding(self) -> bool:
        ends = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "token_embd.weight")
        return self.name.endswith(ends)

    @property
    def is_replicated(self) -> bool:
        """Held whole by every tensor-parallel rank: norms and biases, and latent attention's narrow projections
        (vllm/model_executor/models/deepseek_v2.py: ReplicatedLinear)."""
        return self.dimensions <= 1 or any(word in self.name for word in _REPLICATED)


_REPLICATED = ("kv_a_proj", "q_a_proj", ".gate.weight", "router")


# safetensors' own limit for the header (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
_MAX_HEADER_BYTES: Final = 100_000_000
_LENGTH_BYTES: Final = 8
INDEX: Final = "model.safetensors.index.json"
_MATRIX: Final = 2
_FLOATS: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def files_in(folder: Path, read: Read = read_model_json) -> list[Path]:
    """The files in the index, else all; consolidated*.safetensors has the same tensors in another layout.

    Raises ValueError when a file of the index is missing."""
    index = folder / INDEX
    if index.is_file():
        try:
            named = sorted(set(json.loads(read(index))["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{index.name} is not an index of weight files ({error})") from error
        missing = [name for name in named if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{missing[0]} is missing, but {index.name} lists it")
        return [folder / name for name in named]
    found = sorted(folder.glob("*.safetensors"))
    return [file for file in found if not file.name.startswith("consolidated")] or found


def tensors_of(file: Path) -> Iterator[Tensor]:
    """All tensors of one file. Raises ValueError for another format or a truncated file."""
    header, begins = _header(file)
    last = 0
    try:
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                last = max(last, begins + end)
                yield _tensor(name, entry["shape"], entry["dtype"], end - begin)
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{file.name} has a tensor without shape, type or offsets ({error})") from error
    size = file.stat().st_size
    if size < last:
        raise ValueError(
            f"{file.name} has {size} of {last} bytes: it is truncated, copy or download it again"
        )


def _tensor(name: str, shape: list[int], dtype: str, size: int) -> Tensor:
    whole = dtype in _FLOATS or dtype.startswith("F8_")
    rows = shape[0] if len(shape) == _MATRIX and whole else 0
    return Tensor(name, prod(shape), size, len(shape), dtype in _FLOATS, rows)


def header_bytes(file: Path) -> bytes:
    """The header of a safetensors file as it is. Raises OSError; ValueError for another format."""
    with open_model_file(file) as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise ValueError(f"{file.name} is not a safetensors file")
        return stream.read(length)


def _header(file: Path) -> tuple[dict[str, Any], int]:
    raw = header_bytes(file)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} has a broken header ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file.name} is not a safetensors file")  # noqa: TRY004 - bad data, not a bad argument
    return header, _LENGTH_BYTES + len(raw)


# --- Sizes of the tensors in *.bin files, without unpickling: torch.save writes a zip archive with one stored entry
# per storage (pytorch/caffe2/serialize/inline_container.cc), and tensors that share a storage share the entry.
#
# The entries do not contain the element type; config.json has it. Files from before torch 1.6 are not archives;
# their file size is used, which is some kilobytes more than their tensors.


def torch_files_in(folder: Path) -> list[Path]:
    """pytorch_model*.bin, else every *.bin: training_args.bin and optimizer states are not weights."""
    found = sorted(folder.glob("*.bin"))
    return [file for file in found if file.name.startswith("pytorch_model")] or found


def storage_sizes(file: Path) -> list[int] | None:
    """Bytes of each storage in one file; None for other files. Raises ValueError for a broken archive."""
    try:
        with open_model_file(file) as stream:
            if not zipfile.is_zipfile(stream):
                return None
            with zipfile.ZipFile(stream) as archive:
                entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"{file.name} is a broken archive: {error}") from error
    return [entry.file_size for entry in entries if "data" in Path(entry.filename).parts[1:-1]]
