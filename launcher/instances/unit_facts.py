"""What systemd's facts of a unit mean: how it ended, and whether it is what the plan wants."""

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
    """How the main process ended; a command that could not be executed is 127, as a shell says it."""
    if facts.code in {_KILLED, _DUMPED}:
        return Exit(code=None, signal=facts.status)
    return Exit(code=127 if facts.status == CANNOT_EXECUTE else facts.status, signal=None)


def last_words(facts: UnitFacts) -> list[str]:
    """What systemd knows and an exit status does not say, as lines that diagnosis reads."""
    if facts.result in {"success", "exit-code", "signal", "core-dump"}:
        return []
    return [f"{UNIT_OOM.partition('=')[0]}={facts.result}"]


def fitting(
    slot: int, record: Record | None, facts: UnitFacts, slots: Mapping[int, Callable[[int], Launch]]
) -> Launch | str:
    """What a unit runs, if that is what the plan wants of its slot; else why it is not.

    1. The plan has the slot, and the state file knows how the unit was started.
    2. The unit is active, and the very life that the file speaks of.
    3. The plan would start the same now.
    """
    if slot not in slots:
        return "the plan has no such slot"
    if record is None:
        return "nothing is known of how it was started"
    if facts.active != "active" or facts.has_job or not facts.main_pid:
        return f"it is {facts.active}"
    said = mark(slot, record.generation, record.digest)
    if f"{MARK}={said}" not in facts.environment or record.invocation not in {"", facts.invocation}:
        return "it is not the life that the state file speaks of"
    launch = slots[slot](record.generation)
    if digest(launch) != record.digest:
        return "the plan would start it differently now"
    return replace(launch, address=record.address)
