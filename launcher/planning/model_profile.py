"""Reads config.json and the headers of a model's weight files, never the weights."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from launcher.errors import LauncherError, reason
from launcher.planning.gguf import read_gguf
from launcher.planning.model_files import read_model_json
from launcher.planning.profile import UNKNOWN, ModelProfile, kv_cache_dtype, profile_of
from launcher.planning.weights import Weights, gguf_weights, read_weights

_REPO_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_REMEDY: Final = (
    "give models.path a directory with config.json and *.safetensors, *.bin or *.gguf files, or a Hugging Face "
    "repository id"
)


def read_profile(path: str, dtype: str = "bfloat16") -> ModelProfile:
    """The memory profile of a model directory, or of a repository id in the local Hugging Face cache.

    A repository id that is not cached gives `UNKNOWN`. Raises LauncherError `cannot read model …`."""
    folder = find_model(path)
    if folder is None:
        return UNKNOWN
    try:
        if (folder / "config.json").exists() or not (gguf := sorted(folder.glob("*.gguf"))):
            config = _json(path, folder / "config.json")
            weights = read_weights(folder, config, dtype)
        else:
            headers = [read_gguf(file) for file in gguf]
            config, weights = headers[0].as_config(), gguf_weights(gguf, headers)
        profile = profile_of(config, dtype, weights_bytes=weights.total_bytes, weights_source=weights.source)
    except (ValueError, OSError) as error:
        what = f"{error.filename}: {reason(error)}" if isinstance(error, OSError) else f"{error}"
        raise LauncherError(f"cannot read model {path!r}: {what}", _REMEDY) from error
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        # A key with an unexpected type.
        what = f"config.json is not supported ({type(error).__name__}: {error})"
        raise LauncherError(f"cannot read model {path!r}: {what}", _REMEDY) from error
    return replace(_with_weights(profile, weights), kv_cache_dtype=kv_cache_dtype(config))


def _with_weights(profile: ModelProfile, weights: Weights) -> ModelProfile:
    return replace(
        profile, replicated_bytes=weights.replicated_bytes, head_bytes=weights.head_bytes,
        tied_embeddings=weights.tied, file_bytes=weights.file_bytes, unmapped_bytes=weights.unmapped_bytes,
        file_format=weights.file_format,
    )  # fmt: skip


def find_model(path: str) -> Path | None:
    """A model's local directory; None for a repository id that is not cached. Raises LauncherError."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise LauncherError(f"cannot read model {path!r}: it is not a directory", _REMEDY)
    if not _REPO_ID.fullmatch(path):
        raise LauncherError(f"cannot read model {path!r}: no such directory", _REMEDY)
    hub = _hub_cache() / f"models--{path.replace('/', '--')}"
    main = hub / "refs" / "main"
    if main.is_file():
        snapshot = hub / "snapshots" / read_model_json(main).decode(errors="replace").strip()
        return snapshot if (snapshot / "config.json").exists() else None
    snapshots = sorted(hub.glob("snapshots/*/config.json"), key=lambda file: file.stat().st_mtime)
    return snapshots[-1].parent if snapshots else None


def _hub_cache() -> Path:
    """Where huggingface_hub keeps repositories (huggingface_hub/constants.py)."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def _json(path: str, file: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(read_model_json(file))
    except FileNotFoundError:
        raise LauncherError(f"cannot read model {path!r}: it has no {file.name}", _REMEDY) from None
    except (OSError, ValueError) as error:
        what = reason(error) if isinstance(error, OSError) else f"{error}"
        raise LauncherError(f"cannot read model {path!r}: {file.name}: {what}", _REMEDY) from error
    if not isinstance(parsed, dict):
        raise LauncherError(f"cannot read model {path!r}: {file.name} is not a JSON object", _REMEDY)
    return parsed
