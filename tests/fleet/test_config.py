"""fleet.toml."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.cli import build_parser
from launcher.errors import LauncherError
from launcher.fleet.config import endpoints, load_fleet, status_socket


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
        ("[ingress]\nhosts = ['a']\n[hosts]\ndashboard = 'javascript:x'\n", "matching regex"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, what: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(LauncherError, match=f"cannot use {path}: .*{what}"):
        load_fleet(path)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "/s/ingress.sock"),
        ("read_group = 'g'\n", "/run/numa-launcher/ingress.sock"),
        ("read_group = 'g'\n[hosts]\ncontrol = '/c/x.sock'\n", "/c/ingress.sock"),
    ],
)
def test_where_the_ingress_shows_its_status(tmp_path: Path, text: str, where: str) -> None:
    config = load_fleet(written(tmp_path, f"state = '/s'\n[ingress]\nhosts = ['a', 'b']\n{text}"))
    assert str(status_socket(config)) == where
    assert endpoints(config) == ("http://a:8000", "http://b:8000")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"cannot read .*no such file"):
        load_fleet(tmp_path / "none.toml")


def test_the_example_and_the_units_name_what_is_there() -> None:
    folder = Path(__file__).parents[2] / "configs" / "fleet"
    assert load_fleet(folder / "fleet.toml").ingress.hosts == ("10.0.0.1", "10.0.0.2")
    ingress = (folder / "numa-launcher-ingress.service").read_text()
    words = next(line for line in ingress.splitlines() if line.startswith("ExecStart=")).split()[2:]
    assert build_parser("fleet").parse(words).action == "ingress"
    assert "KillMode=process" in ingress  # HAProxy goes on
    started = load_fleet(folder / "fleet.toml")
    assert f"{started.ingress.start[-1]}.service" in {unit.name for unit in folder.iterdir()}
    ray = (folder / "numa-launcher-ray.service").read_text()
    assert set(re.findall(r"\$\{?(\w+)", ray)) | {"RAY_AUTH_MODE"} == set(
        re.findall(r"^(\w+)=", (folder / "ray.env").read_text(), flags=re.MULTILINE)
    )
