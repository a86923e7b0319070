"""The audit trail of the daemon: made from [audit], told of control actions, shown in metrics and `status`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import launcher
from launcher.config.schema import Audit
from launcher.control.action import ControlAction
from launcher.proxy.accounting import Accounting
from launcher.telemetry import metrics
from launcher.telemetry.spec import Values
from launcher.usage.audit import AuditTrail
from launcher.usage.audit_chain import ControlEntry
from launcher.usage.entry import Entry


class AuditAccount:
    """Does nothing without [audit] path."""

    def __init__(self, settings: Audit) -> None:
        path, self._strict = settings.path, settings.strict
        self._trail = (
            None if path is None else AuditTrail(Path(path).absolute(), settings, launcher.__version__)
        )

    def joined(self, accounting: Accounting) -> Accounting:
        """With the trail as one more that is told of ended requests; with `strict`, as one that is asked before."""
        trail = self._trail
        if trail is None:
            return accounting
        record = _both(accounting.record, trail.record)
        return replace(accounting, record=record, unrecorded=trail.refusal if self._strict else None)

    async def start(self) -> None:
        """Returns when the first line is on the disk, or could not be written."""
        if self._trail is not None:
            await asyncio.to_thread(self._trail.start)

    async def stop(self) -> None:
        """After the last request has ended, and the control socket is closed. Also without `start`."""
        if self._trail is not None:
            await asyncio.to_thread(self._trail.stop)

    def acted(self, action: ControlAction) -> None:
        """An operator asked for a change."""
        if self._trail is not None:
            self._trail.record(_entry_of(action))

    def signalled(self, verb: str, name: str, reason: str) -> None:
        """A signal asked for a change, by whom the kernel does not tell a Python handler. `reason`: why it was refused,
        or empty."""
        if self._trail is not None:
            result = "refused" if reason else "done"
            self._trail.record(
                ControlEntry(at=time.time(), verb=verb, arguments=name, result=result, reason=reason)
            )

    def values(self) -> Values:
        """For the metrics page."""
        if self._trail is None:
            return {}
        state = self._trail.state
        return {
            metrics.AUDIT_ENTRIES: {(): state.lines},
            metrics.AUDIT_LOST: {(): state.lost},
            metrics.AUDIT_OK: {(): float(not state.why)},
        }

    def warnings(self) -> tuple[str, ...]:
        """For `status`."""
        if self._trail is None:
            return ()
        state, found = self._trail.state, []
        if state.why:
            found.append(f"the audit trail cannot be written: {state.why}")
        if state.lost:
            found.append(f"the audit trail lacks {state.lost} entries, which could not be written")
        return tuple(found)


def _both(first: Callable[[Entry], None], second: Callable[[Entry], None]) -> Callable[[Entry], None]:
    def record(entry: Entry) -> None:
        first(entry)
        second(entry)

    return record


def _entry_of(action: ControlAction) -> ControlEntry:
    peer = action.peer
    return ControlEntry(
        at=time.time(), verb=action.verb, arguments=action.arguments, slot=action.slot, user=peer.user, uid=peer.uid,
        gid=peer.gid, pid=peer.pid, status=action.status, result=action.result, reason=action.reason,
    )  # fmt: skip
