"""Reads a unit's facts: how it ended, and whether it runs what the plan would start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from launcher.engines.base import MARK, Launch
from launcher.host.systemd_bus import UnitFacts
from launcher.instances.diagnosis import UNIT_OOM
from launcher.instances.ports import Exit
from launcher.instances.state_file import Record, digest
from launcher.instances.unit import mark

# systemd.exec(5), "Process Exit Codes": EXIT_EXEC.
CANNOT_EXECUTE: Final = 203

# waitid(2)
_KILLED, _DUMPED = 2, 3


def exit_of(facts: UnitFacts) -> Exit:
    """How the main process ended; a command that could not be executed is 127, as in a shell."""
    if facts.code in {_KILLED, _DUMPED}:
        return Exit(code=None, signal=facts.status)
    return Exit(code=127 if facts.status == CANNOT_EXECUTE else facts.status, signal=None)


def diagnosis_lines(facts: UnitFacts) -> list[str]:
    """What systemd reports beyond the exit status, as lines that diagnosis reads."""
    if facts.result in {"success", "exit-code", "signal", "core-dump"}:
        return []
    return [f"{UNIT_OOM.partition('=')[0]}={facts.result}"]


def fitting(
    slot: int, record: Record | None, facts: UnitFacts, slots: Mapping[int, Callable[[int], Launch]]
) -> Launch | str:
    """The launch that a unit runs if it can be adopted, else why not. It can be adopted if

    1. the plan has the slot, and the state file a record of the unit,
    2. the unit is active, and the generation that the record names,
    3. the plan would start it with the same command and environment now."""
    if slot not in slots:
        return "the plan has no such slot"
    if record is None:
        return "the state file has no record of it"
    if facts.active != "active" or facts.has_job or not facts.main_pid:
        return f"it is {facts.active}"
    expected = mark(slot, record.generation, record.digest)
    if f"{MARK}={expected}" not in facts.environment or record.invocation not in {"", facts.invocation}:
        return "it is not the generation that the state file records"
    launch = slots[slot](record.generation)
    if digest(launch) != record.digest:
        return "the plan would start it differently now"
    return replace(launch, address=record.address)
