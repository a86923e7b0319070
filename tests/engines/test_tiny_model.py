"""The tiny model is made once, whole, and never over somebody else's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.engines.tiny_model import FILES, RECIPE, RECIPE_FILE, is_complete, is_foreign, main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).write_text("{}")
    (tmp_path / RECIPE_FILE).write_text(json.dumps({"recipe": RECIPE}))
    return tmp_path


def test_a_whole_model_is_used_again(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert is_complete(model)
    assert main([str(model)]) == 0
    assert "there already" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{}", "[]", "not json", '{"recipe": "older"}'])
def test_a_model_of_another_recipe_is_made_anew(model: Path, text: str) -> None:
    (model / RECIPE_FILE).write_text(text)
    assert not is_complete(model)
    assert not is_foreign(model)


def test_a_missing_file_means_incomplete(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert not is_complete(model)


def test_other_folders_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not is_foreign(tmp_path)
    assert not is_foreign(tmp_path / "new")
    (tmp_path / "thesis.tex").write_text("")
    assert main([str(tmp_path)]) == 2
    assert "contains other files" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()
