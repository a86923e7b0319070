"""What a plan's rules are told of this host."""

from __future__ import annotations

import pytest

from launcher.config.schema import Config, Engine, Model, Runtime
from launcher.daemon.deployment import _facts
from launcher.engines.software_versions import Stack

MODELS = (Model(name="m", path="/m"),)


def test_what_the_instances_inherit_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ZENTORCH_WEIGHT_PREPACK", "0")
    stack = Stack(command=("vllm",))
    assert _facts(stack, Config(models=MODELS)).weight_prepack == "0"
    # A container gets what is named, and none of the daemon's own variables.
    contained = Config(models=MODELS, engine=Engine(runtime=Runtime.PODMAN, image="x"))
    assert _facts(stack, contained).weight_prepack is None
