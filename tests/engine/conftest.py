"""Two real vLLM instances under a real daemon, with a small random-weight model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.daemon_process import DaemonProcess
from support.engine_runs import READY_S, Configure

from launcher.engines import tiny_model


@pytest.fixture(scope="session")
def vllm() -> str:
    """The vllm command beside this Python."""
    command = Path(sys.executable).with_name("vllm")
    assert command.exists(), f"no {command}: these tests need numa-launcher[vllm] (scripts/test installs it)"
    return str(command)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, vllm: str) -> Path:
    """A model directory made here."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model.make(folder)
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile caches, shared by all daemons of this run as on a server."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def configure(model: Path, vllm: str, cache: Path) -> Configure:
    """Makes the text of a configuration with real vLLM."""

    def make(
        *,
        name: str = "tiny",
        path: Path = model,
        instances: int = 2,
        compiled: bool = False,
        max_model_len: int = 2048,
        ranks: int = 1,
        args: Sequence[str] = (),
    ) -> str:
        """Not `compiled`: ready soonest, and in float32: vLLM 0.32 ends in SIGILL with bfloat16 there, on CPUs with AMX."""
        if not compiled:
            args = ("--enforce-eager", *args)
        return f"""
[[models]]
name = {json.dumps(name)}
path = {json.dumps(str(path))}
dtype = "{"bfloat16" if compiled else "float32"}"
max_model_len = {max_model_len}
max_num_seqs = 16
tensor_parallel_size = {ranks}
[layout]
instances_per_socket = {instances}
reserve_cores = 0
[engine]
command = {json.dumps([vllm])}
args = {json.dumps(list(args))}
cache_dir = {json.dumps(str(cache))}
[supervision]
probe_interval_s = 1
"""

    return make


@pytest.fixture
def only(configure: Configure, tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon with one ready instance."""
    daemon = DaemonProcess(tmp_path, configure(instances=1, max_model_len=512))
    try:
        daemon.wait_ready(1, READY_S)
        yield daemon
    finally:
        daemon.end()


@pytest.fixture(scope="session")
def config(configure: Configure) -> str:
    """Two instances of one core each, compiled as in production."""
    return configure(compiled=True)


@pytest.fixture(scope="module")
def start_vllm(
    config: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], DaemonProcess]]:
    """Starts daemons with real vLLM; each is stopped at the end and must leave no process."""
    running: list[DaemonProcess] = []

    def begin() -> DaemonProcess:
        daemon = DaemonProcess(tmp_path_factory.mktemp("d"), config)
        running.append(daemon)
        return daemon

    yield begin
    for daemon in running:
        daemon.end()


@pytest.fixture(scope="module")
def daemon(start_vllm: Callable[[], DaemonProcess]) -> DaemonProcess:
    """One daemon with two ready instances, for the whole module."""
    daemon = start_vllm()
    daemon.wait_ready(2, READY_S)
    return daemon
