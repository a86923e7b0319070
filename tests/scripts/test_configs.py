"""Every example in configs/ is accepted as it is, and says what AMD's text says where it claims to."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest

from launcher.config.schema import Config, EngineKind, Strategy
from launcher.engines.command import check_template

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
EXAMPLES = sorted(path.stem for path in CONFIGS.glob("*.toml"))
PROMISED = {"quickstart", "epyc-9755-1p", "epyc-9755-2p", "epyc-vm-24", "command-engine", "server-llama-cpp"}


def load(name: str) -> Config:
    text = (CONFIGS / f"{name}.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), Config, strict=True)


def test_the_promised_examples_are_there() -> None:
    assert set(EXAMPLES) >= PROMISED


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_valid_and_commented(name: str) -> None:
    config = load(name)
    assert config.models
    assert (CONFIGS / f"{name}.toml").read_text(encoding="utf-8").startswith("# ")
    if config.engine.kind is EngineKind.COMMAND:
        check_template(config.engine.command)


@pytest.mark.parametrize("name", ["epyc-9755-1p", "epyc-9755-2p"])
def test_amds_layout(name: str) -> None:
    layout = load(name).layout
    assert (layout.strategy, layout.instances_per_socket) == (Strategy.INTERLEAVED, 2)
    assert (layout.use_smt, layout.reserve_cores) == (False, 0)


def test_llama_server_keeps_to_the_slot() -> None:
    command = load("command-engine").engine.command
    assert "--numa" not in command
    assert command[command.index("--threads") + 1] == "{threads}"
    assert command[command.index("--load-mode") + 1] == "none"
    assert command[command.index("--sse-ping-interval") + 1] == "1"
    assert "--metrics" in command


def test_that_the_control_group_equals_root_is_said_wherever_it_is_set() -> None:
    example = (CONFIGS / "server.toml").read_text(encoding="utf-8")
    (line,) = (line for line in example.splitlines() if line.startswith("# group ="))
    assert "equals root" in line
    for page in ("configuration", "control"):
        assert "equals root" in (CONFIGS.parent / "docs" / f"{page}.md").read_text(encoding="utf-8")
