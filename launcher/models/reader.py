"""Reads config.json and the headers of a model's weight files, never the weights."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from launcher.base.errors import AWAY, LauncherError, PassingError, reason
from launcher.models import gguf, weight_files
from launcher.models.description import describe, from_mistral
from launcher.models.gguf import read_gguf
from launcher.models.profile import (
    DTYPE_BYTES,
    UNKNOWN,
    Beside,
    ModelProfile,
    dtype_bytes,
    profile_of,
)
from launcher.models.projections import Projections, projections_of
from launcher.models.weight_files import Read, Tensor, read_model_json

# --- Memory of a model directory's weights once loaded, from the headers of its files. ---


class Weights(Struct, frozen=True):
    """Sizes in the engine's type, of all tensor-parallel ranks together."""

    total_bytes: int
    """Everything once; tied embeddings once."""
    replicated_bytes: int = 0
    """The part that every rank holds whole."""
    head_bytes: int = 0
    """The output projection. On CPU it is kept as loaded, and packed for the matrix kernels
    (vllm/model_executor/layers/vocab_parallel_embedding.py: dispatch_cpu_unquantized_gemm, remove_weight=False)."""
    file_bytes: int = 0
    """The largest file."""
    unmapped_bytes: int = 0
    """The largest file that is read into memory of the process: *.bin; safetensors are mapped."""
    tied: bool = False
    """The output projection is the embedding."""
    source: str = "unknown"
    file_format: str | None = None
    """safetensors, bin, pt, gguf or tensors."""
    projections: Projections = field(default_factory=dict)
    """Output widths of attention's projections, where the headers show them."""


def read_weights(
    folder: Path, config: Mapping[str, Any], dtype: str, read: Read = read_model_json
) -> Weights:
    """The weights of a directory, in the order in which vLLM looks for them.

    1. safetensors: floating-point tensors count in the engine's type, packed ones as they are.
    2. *.bin: sizes of the storages in the archive (of old files: file sizes), scaled from config.json's type.
    3. *.pt as *.bin.
    4. GGUF: as they are.
    5. Tensorizer's *.tensors: the size of the files.

    Raises ValueError without weights or for a broken file."""
    tied = _tied(config)
    if files := weight_files.files_in(folder, read):
        tensors = [tensor for file in files for tensor in weight_files.tensors_of(file)]
        source = f"headers of {_count(files)}, {len(tensors)} tensors as {_named(dtype)}"
        return _sum(tensors, dtype, tied=tied, files=files, source=source)
    if files := weight_files.torch_files_in(folder):
        return _torch(files, config, dtype)
    if files := [file for file in sorted(folder.glob("*.pt")) if file.name not in _NO_WEIGHTS]:
        return _torch(files, config, dtype)
    if files := sorted(folder.glob("*.gguf")):
        return gguf_weights(files, [gguf.read_gguf(file) for file in files])
    if files := sorted(folder.glob("*.tensors")):
        return _whole_files(files, tied=tied)
    raise ValueError("it has no *.safetensors, *.bin, *.pt, *.gguf or *.tensors files")


def _whole_files(files: list[Path], *, tied: bool | None) -> Weights:
    """A format whose headers are not read: tensors as stored, and some kilobytes of headers."""
    sizes = [file.stat().st_size for file in files]
    return Weights(
        total_bytes=sum(sizes), file_bytes=max(sizes), tied=bool(tied), source=f"file sizes of {_count(files)}, as stored",
        file_format=files[0].suffix.removeprefix("."),
    )  # fmt: skip


# States of a training (vllm/model_executor/model_loader/weight_utils.py, filter_files_not_needed_for_inference).
_NO_WEIGHTS: Final = frozenset({"optimizer.pt", "scheduler.pt", "scaler.pt"})


def gguf_weights(files: list[Path], headers: Iterable[gguf.Gguf]) -> Weights:
    tensors = [tensor for header in headers for tensor in header.tensors]
    source = f"headers of {_count(files)}, {len(tensors)} tensors as stored"
    return _sum(tensors, "auto", tied=False, files=files, source=source)


def _tied(config: Mapping[str, Any]) -> bool | None:
    """Whether the output projection is the embedding: as config.json says, else where its class does (Gemma). None where
    neither ties them: the files decide."""
    try:
        its = describe(config)
    except (LookupError, TypeError, AttributeError, ValueError):
        return None
    usual = its.text.get("tie_word_embeddings")
    said = usual if "tie_word_embeddings" in its.given else config.get("tie_word_embeddings")
    return bool(said) if said is not None else True if usual is True else None


# Omni models: vLLM loads the part that reads and writes text, not the one that speaks (qwen2_5_omni_thinker.py).
_THINKER: Final = "thinker."


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


