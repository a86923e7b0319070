"""A daemon over two real llama-servers, started by the command that configs/command-engine.toml shows."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine.llama_server import gguf_file
from support.daemon_process import DaemonProcess
from support.tools import TOOLS

from launcher.engines import tiny_model
from launcher.engines.llama_cpp.build import WHEEL

EXAMPLE = Path(__file__).resolve().parents[3] / "configs/command-engine.toml"
VARIABLE = "NUMA_LAUNCHER_TEST_LLAMA_SERVER"


@pytest.fixture(scope="session")
def llama_server(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The program named by the variable, else one that scripts/build-llama-server made, else the wheel's."""
    path = Path(os.environ.get(VARIABLE) or TOOLS / "llama-server")
    if VARIABLE not in os.environ and not path.exists():
        path = tmp_path_factory.mktemp("program") / "llama-server"
        path.write_text(f'#!/bin/sh\nexec {shlex.join(WHEEL)} "$@"\n')
        path.chmod(0o755)
    assert os.access(path, os.X_OK), f"{VARIABLE}={path} is no program"
    return str(path)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as vLLM reads it."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model.make(folder)
    return folder


@pytest.fixture(scope="session")
def gguf(model_folder: Path) -> Path:
    """The same weights and tokenizer as one GGUF file."""
    file = model_folder.parent / "tiny.gguf"
    gguf_file.write(model_folder, file)
    return file


@pytest.fixture(scope="session")
def config(llama_server: str, gguf: Path) -> Callable[..., str]:
    """The example with the program's path, a small context, `options` of the program, and `more` of configuration."""

    def make(more: str = "", instances: int = 2, stall_s: float = 5.0, options: tuple[str, ...] = ()) -> str:
        command = tomllib.loads(EXAMPLE.read_text())["engine"]["command"]
        assert command[0] == "llama-server"
        command = [llama_server, *command[1:], *options]
        command[command.index("--ctx-size") + 1] = "16384"
        return f"""
[[models]]
name = "tiny"
path = {json.dumps(str(gguf))}
[layout]
instances_per_socket = {instances}
reserve_cores = 0
[engine]
kind = "command"
command = {json.dumps(command)}
[supervision]
probe_interval_s = 0.5
backoff_initial_s = 0.2
stall_timeout_s = {stall_s}
{more}
"""

    return make


@pytest.fixture
def start_by_kind(llama_server: str, gguf: Path, tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts a daemon with `kind = "llama.cpp"` and the model's path; with arguments of the engine and `limits` of the model
    if there are any. The program is found in PATH, the wheel's server by the launcher itself."""
    program = Path(llama_server)
    assert program.name == "llama-server"
    path = os.environ["PATH"]
    if WHEEL[-1] not in program.read_bytes()[:4096].decode(errors="replace"):
        path = f"{program.parent}:{path}"
    else:
        assert shutil.which("llama-server") is None, "PATH has another llama-server"
    running: list[DaemonProcess] = []

    def begin(*args: str, file: Path = gguf, limits: str = "") -> DaemonProcess:
        text = f"""
[engine]
kind = "llama.cpp"
args = {json.dumps(args)}
[[models]]
name = "tiny"
path = {json.dumps(str(file))}
{limits}
[layout]
instances_per_socket = 2
reserve_cores = 0
[supervision]
probe_interval_s = 0.5
backoff_initial_s = 0.2
"""
        folder = tmp_path / "k"
        folder.mkdir()
        daemon = DaemonProcess(folder, text, {"PATH": path})
        running.append(daemon)
        daemon.wait_ready(2)
        return daemon

    yield begin
    for daemon in running:
        daemon.end()


@pytest.fixture
def start_llama(config: Callable[..., str], tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts a daemon and waits for its instances; each is stopped at the end and must leave no process."""
    running: list[DaemonProcess] = []

    def begin(
        more: str = "", instances: int = 2, stall_s: float = 5.0, options: tuple[str, ...] = ()
    ) -> DaemonProcess:
        folder = tmp_path / f"d{len(running)}"
        folder.mkdir()
        daemon = DaemonProcess(folder, config(more, instances, stall_s, options))
        running.append(daemon)
        daemon.wait_ready(instances)
        return daemon

    yield begin
    for daemon in running:
        daemon.end()
