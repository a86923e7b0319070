"""One daemon over two real vLLM instances for this whole folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon_process import DaemonProcess
from support.engine_runs import READY_S, Configure

from launcher.engines import tiny_model

# One token of this many ends a response, so that responses end by themselves, as with a real model.
ENDINGS = 32


@pytest.fixture(scope="session")
def talker(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with end tokens; greedy by default, with a repetition penalty."""
    folder = tmp_path_factory.mktemp("model") / "talker"
    shutil.copytree(model, folder)
    endings = [2, *range(tiny_model.VOCABULARY // 4, tiny_model.VOCABULARY, ENDINGS)]
    habits = {"eos_token_id": endings, "temperature": 0.0, "repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps(habits))
    return folder


@pytest.fixture(scope="session")
def two_instances(configure: Configure, talker: Path) -> str:
    """In float32 a token does not depend on who else is in the batch."""
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    return configure(path=talker, args=(*tools, "--max-num-batched-tokens", "2048"))


@pytest.fixture(scope="package")
def daemon(two_instances: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A ready daemon; stopped after the folder's last test, must leave no process."""
    folder = tmp_path_factory.mktemp("d")
    daemon = DaemonProcess(folder, f'{two_instances}\n[audit]\npath = "{folder / "audit"}"\n')
    try:
        daemon.wait_ready(2, READY_S)
        yield daemon
    finally:
        daemon.end()
