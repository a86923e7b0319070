"""Where a running instance's threads and pages are, now and then; what is other than planned is said when it is new."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from launcher.engines.zentorch import zentorch_active
from launcher.host.placement import Bystander, ProcessFacts
from launcher.instances.instance import Instance
from launcher.instances.verify import NOTHING, Asked, Verification, verify
from launcher.plan import Slot

log = logging.getLogger("launcher.instances")


class PlacementWatch:
    """`observe` reads a process and all below it, `look_around` those of others; `bound`: memory is strictly bound."""

    def __init__(
        self,
        observe: Callable[[int], Sequence[ProcessFacts]],
        look_around: Callable[[], Sequence[Bystander]],
        *,
        bound: bool,
    ) -> None:
        self._observe = observe
        self._look_around = look_around
        self._bound = bound

    async def look(self, slot: Slot, instance: Instance, said: Sequence[str]) -> Verification | None:
        """Once; the result stays in `life`. `said`: what the instance has printed. None when nothing runs."""
        process = instance.process
        if process is None:
            return None
        facts = await asyncio.to_thread(self._observe, process.pid)
        ours = {process_facts.pid for process_facts in facts}
        others = [other for other in await asyncio.to_thread(self._look_around) if other.pid not in ours]
        if instance.process is not process:
            return None  # it ended while we looked
        instance.pids |= ours
        env = instance.launch.env if instance.launch is not None else {}
        known, instance.verification = (
            instance.verification,
            verify(
                slot.placement,
                facts,
                bound=self._bound,
                # One that still loads has neither mapped nor bound everything yet.
                asked=Asked.of(env, zentorch=zentorch_active(said, "") is True)
                if instance.served
                else NOTHING,
                others=others,
            ),
        )
        instance.zentorch = zentorch_active(said, " ".join(instance.verification.libraries))
        _tell(slot.id, known, instance.verification)
        return instance.verification


def _tell(slot: int, known: Verification | None, found: Verification) -> None:
    for problem in found.problems:
        if known is None or problem not in known.problems:
            log.warning("slot %d: placement differs from the plan: %s", slot, problem, extra={"slot": slot})
    strangers = [stranger for stranger in found.foreign if known is None or stranger not in known.foreign]
    if strangers:
        more = f", and {len(strangers) - 1} more" if len(strangers) > 1 else ""
        log.warning(
            "slot %d: not ours on its cpus: %s%s; `numa-launcher verify %d` shows all", slot, strangers[0], more, slot,
            extra={"slot": slot},
        )  # fmt: skip
