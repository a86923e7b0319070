"""Starts of a real llama-server that fail: the cause is named, from the lines that it prints."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon_process import DaemonProcess, eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

Change = Callable[[bytes], bytes]
FailToStart = Callable[..., dict[str, Any]]


def of_an_unknown_type(whole: bytes) -> bytes:
    name = b"output_norm.weight"
    place = whole.index(name) + len(name) + 4 + 8
    return whole[:place] + b"\x63" + whole[place + 1 :]


def of_another_architecture(whole: bytes) -> bytes:
    return whole.replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0other", 1).replace(b"llama.", b"other.")


def without_a_tensor(whole: bytes) -> bytes:
    return whole.replace(b"output_norm.weight", b"output_none.weight", 1)


def with_a_broken_template(whole: bytes) -> bytes:
    return whole.replace(b"{%", b"{{", 1)


# A KV cache that is larger than all addresses of the process: "ulimit" below.
LARGE = """max_model_len = 131072
[memory]
kv_cache = "3GiB"
"""
ARGS = """[engine]
args = ["--chat-template", "{{"]
"""


@pytest.mark.parametrize(
    ("change", "more", "cause", "proof"),
    [
        (of_an_unknown_type, "", "unsupported-version", "has invalid ggml type 99"),
        (without_a_tensor, "", "model-damaged", "tensor 'output_norm.weight' not found"),
        (of_another_architecture, "", "unsupported-version", "unknown model architecture: 'other'"),
        (with_a_broken_template, "", "bad-chat-template", "chat template parsing error"),
        (bytes, ARGS, "bad-chat-template", "the supplied chat template is not supported"),
        (bytes, LARGE, "node-oom", "failed to allocate buffer for kv cache"),
    ],
)
def test_the_cause_of_a_failed_start_is_named(
    change: Change, more: str, cause: str, proof: str, fail_to_start: FailToStart
) -> None:
    found = fail_to_start(change, more)
    assert found["name"] == cause
    assert any(proof in line for line in found["evidence"]), found


def test_a_build_for_another_cpu_is_named(fail_to_start: FailToStart) -> None:
    """The signal that its first unknown instruction raises."""
    found = fail_to_start(bytes, "", first="case $* in *--version*) ;; *) kill -ILL $$ ;; esac")
    assert (found["name"], found["evidence"]) == ("missing-instruction-set", [])
    assert "scripts/build-llama-server" in found["remedy"]


@pytest.fixture
def fail_to_start(llama_server: str, gguf: Path, tmp_path: Path) -> Iterator[FailToStart]:
    """The cause that a daemon gives for the end of its instance, with a changed model and `more` of configuration; `first`:
    a line of shell before the program."""
    program, model = tmp_path / "llama-server", tmp_path / "changed.gguf"
    running: list[DaemonProcess] = []

    def start(change: Change, more: str, first: str = "ulimit -v 2500000") -> dict[str, Any]:
        program.write_text(f'#!/bin/sh\n{first}\nexec {shlex.quote(llama_server)} "$@"\n')
        program.chmod(0o755)
        model.write_bytes(change(gguf.read_bytes()))
        text = f"""
[layout]
instances_per_socket = 1
[[models]]
name = "tiny"
path = {json.dumps(str(model))}
{more}"""
        kind = ("NUMA_LAUNCHER_ENGINE__KIND", "NUMA_LAUNCHER_ENGINE__COMMAND")
        daemon = DaemonProcess(
            tmp_path, text, dict(zip(kind, ("llama.cpp", json.dumps([str(program)])), strict=True))
        )
        running.append(daemon)
        slot = eventually(
            lambda: next((its for its in daemon.status().get("slots", ()) if its["last_cause"]), None),
            what="a cause",
        )
        cause: dict[str, Any] = slot["last_cause"]
        return cause

    yield start
    for daemon in running:
        daemon.end()
