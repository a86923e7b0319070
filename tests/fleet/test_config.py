"""fleet.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from launcher.base.errors import LauncherError
from launcher.cli import build_parser
from launcher.fleet.config import load_fleet


def written(folder: Path, text: str) -> Path:
    path = folder / "fleet.toml"
    path.write_text(text)
    return path


def test_the_least_that_must_be_said(tmp_path: Path) -> None:
    config = load_fleet(written(tmp_path, '[ingress]\nhosts = ["10.0.0.1"]\n'))
    assert (config.ingress.hosts, config.hosts.most, config.ray) == (("10.0.0.1",), 200, "auto")


@pytest.mark.parametrize(
    ("text", "why", "remedy"),
    [
        ("", "there is no [ingress]", 'hosts = ["10.0.0.1", "10.0.0.2"]'),
        ("[ingres]\nhosts = ['a']\n", "unknown key 'ingres' in the file", "did you mean [ingress]?"),
        ("[ingress]\n", "ingress: hosts is missing", 'add hosts = ["10.0.0.1", "10.0.0.2"] to [ingress]'),
        ("[ingress]\nhosts = []\n", "ingress.hosts = []: it is empty", "at most 2"),
        ("[ingress]\nhosts = ['a', 'b', 'c']\n", "not a list of text, at most 2", "at most 2"),
        ("[ingress]\nhosts = ['a b']\n", "ingress.hosts[0] = 'a b': not text", "write"),
        ("[ingress]\nhosts = ['a']\nport = 1\n", "unknown key 'port' in [ingress]", "picker_port"),
        (
            "[ingress]\nhosts = ['a']\nlisten = '0.0.0.0'\n",
            "not text that matches",
            'listen = "0.0.0.0:8000"',
        ),
        ("[ingress]\nhosts = ['a']\npicker_port = 65534\n", "picker_port = 65534", "up to 65533"),
        ("[ingress]\nhosts = ['a']\nstart = 'a b'\n", "ingress.start = 'a b'", 'start = ["a", "b"]'),
        (
            "[ingress]\nhosts = ['a']\n[hosts]\nconrol = 'x'\n",
            "'conrol' in [hosts]",
            "did you mean 'control'?",
        ),
        # HAProxy would ask the pickers in plain, which answer by TLS only.
        ("[ingress]\nhosts = ['a']\npicker_cert = 'x'\n", "ingress.picker_cert is there", "set hosts.ca"),
        ("[ingress\n", "line 1", "TOML"),
        ("[ingress]\nhosts = ['a']\n[hosts]\ndashboard = 'javascript:x'\n", "hosts.dashboard", "write"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, why: str, remedy: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(LauncherError) as error:
        load_fleet(path)
    assert str(path) in error.value.message
    assert why in error.value.message
    assert remedy in error.value.remedy


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"cannot read .*no such file"):
        load_fleet(tmp_path / "none.toml")


def test_the_example_and_the_units_name_what_is_there() -> None:
    root = Path(__file__).parents[2]
    folder, units = root / "configs" / "fleet", root / "systemd"
    assert load_fleet(folder / "fleet.toml").ingress.hosts == ("10.0.0.1", "10.0.0.2")
    ingress = (units / "numa-launcher-ingress.service").read_text()
    words = next(line for line in ingress.splitlines() if line.startswith("ExecStart=")).split()[2:]
    assert build_parser("fleet").parse(words).action == "ingress"
    assert "KillMode=process" in ingress  # HAProxy goes on
    started = load_fleet(folder / "fleet.toml")
    assert f"{started.ingress.start[-1]}.service" in {unit.name for unit in units.iterdir()}
    ray = (units / "numa-launcher-ray.service").read_text()
    assert set(re.findall(r"\$\{?(\w+)", ray)) | {"RAY_AUTH_MODE"} == set(
        re.findall(r"^(\w+)=", (folder / "ray.env").read_text(), flags=re.MULTILINE)
    )


def test_ray_has_a_token_and_is_of_a_version_that_asks_for_it() -> None:
    """Ray before 2.52 runs the programs of whoever reaches its ports, whatever the environment says."""
    root = Path(__file__).parents[2]
    (needed,) = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"][
        "fleet"
    ]
    least = re.fullmatch(r"ray>=(\d+)\.(\d+)", needed)
    assert least is not None
    assert (int(least[1]), int(least[2])) >= (2, 52)
    unit = (root / "systemd" / "numa-launcher-ray.service").read_text()
    assert (
        "RAY_AUTH_MODE=token" in " ".join(re.findall(r"^Environment=(.*)", unit, flags=re.MULTILINE)).split()
    )
    assert "RAY_AUTH_MODE=token\n" in (root / "configs" / "fleet" / "ray.env").read_text()
