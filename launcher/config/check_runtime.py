"""What the types of `engine.runtime`, `engine.image` and `engine.runtime_args` cannot say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from launcher.config.schema import Config, Runtime, SpawnerKind
from launcher.errors import LauncherError

# What the launcher alone decides, and where to ask for it instead.
_OURS_ALONE: Final = {
    "--name": "remove it: a container is named after its slot, and found by that name",
    "--rm": "remove it: the launcher removes a container when it has asked why it ended",
    "--detach": "remove it: an instance's output and exit come through the client, which must stay",
    "-d": "remove it: an instance's output and exit come through the client, which must stay",
    "--init": "remove it: it is there already",
    "--cpuset-cpus": "remove it: the plan decides; see [layout]",
    "--cpuset-mems": "remove it: the plan decides; see [layout]",
    "--entrypoint": "set engine.command instead",
    "--sig-proxy": "remove it: SIGTERM must reach the engine",
    "--pid": "remove it: an instance's main process is found by being the first of its own pid namespace",
}


def check_runtime(config: Config, origin_of: Callable[[str], str]) -> None:
    """Raises LauncherError that names who said the value; `origin_of` knows by key."""
    engine = config.engine
    if engine.runtime is Runtime.HOST:
        for key, value in (("image", engine.image), ("runtime_args", engine.runtime_args)):
            if value:
                raise LauncherError(
                    f"cannot use {origin_of(f'engine.{key}')}: engine.{key} is of containers, "
                    "and engine.runtime = 'host'",
                    'set engine.runtime = "podman" or "docker", or remove it',
                )
        return
    if engine.image is None:
        raise LauncherError(
            f"cannot use {origin_of('engine.runtime')}: engine.runtime = '{engine.runtime}' without engine.image",
            'name the image: image = "docker.io/vllm/vllm-openai-cpu:v0.32.0-x86_64"',
        )
    if config.supervision.spawner is SpawnerKind.SYSTEMD:
        raise LauncherError(
            f"cannot use {origin_of('supervision.spawner')}: supervision.spawner = 'systemd' does not go "
            f"together with engine.runtime = '{engine.runtime}': a unit's limits and signals would reach the client alone",
            'set supervision.spawner = "auto" or "direct"',
        )
    for argument in engine.runtime_args:
        flag = argument.partition("=")[0]
        if flag in _OURS_ALONE:
            raise LauncherError(
                f"cannot use {origin_of('engine.runtime_args')}: engine.runtime_args: the launcher sets '{flag}'",
                _OURS_ALONE[flag],
            )
