"""Rules on `engine.runtime`, `engine.image` and `engine.runtime_args` that types cannot express."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from launcher.config.schema import Config, Runtime, SpawnerKind
from launcher.errors import LauncherError

# Options that only the launcher sets -> remedy.
_RESERVED: Final = {
    "--name": "remove it: the launcher names a container after its slot and finds it by that name",
    "--rm": "remove it: the launcher removes a container after it has read why it exited",
    "--detach": "remove it: the launcher reads output and exit status from the client, which must keep running",
    "-d": "remove it: the launcher reads output and exit status from the client, which must keep running",
    "--init": "remove it: the launcher sets it already",
    "--cpuset-cpus": "remove it: the plan sets it; see [layout]",
    "--cpuset-mems": "remove it: the plan sets it; see [layout]",
    "--entrypoint": "set engine.command instead",
    "--sig-proxy": "remove it: SIGTERM must reach the engine",
    "--pid": "remove it: the launcher finds an instance's main process as the first of its pid namespace",
}


def check_runtime(config: Config, origin_of: Callable[[str], str]) -> None:
    """Raises LauncherError. `origin_of` says where a key was set."""
    engine = config.engine
    if engine.runtime is Runtime.HOST:
        for key, value in (("image", engine.image), ("runtime_args", engine.runtime_args)):
            if value:
                raise LauncherError(
                    f"cannot use {origin_of(f'engine.{key}')}: engine.{key} applies to containers "
                    "only, and engine.runtime = 'host'",
                    f'set engine.runtime = "podman" or "docker", or remove {key}',
                )
        return
    if engine.image is None:
        raise LauncherError(
            f"cannot use {origin_of('engine.runtime')}: engine.runtime = '{engine.runtime}' without engine.image",
            'set it, for example image = "docker.io/vllm/vllm-openai-cpu:v0.32.0-x86_64"',
        )
    if config.supervision.spawner is SpawnerKind.SYSTEMD:
        raise LauncherError(
            f"cannot use {origin_of('supervision.spawner')}: supervision.spawner = 'systemd' cannot be "
            f"combined with engine.runtime = '{engine.runtime}': a unit's limits and signals would reach the client only",
            'set supervision.spawner = "auto" or "direct"',
        )
    for argument in engine.runtime_args:
        flag = argument.partition("=")[0]
        if flag in _RESERVED:
            raise LauncherError(
                f"cannot use {origin_of('engine.runtime_args')}: engine.runtime_args: the launcher sets '{flag}'",
                _RESERVED[flag],
            )
