"""`engine.runtime = "podman" | "docker"`: the same launch, inside a container. No effects.

The options are those of vLLM's guide for CPUs (docs/getting_started/installation/cpu.x86.inc.md, 0.32). The cpuset
takes numactl's place: the kernel keeps threads and pages inside it, whatever the image holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from launcher.config.schema import Runtime
from launcher.engines.base import MARK, Container, Engine, Launch

if TYPE_CHECKING:
    from launcher.plan import Slot

LABEL: Final = "numa-launcher"

# What `Container.last_word` prints, and diagnosis reads.
OOM_LINE: Final = "numa-launcher: the container's memory limit was reached: OOMKilled"

# As in vLLM's guide; processes of one instance share tensors through it.
SHM_SIZE: Final = "4g"

_COMMON: Final = (
    # Signals reach the engine also before it handles them, and its orphans are reaped.
    "--init",
    "--pull=never",
    # The daemon keeps the lines: a log file of the client's would grow without bound.
    "--log-driver=none",
    "--network=host",
    # migrate_pages and mbind, which vLLM binds its memory with; SELinux would forbid the socket.
    "--security-opt=seccomp=unconfined",
    "--security-opt=label=disable",
    "--cap-add=SYS_NICE",
    # podman's 2048 are too few for the compiler's processes and OpenMP's threads on a large slot.
    "--pids-limit=-1",
)


@dataclass(frozen=True, slots=True)
class Volume:
    """A folder or file of the host, at the same path inside."""

    path: str
    writable: bool = False

    @property
    def option(self) -> str:
        """As `run` takes it."""
        return f"--volume={self.path}:{self.path}" + ("" if self.writable else ":ro")


@dataclass(frozen=True, slots=True)
class Wrapping:
    """How launches are put into containers."""

    runtime: Runtime
    client: str
    """Path of podman or docker."""
    image: str
    socket_dir: str
    binds_memory: bool
    args: tuple[str, ...] = ()
    """The operator's; of options that take one value, the last one counts."""
    volumes: tuple[Volume, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Where the engine's own environment does not say otherwise."""

    def wrap(self, launch: Launch, slot: Slot) -> Launch:
        """The same launch in a container that is named after its slot: there can't be two of it."""
        # Daemons differ by their sockets' folder; names are shared by the whole host.
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
            # A name alone: the value comes from the client's environment, and is in no command line.
            *(f"--env={key}" if key in launch.secrets else f"--env={key}={env[key]}" for key in env),
            f"--env={MARK}",
            *self.args,
            f"--entrypoint={launch.argv[0]}",
            self.image,
            *launch.argv[1:],
        )
        return replace(launch, argv=argv, env=env, container=self._container(name, launch.argv))

    def _shared_memory(self) -> tuple[str, ...]:
        """podman refuses a size together with another's memory (--ipc=host)."""
        of_another = any(word.partition("=")[0] == "--ipc" for word in self.args)
        return () if of_another else (f"--shm-size={SHM_SIZE}",)

    def _memory(self, slot: Slot) -> tuple[str, ...]:
        membind = slot.placement.membind
        return (f"--cpuset-mems={membind.format()}",) if self.binds_memory and membind else ()

    def _volumes(self) -> tuple[Volume, ...]:
        return (Volume(self.socket_dir, writable=True), *self.volumes)

    def _container(self, name: str, command: tuple[str, ...]) -> Container:
        remove: tuple[str, ...] = (self.client, "rm", "--force", "--volumes")
        if self.runtime is Runtime.PODMAN:
            # Without --time it would wait ten seconds between SIGTERM and SIGKILL.
            remove = (*remove, "--ignore", "--time=0")
        return Container(
            name=name,
            command=command,
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


@dataclass(frozen=True, slots=True)
class ContainedEngine:
    """Another engine, its instances in containers. Implements Engine."""

    inner: Engine
    wrapping: Wrapping

    @property
    def wants_completion_probe(self) -> bool:
        """The inner engine's."""
        return self.inner.wants_completion_probe

    @property
    def health_path(self) -> str:
        """The inner engine's."""
        return self.inner.health_path

    def launch(self, slot: Slot, generation: int) -> Launch:
        """What to start for the given life of a slot."""
        return self.wrapping.wrap(self.inner.launch(slot, generation), slot)
