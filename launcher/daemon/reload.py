"""`reload`: reads the configuration again, compares it with the one in force, and starts the rollout."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from launcher.base.cpuset import CpuSet
from launcher.base.errors import BusyError, LauncherError, RefusedError
from launcher.daemon.deployment import Deployment
from launcher.daemon.rollout import Changes, Rollout, Stage, Step, compare, min_ready_by_model
from launcher.instances.lifecycle import Limits
from launcher.instances.ports import Prober
from launcher.instances.slot_state import Intent, ProbeSettings, State
from launcher.instances.supervisor import Availability, Supervisor, check

# For systemd to list the units of an earlier daemon, usually milliseconds. Less than a control client waits.
ADOPTION_S: Final = 20.0

Reread = Callable[[Sequence[str]], Deployment]
"""Builds the deployment again, with overrides. Blocking. Raises LauncherError."""


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
        """Start a rollout to the configuration as it is now; `dry_run` only returns the difference.

        Raises LauncherError for an unusable configuration, and RefusedError where a restart of the daemon is needed,
        while another reload runs, or where too few instances would stay ready. Nothing has changed then."""
        if self._reread is None:
            raise RefusedError(
                "cannot reload: the daemon was started without a file", "start it with serve -c FILE"
            )
        if self._rolling is not None or self._comparing.locked():
            raise RefusedError("cannot reload: another reload is running", "numa-launcher reload --show")
        async with self._comparing:
            await self._wait_for_adoption()
            allowed = before.topology.allowed | before.topology.offline  # offline cpus may be back online
            after = await asyncio.to_thread(_reread_with_all_cpus, self._reread, overrides, allowed)
            controllers = self._supervisor.controllers.items()
            changes = compare(before, after, {slot: (k.started_from, k.engine) for slot, k in controllers})
            if dry_run:
                return {"stage": "dry run", "changes": changes}
            if self._ended:  # meanwhile
                raise RefusedError("cannot reload: the daemon is stopping", "start the daemon again")
            self._check(before, after, changes, force=force)
            self._rollout = Rollout(
                self._supervisor, self._prober, before, after, changes, settings_of, force=force
            )
            self._rolling = asyncio.create_task(self._roll(self._rollout), name="reload")
        return self.show()

    async def idle(self) -> None:
        """Return when no reload runs and the instances of an earlier daemon are adopted: the next may begin."""
        await self._supervisor.adopted()
        while self._rolling is not None or self._comparing.locked():
            if self._rolling is not None:
                await asyncio.wait({self._rolling})
            else:
                async with self._comparing:
                    pass

    async def _wait_for_adoption(self) -> None:
        """A slot that seems stopped may have an instance of an earlier daemon. Raises BusyError."""
        try:
            async with asyncio.timeout(ADOPTION_S):
                await self._supervisor.adopted()
        except TimeoutError:
            raise BusyError(
                "cannot reload: the instances of an earlier daemon are still being adopted",
                "wait until `numa-launcher status` shows them, then reload again",
            ) from None

    def _check(self, before: Deployment, after: Deployment, changes: Changes, *, force: bool) -> None:
        if changes.needs_restart:
            keys = ", ".join(changes.needs_restart)
            raise RefusedError(
                f"cannot reload: only a restart of the daemon applies {keys}",
                "systemctl restart numa-launcher, or undo these changes",
            )
        if force:
            return
        # The rollout waits for instances that are starting.
        slots = {
            slot: Availability(
                controller.slot.model.name,
                controller.slot_state.intent is Intent.RUN
                and controller.slot_state.state is not State.FAILED,
            )
            for slot, controller in self._supervisor.controllers.items()
        }
        min_ready = min_ready_by_model(before)
        models = {slot.id: slot.model.name for slot in after.plan.slots}
        for change in changes.steps:
            if change.step is not Step.START and change.slot in slots:
                check("reload", change.slot, slots, min_ready[slots[change.slot].model])
                stopped = slots.pop(change.slot)
                if change.step is Step.RESTART:
                    slots[change.slot] = Availability(models[change.slot], stopped.ready)
            elif change.step is Step.START:
                slots[change.slot] = Availability(models[change.slot], ready=True)

    async def _roll(self, rollout: Rollout) -> None:
        try:
            if await rollout.run():
                self._reloaded(rollout.after)
        finally:
            self._rolling = None

    def show(self) -> dict[str, Any]:
        if self._rollout is None:
            return {"stage": "none"}
        progress = self._rollout.progress
        return {
            "stage": progress.stage, "changes": progress.changes, "done": progress.done, "doing": progress.doing,
            "error": progress.error, "remedy": progress.remedy,
        }  # fmt: skip

    @property
    def outcome(self) -> str:
        """The running reload, or how the last one has failed, in brackets; empty after one that was applied."""
        if self._rollout is None or self._rollout.progress.stage is Stage.DONE:
            return ""
        progress = self._rollout.progress
        if self._rolling is not None:
            return f" (a reload is {progress.stage}: {progress.doing})"
        return f" (the last reload was {progress.stage}: {progress.error})"

    @property
    def target(self) -> Deployment | None:
        """The new deployment of the running rollout, or of the last: a slot that could not be restored has it."""
        return None if self._rollout is None else self._rollout.after

    async def end(self) -> None:
        """The daemon exits: cancel a rollout that is running."""
        self._ended = True
        if self._rolling is not None:
            self._rolling.cancel()
            await asyncio.wait({self._rolling})


def _reread_with_all_cpus(reread: Reread, overrides: Sequence[str], allowed: CpuSet) -> Deployment:
    """In a thread, with the affinity that the daemon had before it moved to the reserved cpus. Raises LauncherError."""
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
    if violations := deployment.plan.violations:
        more = f" (and {len(violations) - 1} more, see `numa-launcher plan`)" if len(violations) > 1 else ""
        raise LauncherError(violations[0].message + more, violations[0].remedy)


def settings_of(deployment: Deployment) -> tuple[Limits, ProbeSettings]:
    return Limits.of(deployment.config.supervision), ProbeSettings.of(deployment.config)
