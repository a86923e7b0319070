"""Which files a path stands for, and what counts as other ones."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.model_folders import LLAMA
from support.model_folders import model as small_model

from launcher.base.errors import LauncherError, PassingError
from launcher.models.identity import ModelFiles, changed_files, model_files
from launcher.models.reader import find_model, read_profile
from launcher.models.weight_files import ReadOnce


def model(folder: Path, *, layers: int = 2, index: bool = True) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))
    (folder / "model-1.safetensors").write_bytes(b"weights")
    if index:
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    return folder


def known(path: Path) -> ModelFiles:
    found = model_files(str(path))
    assert found is not None
    return found


def test_a_link_that_moves_names_other_files(tmp_path: Path) -> None:
    first, second = model(tmp_path / "v1"), model(tmp_path / "v2")
    current = tmp_path / "current"
    current.symlink_to(first)
    before = known(current)
    assert before.path == str(first)
    current.unlink()
    current.symlink_to(second)
    after = known(current)
    assert after.digest == before.digest, "the content is the same"
    assert changed_files(before, after) == f"model files {first} become {second}"
    assert changed_files(before, before) == changed_files(None, after) == changed_files(before, None) == ""


def replace_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"b": "model-1.safetensors"}}')


def replace_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"num_hidden_layers": 3}')


def add_weights(folder: Path) -> None:
    (folder / "model-2.safetensors").write_bytes(b"more")


def longer_weights(folder: Path) -> None:
    (folder / "model-1.safetensors").write_bytes(b"weights and more")


@pytest.mark.parametrize(
    ("index", "happens"),
    [(True, replace_index), (True, replace_config), (False, replace_config), (False, add_weights), (False, longer_weights)],
)  # fmt: skip
def test_files_replaced_in_their_place_are_others(
    tmp_path: Path, happens: Callable[[Path], None], *, index: bool
) -> None:
    folder = model(tmp_path / "m", index=index)
    before = known(folder)
    assert known(folder) == before
    happens(folder)
    assert changed_files(before, known(folder)) == f"model files in {folder} have changed"


def test_a_model_of_one_file(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF one")
    before = known(file)
    file.write_bytes(b"GGUF two")
    assert known(file).digest != before.digest


def test_a_split_model_is_all_its_parts(tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-{number}-of-00002.gguf" for number in ("00001", "00002"))
    first.write_bytes(b"GGUF one")
    with pytest.raises(PassingError, match="m-00002-of-00002"):
        model_files(str(first))
    second.write_bytes(b"two")
    before = known(first)
    second.write_bytes(b"three")
    assert known(first).digest != before.digest


def test_a_repository_id_that_is_not_cached_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert model_files("someone/some-model") is None


def test_a_path_that_may_come_back_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not mounted: nothing, or the empty folder below the mount."""
    for read in (model_files, read_profile):
        with pytest.raises(PassingError, match="no such directory"):
            read(str(tmp_path / "away"))
        with pytest.raises(PassingError, match="the directory is empty"):
            read(str(tmp_path))
    folder = model(tmp_path / "m")

    def stale(_path: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "is_dir", stale)
    with pytest.raises(PassingError, match="stale file handle"):
        find_model(str(folder))


def test_a_file_that_may_not_be_read_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tmp_path / "m")

    def denied(_path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", denied)
    with pytest.raises(LauncherError, match="permission denied") as caught:
        find_model(str(folder))
    assert not isinstance(caught.value, PassingError)


def test_profile_and_identity_are_of_the_same_content(tmp_path: Path) -> None:
    """Somebody replaces the files between the two."""
    folder = Path(small_model(tmp_path / "m", {**LLAMA, "num_hidden_layers": 2}))
    planned = known(folder)
    once = ReadOnce()
    read_profile(str(folder), read=once)
    (folder / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 3}))
    assert model_files(str(folder), once) == planned
    assert known(folder) != planned
