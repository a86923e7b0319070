"""Headers of *.safetensors files: names, types and sizes of tensors, never their data.

A file begins with a little-endian 64-bit length and that many bytes of JSON (github.com/huggingface/safetensors,
README, "Format").
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, Final

from launcher.planning.model_files import open_model_file, read_model_json
from launcher.planning.tensors import Tensor

# safetensors' own limit for the header (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
_MAX_HEADER_BYTES: Final = 100_000_000
_LENGTH_BYTES: Final = 8
INDEX: Final = "model.safetensors.index.json"
_FLOATS: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def files_in(folder: Path) -> list[Path]:
    """The files in the index, else all; consolidated*.safetensors has the same tensors in another layout.

    Raises ValueError when a file of the index is missing."""
    index = folder / INDEX
    if index.is_file():
        try:
            named = sorted(set(json.loads(read_model_json(index))["weight_map"].values()))
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
                yield Tensor(
                    name, prod(entry["shape"]), end - begin, len(entry["shape"]), entry["dtype"] in _FLOATS
                )
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{file.name} has a tensor without shape, type or offsets ({error})") from error
    size = file.stat().st_size
    if size < last:
        raise ValueError(
            f"{file.name} has {size} of {last} bytes: it is truncated, copy or download it again"
        )


def _header(file: Path) -> tuple[dict[str, Any], int]:
    with open_model_file(file) as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise ValueError(f"{file.name} is not a safetensors file")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file.name} has a broken header ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file.name} is not a safetensors file")  # noqa: TRY004 - bad data, not a bad argument
    return header, _LENGTH_BYTES + length
