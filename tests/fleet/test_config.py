"""fleet.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import LauncherError
from launcher.fleet.config import load_fleet


def written(folder: Path, text: str) -> Path:
    path = folder / "fleet.toml"
    path.write_text(text)
    return path


def test_the_least_that_must_be_said(tmp_path: Path) -> None:
    config = load_fleet(written(tmp_path, '[ingress]\nhosts = ["10.0.0.1"]\n'))
    assert (config.ingress.hosts, config.hosts.most, config.ray) == (("10.0.0.1",), 200, "auto")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "ingress"),
        ("[ingress]\nhosts = []\n", "length >= 1"),
        ("[ingress]\nhosts = ['a', 'b', 'c']\n", "length <= 2"),
        ("[ingress]\nhosts = ['a']\nport = 1\n", "unknown field `port`"),
        ("[ingress\n", "line 1"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, what: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(LauncherError, match=f"cannot use {path}: .*{what}"):
        load_fleet(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"cannot read .*no such file"):
        load_fleet(tmp_path / "none.toml")
