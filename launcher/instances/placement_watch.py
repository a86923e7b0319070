"""Compares an instance's threads and pages with the plan; logs each new difference once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from launcher.cpuset import CpuSet
from launcher.engines.zentorch import zentorch_active
from launcher.host.placement import Bystander, MisplacedThread, ProcessFacts
from launcher.instances.instance import Instance
from launcher.instances.verify import NOTHING, Requested, Verification, verify
from launcher.plan import Slot

log = logging.getLogger("launcher.instances")

Misplaced = Callable[[Iterable[int], CpuSet], tuple[MisplacedThread, ...]]


class PlacementWatch:
    """`observe` reads a process and its descendants, `bystanders` all other processes, `misplaced` threads outside some
    cpus; `bound`: memory is strictly bound."""

    def __init__(
        self,
        observe: Callable[[int], Sequence[ProcessFacts]],
        bystanders: Callable[[], Sequence[Bystander]],
        misplaced: Misplaced,
        *,
        bound: bool,
    ) -> None:
        self._observe = observe
        self._bystanders = bystanders
        self._misplaced = misplaced
        self._bound = bound

    async def verify(self, slot: Slot, instance: Instance, output: Sequence[str]) -> None:
        """Leave the result in `instance.verification`. `output`: the instance's last lines. Nothing without a process."""
        process = instance.process
        if process is None:
            return
        facts = await asyncio.to_thread(self._observe, process.pid)
        pids = frozenset(process_facts.pid for process_facts in facts)
        others = [other for other in await asyncio.to_thread(self._bystanders) if other.pid not in pids]
        misplaced = await asyncio.to_thread(self._misplaced, pids, slot.placement.cpus)
        if instance.process is not process:
            return  # it ended meanwhile
        instance.misplaced_now(misplaced)
        env = instance.launch.env if instance.launch is not None else {}
        active = zentorch_active(output, "") is True
        # A loading instance has not yet mapped and bound everything.
        requested = Requested.of(env, zentorch=active) if instance.served else NOTHING
        found = verify(slot.placement, facts, bound=self._bound, requested=requested, others=others)
        before = instance.verification
        instance.verified(found, pids, zentorch=zentorch_active(output, " ".join(found.libraries)))
        _log_new({"slot": slot.id, "generation": instance.generation}, before, found)

    async def threads_moved(self, slot: Slot, instance: Instance) -> bool:
        """Whether other threads than before are outside the slot's cpus. Cheap: `verify` reads the node of each page."""
        process, before = instance.process, instance.misplaced
        found = await asyncio.to_thread(self._misplaced, instance.tree, slot.placement.cpus)
        if process is None or instance.process is not process:
            return False
        instance.misplaced_now(found)
        return found != before


def _log_new(where: Mapping[str, int], before: Verification | None, found: Verification) -> None:
    slot = where["slot"]
    for problem in found.problems:
        if before is None or problem not in before.problems:
            log.warning("slot %d: placement differs from the plan: %s", slot, problem, extra=where)
    foreign = [process for process in found.foreign if before is None or process not in before.foreign]
    if foreign:
        more = f", and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        log.warning(
            "slot %d: other processes on its cpus: %s%s; `numa-launcher verify %d` shows all",
            slot, foreign[0], more, slot, extra=where,
        )  # fmt: skip
