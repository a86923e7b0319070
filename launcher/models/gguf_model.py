"""The one model in GGUF that a path names: its files, and its profile from their headers.

llama.cpp reads a split model from its first file and finds the others by their names (src/llama.cpp, llama_split_path;
src/llama-model-loader.cpp, build 11434).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from launcher.base.errors import LauncherError, PassingError
from launcher.models.gguf import Gguf, attention_layers, read_gguf, recurrent_layers
from launcher.models.layers import KvLayers, LayerKind
from launcher.models.profile import Beside, ModelProfile, profile_of
from launcher.models.reader import Weights, away, gguf_weights, refuse_empty, with_weights

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
        if headers[0].describes_text:
            return _profile(headers, weights)
    except OSError as error:
        raise away(path, error, _REMEDY) from error
    except ValueError as error:
        raise LauncherError(
            f"cannot read model {path!r}: {error}", f"download the model again; {_REMEDY}"
        ) from error
    kind = headers[0].metadata.get("general.architecture")
    raise LauncherError(
        f"cannot read model {path!r}: {files[0].name} describes no language model (general.architecture = {kind!r})",
        f"{_REMEDY}; an encoder (mmproj) or adapter goes into engine.args",
    )


_EMBEDDING: Final = "token_embd.weight"
_OUTPUT: Final = "output.weight"
# The class of models whose layers keep one recurrent state and nothing else.
_RECURRENT_ONLY: Final = "mamba"


def _profile(headers: Sequence[Gguf], weights: Weights) -> ModelProfile:
    header, config = headers[0], headers[0].as_config()
    tensors = [tensor for each in headers for tensor in each.tensors]
    recurrent = recurrent_layers(tensors)
    projections = weights.projections
    if not header.keeps_latent and config.pop("kv_lora_rank", None) is not None:
        # A conversion of before latents were kept: keys and values of all heads. V is counted as wide as K.
        config["model_type"] = config["architectures"][0]
    if recurrent:
        attention = attention_layers(tensors, header.of_architecture("attention.head_count_kv"))
        # The class of that name may compute other kinds of layers than these tensors are.
        config["model_type"] = "" if attention else _RECURRENT_ONLY
        projections = {layer: its for layer, its in projections.items() if layer in attention}
    profile = with_weights(
        profile_of(
            config, "auto", weights_bytes=weights.total_bytes, weights_source=weights.source,
            beside=Beside(projections=projections),
        ),
        weights,
    )  # fmt: skip
    if recurrent and profile.unread is None:
        profile = _with_states(profile, len(recurrent), header.state_bytes)
    # A header whose layers cannot be read still says how long requests may be.
    length = header.number("context_length") if profile.max_model_len is None else profile.max_model_len
    return replace(
        profile, max_model_len=length,
        unread=profile.unread and profile.unread.replace("config.json", "the file's header"),
        kv_source=profile.kv_source.replace("config.json", "header"),
        expert_size=header.number("expert_feed_forward_length") or profile.intermediate_size,
        experts_used=header.number("expert_used_count") or 0, tokenizer_entries=header.tokenizer_entries,
        splits_inputs=header.splits_inputs, computed_whole=header.computed_whole, keeps_windows=header.keeps_windows,
        output_copy_bytes=_output_copy(headers),
        recurrent_widths=header.recurrent_widths if recurrent else (0, 0),
        unknown_types=tuple(sorted({kind for each in headers for kind in each.unknown_types})),
    )  # fmt: skip


def _output_copy(headers: Sequence[Gguf]) -> int:
    """Bytes of the embedding where it is the output projection, too, and repacked for that: rows are looked up in the file's
    own order, so that llama.cpp loads it twice (src/llama-model.cpp, TENSOR_DUPLICATED). Encoders have no output."""
    tensors = {tensor.name: tensor for each in headers for tensor in each.tensors}
    repacked = any(_EMBEDDING in each.repacked for each in headers)
    if not repacked or _OUTPUT in tensors or headers[0].of_architecture("attention.causal") is False:
        return 0
    return tensors[_EMBEDDING].stored_bytes


def _with_states(profile: ModelProfile, count: int, state_bytes: int | None) -> ModelProfile:
    """The profile with the states of recurrent layers, one of a sequence in each."""
    state = KvLayers(LayerKind.STATE, count, state_bytes=state_bytes or 0, state_blocks=1)
    kept = tuple(its for its in profile.layers if its.kind is not LayerKind.STATE)
    said = [] if not kept else [profile.kv_source]
    return replace(
        profile, layers=(*kept, state),
        kv_source="; ".join([*said, f"{count} recurrent layers x {state_bytes or 'an unknown number of'} B a request"]),
    )  # fmt: skip


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
