"""Programs, allocators and images are looked for; nothing is started but a client of containers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from launcher.base.errors import LauncherError, PassingError
from launcher.config.schema import Engine, EngineKind, Runtime
from launcher.engines.make import probe_stack
from launcher.engines.software import find_tcmalloc


def test_a_command_engine_is_looked_up_too() -> None:
    with pytest.raises(LauncherError, match="no command 'no-such-server'"):
        probe_stack(Engine(kind=EngineKind.COMMAND, command=("no-such-server", "{uds}")))
    stack = probe_stack(Engine(kind=EngineKind.COMMAND, command=("sh", "{uds}")))
    assert stack.command[0].endswith("/sh")
    assert stack.tcmalloc is None


def test_what_is_named_by_a_path_that_is_not_there_is_waited_for(tmp_path: Path) -> None:
    """An environment on a mount that is not there yet; a file that is there and cannot be run is a mistake."""
    path = tmp_path / "nfs" / "engine"
    for engine in (
        Engine(command=(str(path),)),
        Engine(kind=EngineKind.COMMAND, command=(str(path), "{uds}")),
        Engine(kind=EngineKind.COMMAND, command=("sh", "{uds}"), tcmalloc=str(path)),
    ):
        with pytest.raises(PassingError, match="nfs/engine"):
            probe_stack(engine)
    path.parent.mkdir()
    path.write_text("no program")
    with pytest.raises(LauncherError) as mistake:
        probe_stack(Engine(kind=EngineKind.COMMAND, command=(str(path), "{uds}")))
    assert not isinstance(mistake.value, PassingError)


@pytest.mark.parametrize(
    ("said", "waits"),
    [
        (
            "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
            True,
        ),
        (
            "failed to connect to the docker API at unix:///var/run/docker.sock; check if the path is correct",
            True,
        ),
        ("Error: No such image: gone", False),
    ],
)
def test_dockers_daemon_may_begin_after_this_one(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\necho '{said}' >&2; exit 1\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LauncherError, match=r"cannot use engine\.image 'gone'") as refused:
        probe_stack(Engine(runtime=Runtime.DOCKER, image="gone", command=("vllm",)))
    assert isinstance(refused.value, PassingError) is waits


def test_tcmalloc_paths() -> None:
    assert find_tcmalloc("off") is None
    assert find_tcmalloc(sys.executable) == sys.executable
    with pytest.raises(LauncherError, match="no such file"):
        find_tcmalloc("/nowhere/libtcmalloc.so")


def test_an_image_is_asked_of_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    podman = tmp_path / "podman"
    podman.write_text(
        '#!/bin/sh\n[ "$4" = here ] && echo sha256:abc || { echo "$4: image not known" >&2; exit 125; }\n'
    )
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    stack = probe_stack(Engine(runtime=Runtime.PODMAN, image="here"))
    assert (stack.client, stack.image, stack.command) == (str(podman), "sha256:abc", ("vllm",))
    assert stack.tcmalloc is None, "the image's own"
    with pytest.raises(LauncherError, match="image not known") as refused:
        probe_stack(Engine(runtime=Runtime.PODMAN, image="gone"))
    assert refused.value.remedy == "run: podman pull gone"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(LauncherError, match="no command 'podman'"):
        probe_stack(Engine(runtime=Runtime.PODMAN, image="here"))
