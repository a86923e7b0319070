"""Which files a model's path stands for at this moment: a link may move, and files may be replaced in their place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from launcher.base.errors import LauncherError
from launcher.models.gguf_model import parts_of
from launcher.models.reader import CONFIG, PARAMS, away, find_model, refuse_empty
from launcher.models.weight_files import Read, open_model_file, read_model_json

# Of a file that is a whole model (GGUF): its header, or the begin of it.
HEADER_BYTES: Final = 64 * 1024
_INDEX: Final = "*.index.json"
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
_DIGITS: Final = 16


class ModelFiles(Struct, frozen=True):
    """The identity of a model: two of them are the same model if both fields are."""

    path: str
    """Without links."""
    digest: str
    """Hexadecimal: of config.json and params.json and of the index of the weights; names and sizes of the weight files where
    there is no index; of a single file its size and its begin, and names and sizes of the other parts of a split model."""

    def __str__(self) -> str:
        return f"{self.path} ({self.digest[:8]})"

    def to_text(self) -> str:
        """One line, for the record of a running instance."""
        return f"{self.digest} {self.path}"


def model_files(path: str, read: Read = read_model_json) -> ModelFiles | None:
    """The files of a model's directory, file, or repository id in the local Hugging Face cache; None for an id that is not
    cached. Reads some small files by `read`, blocking.

    Raises LauncherError: PassingError where the path may come back by itself."""
    try:
        place = Path(path).expanduser()
        if place.is_file():
            return ModelFiles(str(place.resolve()), _digest(_of_file(place)))
        folder = find_model(path)
        if folder is None:
            return None
        refuse_empty(path, folder)
        return ModelFiles(str(folder.resolve()), _digest(_of_folder(folder, read)))
    except OSError as error:
        raise away(path, error) from error
    except ValueError as error:
        raise LauncherError(f"cannot read model {path!r}: {error}", "download the model again") from error


def _digest(parts: Iterator[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.hexdigest()[:_DIGITS]


def _of_file(file: Path) -> Iterator[bytes]:
    yield str(file.stat().st_size).encode()
    with open_model_file(file) as stream:
        yield stream.read(HEADER_BYTES)
    for part in parts_of(file)[1:]:
        yield f"{part.name} {part.stat().st_size}".encode()


def _of_folder(folder: Path, read: Read) -> Iterator[bytes]:
    for name in (CONFIG, PARAMS):
        if (folder / name).is_file():
            yield name.encode()
            yield read(folder / name)
    indexes = sorted(folder.glob(_INDEX))
    for index in indexes:
        yield index.name.encode()
        yield read(index)
    for file in () if indexes else sorted(file for kind in _WEIGHTS for file in folder.glob(kind)):
        yield f"{file.name} {file.stat().st_size}".encode()


def changed_files(was: ModelFiles | None, now: ModelFiles | None) -> str:
    """How they differ, for a person; empty where they do not, or where one is unknown."""
    if was is None or now is None or was == now:
        return ""
    if was.path != now.path:
        return f"model files {was.path} become {now.path}"
    return f"model files in {was.path} have changed"