def _sum(
    tensors: Iterable[Tensor], dtype: str, *, tied: bool | None, files: list[Path], source: str
) -> Weights:
    width = dtype_bytes(dtype)
    by_name = {tensor.name: tensor for tensor in tensors}
    if any(name.startswith(_THINKER) for name in by_name):
        by_name = {name: tensor for name, tensor in by_name.items() if name.startswith(_THINKER)}
    heads = [name for name, tensor in by_name.items() if tensor.is_head]
    embedding = max((t.loaded_bytes(width) for t in by_name.values() if t.is_embedding), default=0)
    head = max((by_name[name].loaded_bytes(width) for name in heads), default=embedding)
    if tied:
        by_name = {name: tensor for name, tensor in by_name.items() if name not in heads}
        source += ", tied embeddings once"
    return Weights(
        total_bytes=sum(tensor.loaded_bytes(width) for tensor in by_name.values()),
        replicated_bytes=sum(t.loaded_bytes(width) for t in by_name.values() if t.is_replicated),
        head_bytes=head,
        # Files of a tied model have no head, which decides where config.json does not.
        tied=tied if tied is not None else embedding > 0 and not heads,
        file_bytes=max(file.stat().st_size for file in files),
        source=source,
        file_format=files[0].suffix.removeprefix("."),
        projections=projections_of(by_name.values()),
    )


def _torch(files: list[Path], config: Mapping[str, Any], dtype: str) -> Weights:
    text = _text(config)
    named = config.get("torch_dtype") or config.get("dtype") or text.get("torch_dtype") or text.get("dtype")
    stored = DTYPE_BYTES.get(str(named or "float32"), DTYPE_BYTES["float32"])
    packed = config.get("quantization_config") is not None
    sizes = {file: weight_files.storage_sizes(file) for file in files}
    total = sum(file.stat().st_size if its is None else sum(its) for file, its in sizes.items())
    old = any(its is None for its in sizes.values())
    how = "file sizes" if old else "storages"
    # The embedding is the largest tensor of most models; the head is not larger.
    largest = max((max(its, default=0) for its in sizes.values() if its is not None), default=0)
    scale = (1, 1) if packed else (dtype_bytes(dtype), stored)
    biggest = max(file.stat().st_size for file in files)
    return Weights(
        total_bytes=total * scale[0] // scale[1],
        head_bytes=largest * scale[0] // scale[1],
        file_bytes=biggest,
        unmapped_bytes=biggest,
        tied=bool(_tied(config)),
        file_format=files[0].suffix.removeprefix("."),
        source=f"{how} of {_count(files)}, "
        + ("as stored" if packed else f"{named or 'float32'} as {_named(dtype)}"),
    )


_AUTO: Final = "a 16-bit type"


def _named(dtype: str) -> str:
    return dtype if dtype in DTYPE_BYTES else _AUTO


def _count(files: list[Path]) -> str:
    return files[0].name if len(files) == 1 else f"{len(files)} {files[0].suffix} files"


_REPO_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_COMMIT: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,250}", re.ASCII)
_REMEDY: Final = (
    "give models.path a directory with config.json and *.safetensors, *.bin, *.pt or *.gguf files, or a Hugging Face "
    "repository id"
)


def read_profile(
    path: str,
    dtype: str = "bfloat16",
    overrides: Mapping[str, Any] | None = None,
    read: Read = read_model_json,
) -> ModelProfile:
    """The memory profile of a model directory, or of a repository id in the local Hugging Face cache. `overrides`: the
    operator's --hf-overrides. `read` reads its JSON files.

    A repository id that is not cached gives `UNKNOWN`; a description that cannot be understood a profile with `unread`.
    Raises LauncherError `cannot read model …` for files that are missing or broken."""
    folder = find_model(path)
    if folder is None:
        return UNKNOWN
    try:
        gguf_files = sorted(folder.glob("*.gguf"))
        if any((folder / name).exists() for name in _DESCRIPTIONS) or not gguf_files:
            config = overridden(_description(path, folder, read), overrides or {})
            weights = read_weights(folder, config, dtype, read)
        else:
            headers = [read_gguf(file) for file in gguf_files]
            described = next((header for header in headers if header.describes_text), headers[0])
            config, weights = described.as_config(), gguf_weights(gguf_files, headers)
    except OSError as error:
        raise away(path, error) from error
    except ValueError as error:
        raise LauncherError(f"cannot read model {path!r}: {error}", _REMEDY) from error
    beside = replace(_beside(folder, read), projections=weights.projections)
    profile = profile_of(
        config, dtype, weights_bytes=weights.total_bytes, weights_source=weights.source, beside=beside
    )
    return with_weights(profile, weights)


def away(path: str, error: OSError, remedy: str = _REMEDY) -> LauncherError:
    """The error for a model that cannot be read: a PassingError where it may come back by itself."""
    where = "" if error.filename is None or str(error.filename) == path else f"{error.filename}: "
    kind = PassingError if error.errno in AWAY else LauncherError
    return kind(f"cannot read model {path!r}: {where}{reason(error)}", remedy)


CONFIG: Final = "config.json"
PARAMS: Final = "params.json"
_DESCRIPTIONS: Final = (CONFIG, PARAMS)
# Names that sentence-transformers gave the file over time (vllm/transformers_utils/config.py, 0.32).
_ENCODER_FILES: Final = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


