"""The schema describes itself: docs, flags and errors are made from it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launcher.config.loading import parse_config
from launcher.config.schema import Config, Model, Section

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.toml"))


def sections() -> Iterator[type[Section]]:
    yield Model
    for field in msgspec.structs.fields(Config):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield field.type


@pytest.mark.parametrize("section", list(sections()), ids=lambda section: section.__name__)
def test_every_key_is_described(section: type[Section]) -> None:
    for field in msgspec.structs.fields(section):
        notes: tuple[Any, ...] = getattr(field.type, "__metadata__", ())
        assert [note for note in notes if note.description], f"{section.__name__}.{field.name}"


@pytest.mark.parametrize("section", [*sections(), Config], ids=lambda section: section.__name__)
def test_nothing_can_be_changed_or_misspelt(section: type[Section]) -> None:
    config = section.__struct_config__
    assert config.frozen
    assert config.forbid_unknown_fields


def test_defaults_obey_their_own_rules() -> None:
    config = parse_config({"models": [{"name": "m", "path": "/m"}]}, origin="x")
    again = msgspec.convert(msgspec.to_builtins(config), Config, strict=True)
    assert again == config


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid(path: Path) -> None:
    parse_config(tomllib.loads(path.read_text()), origin=str(path))


def test_there_are_examples() -> None:
    assert EXAMPLES
