"""The command prefix that binds an instance to its cpus and memory nodes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from launcher.plan import Placement


class MemPolicy(StrEnum):
    """Memory policy, strictest first."""

    MEMBIND = "membind"
    PREFERRED = "preferred"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Binding:
    """What this machine permits. `numactl` and `taskset` are paths; with neither, nothing is bound."""

    policy: MemPolicy
    numactl: str | None = None
    taskset: str | None = None
    warning: str | None = None
    """What was refused and its cost; logged once."""

    @classmethod
    def of_container(cls, *, binds_memory: bool) -> Binding:
        """A container's cpuset binds the instance: no prefix is needed."""
        return cls(MemPolicy.MEMBIND if binds_memory else MemPolicy.NONE)

    def prefix(self, placement: Placement) -> tuple[str, ...]:
        if not placement.cpus:
            raise ValueError("a placement without cpus cannot be started")
        if self.numactl is None:
            return () if self.taskset is None else (self.taskset, "--cpu-list", placement.cpus.format())
        return (self.numactl, f"--physcpubind={placement.cpus.format()}", *self._memory(placement))

    def _memory(self, placement: Placement) -> tuple[str, ...]:
        match self.policy:
            case MemPolicy.MEMBIND if placement.membind:
                return (f"--membind={placement.membind.format()}",)
            case MemPolicy.PREFERRED if placement.membind:
                # numactl accepts one node here; --preferred-many needs Linux 5.15 and numactl 2.0.15.
                node = placement.node if placement.node in placement.membind else placement.membind.first
                return (f"--preferred={node}",)
            case MemPolicy.MEMBIND | MemPolicy.PREFERRED | MemPolicy.NONE:
                return ()
            case _:
                assert_never(self.policy)
