"""The one model in GGUF that a path names: its files, and its profile from their headers.

llama.cpp reads a split model from its first file and finds the others by their names (src/llama.cpp, llama_split_path;
src/llama-model-loader.cpp, build 11434).
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from launcher.base.errors import LauncherError, PassingError
from launcher.models.gguf import read_gguf
from launcher.models.profile import Beside, ModelProfile, profile_of
from launcher.models.reader import away, gguf_weights, refuse_empty, with_weights

_PART: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)
# Encoders of pictures and sound are published beside the model that uses them, under this name (tools/mtmd/README.md).
_ENCODER: Final = "mmproj"
_REMEDY: Final = "give models.path a model in GGUF: a file, or a directory that contains one model"


def gguf_files(path: str) -> tuple[Path, ...]:
    """The files of the model at `path`, in the order of their numbers: a GGUF file, the first part of a split model, or a
    directory with exactly one model.

    Raises LauncherError: PassingError where a file may still come."""
    place = Path(path).expanduser()
    try:
        if place.is_dir():
            return _in_folder(path, place)
        if place.exists():
            return _parts(path, place)
    except OSError as error:
        raise away(path, error, _REMEDY) from error
    if place.suffix == ".gguf" or place.is_absolute():
        raise PassingError(f"cannot read model {path!r}: no such file or directory", _REMEDY)
    raise LauncherError(
        f"cannot read model {path!r}: no such file or directory; llama.cpp is not given repositories of a hub",
        f"download the model first; {_REMEDY}",
    )


def parts_of(first: Path) -> tuple[Path, ...]:
    """The files of a split model by the name of its first; of any other file only itself. None of them is looked at."""
    match = _PART.fullmatch(first.name)
    if match is None or int(match["number"]) != 1:
        return (first,)
    count = int(match["count"])
    return tuple(first.with_name(f"{match['stem']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1))


def read_gguf_profile(path: str) -> ModelProfile:
    """The profile of the model at `path`; its KV cache is counted in 16-bit elements.

    Raises LauncherError as `gguf_files` does, and for a file that is no GGUF model with a text part."""
    files = gguf_files(path)
    try:
        headers = [read_gguf(file) for file in files]
        weights = gguf_weights(list(files), headers)
    except OSError as error:
        raise away(path, error, _REMEDY) from error
    except ValueError as error:
        raise LauncherError(
            f"cannot read model {path!r}: {error}", f"download the model again; {_REMEDY}"
        ) from error
    if not headers[0].describes_text:
        kind = headers[0].metadata.get("general.architecture")
        raise LauncherError(
            f"cannot read model {path!r}: {files[0].name} describes no language model (general.architecture = {kind!r})",
            f"{_REMEDY}; an encoder (mmproj) or adapter goes into engine.args",
        )
    config = headers[0].as_config()
    profile = profile_of(
        config, "auto", weights_bytes=weights.total_bytes, weights_source=weights.source,
        beside=Beside(projections=weights.projections),
    )  # fmt: skip
    unread = profile.unread and profile.unread.replace("config.json", "the file's header")
    kv_source = profile.kv_source.replace("config.json", "header")
    return replace(with_weights(profile, weights), unread=unread, kv_source=kv_source)


def _parts(path: str, file: Path) -> tuple[Path, ...]:
    match = _PART.fullmatch(file.name)
    if match is not None and int(match["number"]) != 1:
        first = file.with_name(f"{match['stem']}-00001-of-{match['count']}.gguf")
        raise LauncherError(
            f"cannot read model {path!r}: it is part {int(match['number'])} of {int(match['count'])}",
            f"give models.path the first part, {first.name}",
        )
    files = parts_of(file)
    for part in files:
        if not part.exists():
            raise PassingError(
                f"cannot read model {path!r}: {part.name} is missing",
                f"download all {len(files)} parts of the model into one directory",
            )
    return files


def _in_folder(path: str, folder: Path) -> tuple[Path, ...]:
    refuse_empty(path, folder, _REMEDY)
    files = sorted(file for file in folder.glob("*.gguf") if _ENCODER not in file.name.lower())
    firsts = {
        file.with_name(f"{match['stem']}-00001-of-{match['count']}.gguf")
        if (match := _PART.fullmatch(file.name))
        else file
        for file in files
    }
    if not firsts:
        raise LauncherError(
            f"cannot read model {path!r}: the directory has no *.gguf file of a model", _REMEDY
        )
    if len(firsts) > 1:
        names = ", ".join(sorted(file.name for file in firsts))
        raise LauncherError(
            f"cannot read model {path!r}: the directory has {len(firsts)} models: {names}",
            "give models.path one of these files",
        )
    return _parts(path, firsts.pop())
