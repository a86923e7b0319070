"""`reload`: reads the configuration again, says what would change, and starts the rollout that goes there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from launcher.cpuset import CpuSet
from launcher.daemon.deployment import Deployment
from launcher.errors import BusyError, LauncherError, RefusedError
from launcher.instances.backoff import Limits
from launcher.instances.disruption import Standing, check
from launcher.instances.ports import Prober
from launcher.instances.probe_settings import ProbeSettings
from launcher.instances.slot_state import Intent, State
from launcher.instances.supervisor import Supervisor
from launcher.rollout.diff import Changes, Step, compare
from launcher.rollout.rollout import Rollout, Stage, least_of

log = logging.getLogger("launcher.rollout")

# To ask systemd what an earlier daemon left: milliseconds mostly. Less than a client of the control socket waits.
TAKE_OVER_S: Final = 20.0

Reread = Callable[[Sequence[str]], Deployment]
"""Makes the plan anew, with overrides. Blocking. Raises LauncherError."""


class Reloader:
    """At most one rollout at a time."""

    def __init__(
        self,
        supervisor: Supervisor,
        prober: Prober,
        reread: Reread | None,
        reloaded: Callable[[Deployment], None],
    ) -> None:
        self._supervisor = supervisor
        self._prober = prober
        self._reread = reread
        self._reloaded = reloaded
        self._rollout: Rollout | None = None
        self._rolling: asyncio.Task[None] | None = None
        self._comparing = asyncio.Lock()
        self._ended = False

    async def reload(
        self, before: Deployment, overrides: Sequence[str], *, dry_run: bool, force: bool
    ) -> dict[str, Any]:
        """Re-read the configuration and go there, one slot at a time. Returns when it has begun.

        Raises LauncherError for a configuration that can't be used: nothing has changed then. RefusedError where
        only a restart of the daemon would take it over, while another reload runs, or without a spare instance.
        """
        if self._reread is None:
            raise RefusedError(
                "cannot reload: the daemon was started without a file", "start it with serve -c FILE"
            )
        if self._rolling is not None or self._comparing.locked():
            raise RefusedError("cannot reload: another reload is running", "numa-launcher reload --show")
        async with self._comparing:
            await self._wait_for_take_over()
            allowed = before.topology.allowed | before.topology.offline  # it may have come back
            after = await asyncio.to_thread(_in_full_view, self._reread, overrides, allowed)
            changes = compare(before, after)
            if dry_run:
                return {"stage": "dry run", "changes": changes}
            if self._ended:  # while it compared
                raise RefusedError("cannot reload: the daemon is stopping", "start the daemon again")
            self._check(before, after, changes, force=force)
            self._rollout = Rollout(
                self._supervisor, self._prober, before, after, changes, settings_of, force=force
            )
            self._rolling = asyncio.create_task(self._roll(self._rollout, after), name="reload")
        return self.show()

    async def _wait_for_take_over(self) -> None:
        """Until it is known what an earlier daemon left running: a slot that looks stopped may have an instance.

        Raises BusyError.
        """
        try:
            async with asyncio.timeout(TAKE_OVER_S):
                await self._supervisor.begun()
        except TimeoutError:
            raise BusyError(
                "cannot reload: the instances of an earlier daemon are still being taken over",
                "look at `numa-launcher status`, then reload again",
            ) from None

    def _check(self, before: Deployment, after: Deployment, changes: Changes, *, force: bool) -> None:
        """Raise RefusedError where only a restart of the daemon would do, or some step would leave too few instances."""
        if changes.needs_restart:
            keys = ", ".join(changes.needs_restart)
            raise RefusedError(
                f"cannot reload: only a restart of the daemon takes over {keys}",
                "systemctl restart numa-launcher, or take these changes back",
            )
        if force:
            return
        # One that is on its way is waited for.
        standing = {
            slot: Standing(
                controller.slot.model.name,
                controller.slot_state.intent is Intent.RUN
                and controller.slot_state.state is not State.FAILED,
            )
            for slot, controller in self._supervisor.controllers.items()
        }
        least = least_of(before)
        models = {slot.id: slot.model.name for slot in after.plan.slots}
        for change in changes.steps:
            if change.step is not Step.START and change.slot in standing:
                check("reload", change.slot, standing, least[standing[change.slot].model])
                stood = standing.pop(change.slot)
                if change.step is Step.RESTART:
                    standing[change.slot] = Standing(models[change.slot], stood.ready)
            elif change.step is Step.START:
                standing[change.slot] = Standing(models[change.slot], ready=True)

    async def _roll(self, rollout: Rollout, after: Deployment) -> None:
        try:
            if await rollout.run():
                self._reloaded(after)
        except Exception as error:
            rollout.progress.stage = Stage.STUCK
            rollout.progress.error = f"cannot reload: {error!r}, which should not happen"
            rollout.progress.remedy = (
                "look at the daemon's log and at `numa-launcher status`; report it with a bundle"
            )
            log.exception("reload: failed", extra={"audit": "stuck"})
        finally:
            self._rolling = None

    def show(self) -> dict[str, Any]:
        """How far the last reload has come."""
        if self._rollout is None:
            return {"stage": "none"}
        progress = self._rollout.progress
        return {
            "stage": progress.stage, "changes": progress.changes, "done": progress.done, "doing": progress.doing,
            "error": progress.error, "remedy": progress.remedy,
        }  # fmt: skip

    @property
    def target(self) -> Deployment | None:
        """Where a rollout that is under way goes to."""
        return self._rollout.after if self._rollout is not None and self._rolling is not None else None

    async def end(self) -> None:
        """A daemon that ends goes nowhere any more."""
        self._ended = True
        if self._rolling is not None:
            self._rolling.cancel()
            await asyncio.wait({self._rolling})


def _in_full_view(reread: Reread, overrides: Sequence[str], allowed: CpuSet) -> Deployment:
    """In a thread: with the cpus that the daemon had before it moved to the reserved ones. Raises LauncherError."""
    was = os.sched_getaffinity(0)
    try:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, set(allowed))
        after = reread(overrides)
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, was)
    refuse_violations(after)
    return after


def refuse_violations(deployment: Deployment) -> None:
    """Raise LauncherError where the plan can't be started."""
    if violations := deployment.plan.violations:
        more = f" (and {len(violations) - 1} more, see `numa-launcher plan`)" if len(violations) > 1 else ""
        raise LauncherError(violations[0].message + more, violations[0].remedy)


def settings_of(deployment: Deployment) -> tuple[Limits, ProbeSettings]:
    """What a slot controller works with."""
    return Limits.of(deployment.config.supervision), ProbeSettings.of(deployment.config)