def _description(path: str, folder: Path, read: Read) -> dict[str, Any]:
    """config.json; Mistral's params.json where there is none, or where weights in Mistral's layout are beside it
    (vllm/transformers_utils/config.py, get_config). Raises LauncherError."""
    has_config = (folder / CONFIG).exists()
    if (folder / PARAMS).exists() and (not has_config or any(folder.glob("consolidated*.safetensors"))):
        return from_mistral(
            _json(path, folder / PARAMS, read), (_optional(folder / CONFIG, read) or {}) if has_config else {}
        )
    config = _json(path, folder / CONFIG, read)
    # ModelOpt up to 0.29 keeps the quantization in a file of its own.
    if "quantization_config" not in config and (
        quantization := _optional(folder / "hf_quant_config.json", read)
    ):
        return config | {"quantization_config": quantization}
    return config


# Objects of a description that are no parts with a class of their own.
_WHOLE: Final = frozenset({"quantization_config", "compression_config"})


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The description with the operator's keys: those of a part one by one, other objects whole (vllm/config/model.py,
    _apply_dict_overrides, 0.32)."""
    found = dict(config)
    for key, value in overrides.items():
        part = found.get(key)
        nested = key.endswith("_config") and key not in _WHOLE
        if nested and isinstance(value, dict) and isinstance(part, dict):
            found[key] = overridden(part, value)
        else:
            found[key] = value
    return found


def _beside(folder: Path, read: Read) -> Beside:
    encoder = next((found for name in _ENCODER_FILES if (found := _optional(folder / name, read))), None)
    return Beside(encoder, _optional(folder / "tokenizer_config.json", read))


def _optional(file: Path, read: Read) -> dict[str, Any] | None:
    """A JSON object; None for a file that is missing or has another content, which vLLM reports."""
    try:
        parsed = json.loads(read(file))
    except (OSError, ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def with_weights(profile: ModelProfile, weights: Weights) -> ModelProfile:
    """The profile with the figures that only the weight files give."""
    return replace(
        profile, replicated_bytes=weights.replicated_bytes, head_bytes=weights.head_bytes,
        tied_embeddings=weights.tied, file_bytes=weights.file_bytes, unmapped_bytes=weights.unmapped_bytes,
        file_format=weights.file_format,
    )  # fmt: skip


def find_model(path: str) -> Path | None:
    """A model's local directory; None for a repository id that is not cached. Raises LauncherError, and PassingError for
    a directory that is not there."""
    folder = Path(path).expanduser()
    try:
        if folder.is_dir():
            return folder
        is_other = folder.exists()
    except OSError as error:  # Path.is_dir ignores only what says that nothing is there
        raise away(path, error) from error
    if is_other:
        raise LauncherError(f"cannot read model {path!r}: it is not a directory", _REMEDY)
    if not _REPO_ID.fullmatch(path):
        raise PassingError(f"cannot read model {path!r}: no such directory", _REMEDY)
    hub = _hub_cache() / f"models--{path.replace('/', '--')}"
    main = hub / "refs" / "main"
    if main.is_file():
        snapshot = hub / "snapshots" / _commit(path, main)
        return snapshot if any((snapshot / name).exists() for name in _DESCRIPTIONS) else None
    found = (file for name in _DESCRIPTIONS for file in hub.glob(f"snapshots/*/{name}"))
    snapshots = sorted(found, key=lambda file: file.stat().st_mtime)
    return snapshots[-1].parent if snapshots else None


def _commit(path: str, main: Path) -> str:
    """The name of a folder. Instances may write to the file: anything else is refused. Raises LauncherError."""
    try:
        name = read_model_json(main).decode(errors="replace").strip()
    except (OSError, ValueError) as error:
        what = reason(error) if isinstance(error, OSError) else f"{error}"
    else:
        if _COMMIT.fullmatch(name):
            return name
        what = f"it names no snapshot: {name[:80]!r}"
    raise LauncherError(f"cannot read model {path!r}: {main}: {what}", f"remove {main}, or download it again")


def _hub_cache() -> Path:
    """Where huggingface_hub keeps repositories (huggingface_hub/constants.py)."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def refuse_empty(path: str, folder: Path, remedy: str = _REMEDY) -> None:
    """Raise PassingError for an empty directory: where a file system is to be mounted there is one."""
    if not any(folder.iterdir()):
        raise PassingError(f"cannot read model {path!r}: the directory is empty", remedy)


def _json(path: str, file: Path, read: Read) -> dict[str, Any]:
    try:
        parsed = json.loads(read(file))
    except FileNotFoundError:
        refuse_empty(path, file.parent)
        raise LauncherError(f"cannot read model {path!r}: it has no {file.name}", _REMEDY) from None
    except (OSError, ValueError, RecursionError) as error:
        what = reason(error) if isinstance(error, OSError) else f"{error}"
        raise LauncherError(f"cannot read model {path!r}: {file.name}: {what}", _REMEDY) from error
    if not isinstance(parsed, dict):
        raise LauncherError(f"cannot read model {path!r}: {file.name} is not a JSON object", _REMEDY)
    return parsed
