"""Containers: what does not go together."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.base.errors import LauncherError
from launcher.config.loading import parse_config
from launcher.config.schema import Runtime

GOOD = {"runtime": "podman", "image": "vllm"}


def parse(engine: dict[str, Any], **sections: Any) -> Runtime:
    tree = {"models": [{"name": "m", "path": "/x"}], "engine": engine, **sections}
    return parse_config(tree, origin="f").engine.runtime


def test_good() -> None:
    assert parse({}) is Runtime.HOST
    assert parse({**GOOD, "runtime_args": ["--memory=64g", "--ipc", "host"]}) is Runtime.PODMAN
    assert parse({**GOOD, "runtime": "docker"}, supervision={"spawner": "direct"}) is Runtime.DOCKER


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ({"image": "vllm"}, "engine.image applies to containers"),
        ({"runtime_args": ["--memory=1g"]}, "engine.runtime_args applies to containers"),
        ({"kind": "command"}, "engine.kind = 'command' without engine.command"),
        ({"kind": "llama.cpp", **GOOD}, "engine.runtime = 'podman' with engine.kind = 'llama.cpp'"),
        ({"runtime": "podman"}, "engine.runtime = 'podman' without engine.image"),
        ({**GOOD, "runtime_args": ["--name=x"]}, "the launcher sets '--name'"),
        ({**GOOD, "runtime_args": ["--cpuset-cpus", "0"]}, "the launcher sets '--cpuset-cpus'"),
    ],
)
def test_bad(engine: dict[str, Any], why: str) -> None:
    with pytest.raises(LauncherError, match=why) as refused:
        parse(engine)
    assert refused.value.remedy


def test_units_and_containers_exclude_each_other() -> None:
    with pytest.raises(LauncherError, match=r"cannot be combined with engine\.runtime = 'podman'"):
        parse(GOOD, supervision={"spawner": "systemd"})
