"""`engine.runtime = "podman" | "docker"`: the same launch in a container. Pure.

The options are those of vLLM's guide for CPUs (docs/getting_started/installation/cpu.x86.inc.md, 0.32). The cpuset
replaces numactl: the kernel confines threads and pages to it, whatever the image contains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from launcher.config.schema import Model, Runtime
from launcher.engines.base import MARK, Container, Engine, Launch, Traits, Unwanted
from launcher.engines.log import Accelerator, EngineLog
from launcher.plan.plan import Slot

LABEL: Final = "numa-launcher"
# Printed by `Container.last_word`, read by diagnosis.
OOM_LINE: Final = "numa-launcher: the container's memory limit was reached: OOMKilled"
# As in vLLM's guide; processes of an instance share tensors through it.
SHM_SIZE: Final = "4g"
_COMMON: Final = (
    # An init process: signals work before the engine installs handlers, and orphans are reaped.
    "--init",
    "--pull=never",
    # The daemon keeps the log; the client's log file would grow without limit.
    "--log-driver=none",
    "--network=host",
    # For migrate_pages and mbind, with which vLLM binds its memory; SELinux would deny access to the socket.
    "--security-opt=seccomp=unconfined",
    "--security-opt=label=disable",
    "--cap-add=SYS_NICE",
    # podman's 2048 are too few for the compiler's processes and OpenMP's threads on a large slot.
    "--pids-limit=-1",
)


class Volume(Struct, frozen=True):
    """A folder or file of the host, mounted at the same path."""

    path: str
    writable: bool = False

    @property
    def option(self) -> str:
        return f"--volume={self.path}:{self.path}" + ("" if self.writable else ":ro")


class Wrapping(Struct, frozen=True):
    """How launches are wrapped in containers."""

    runtime: Runtime
    client: str
    """Path of podman or docker."""
    image: str
    socket_dir: str
    binds_memory: bool
    args: tuple[str, ...] = ()
    """The operator's options; the last one counts where only one value is allowed."""
    volumes: tuple[Volume, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Defaults that the engine's own environment overrides."""

    def wrap(self, launch: Launch, slot: Slot) -> Launch:
        """The same launch in a container named after its slot, so that no second one can run."""
        # Names are global on the host, so they include the daemon's socket folder.
        name = f"{LABEL}-slot{slot.id}-{hashlib.sha256(self.socket_dir.encode()).hexdigest()[:8]}"
        env = {**self.env, **launch.env}
        argv = (
            self.client,
            "run",
            f"--name={name}",
            f"--label={LABEL}={self.socket_dir}",
            *_COMMON,
            *self._shared_memory(),
            f"--cpuset-cpus={slot.placement.cpus.format()}",
            *self._memory(slot),
            *(volume.option for volume in self._volumes()),
            # Name only: the value comes from the client's environment and is on no command line.
            *(f"--env={key}" if key in launch.secrets else f"--env={key}={env[key]}" for key in env),
            f"--env={MARK}",
            *self.args,
            f"--entrypoint={launch.argv[0]}",
            self.image,
            *launch.argv[1:],
        )
        return replace(launch, argv=argv, env=env, container=self._container(name))

    def _shared_memory(self) -> tuple[str, ...]:
        """podman rejects a size together with --ipc=host."""
        of_another = any(word.partition("=")[0] == "--ipc" for word in self.args)
        return () if of_another else (f"--shm-size={SHM_SIZE}",)

    def _memory(self, slot: Slot) -> tuple[str, ...]:
        membind = slot.placement.membind
        return (f"--cpuset-mems={membind.format()}",) if self.binds_memory and membind else ()

    def _volumes(self) -> tuple[Volume, ...]:
        return (Volume(self.socket_dir, writable=True), *self.volumes)

    def _container(self, name: str) -> Container:
        remove: tuple[str, ...] = (self.client, "rm", "--force", "--volumes")
        if self.runtime is Runtime.PODMAN:
            # Without --time, ten seconds pass between SIGTERM and SIGKILL.
            remove = (*remove, "--ignore", "--time=0")
        return Container(
            folders=tuple(volume.path for volume in self._volumes() if volume.writable),
            last_word=(
                self.client, "inspect", "--type=container",
                "--format={{if .State.OOMKilled}}" + OOM_LINE + "{{end}}", name,
            ),
            remove=(*remove, name),
            left_over=(
                self.client, "ps", "--all", "--quiet", f"--filter=label={LABEL}={self.socket_dir}",
            ),
            remove_ids=remove,
        )  # fmt: skip


class ContainedEngine(Struct, frozen=True):
    """An engine with its instances in containers. Implements Engine."""

    inner: Engine
    wrapping: Wrapping

    @property
    def wants_completion_probe(self) -> bool:
        return self.inner.wants_completion_probe

    @property
    def health_path(self) -> str:
        return self.inner.health_path

    @property
    def log(self) -> EngineLog:
        return self.inner.log

    @property
    def accelerator(self) -> Accelerator | None:
        return self.inner.accelerator

    @property
    def unwanted(self) -> tuple[Unwanted, ...]:
        return self.inner.unwanted

    def traits(self, model: Model) -> Traits:
        return self.inner.traits(model)

    def launch(self, slot: Slot, generation: int) -> Launch:
        return self.wrapping.wrap(self.inner.launch(slot, generation), slot)
