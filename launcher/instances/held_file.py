"""The held slots, for the next daemon. The file is replaced as a whole."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from launcher.errors import reason
from launcher.host.replace_file import replace_file

log = logging.getLogger("launcher.instances")


class HeldFile:
    """Slot numbers, in memory and in a file that exists only while a slot is held."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._slots = _load(path)

    @property
    def slots(self) -> frozenset[int]:
        return self._slots

    def note(self, slot: int, *, held: bool) -> None:
        """Record whether a slot is held. A file that can't be written is only logged."""
        slots = self._slots | {slot} if held else self._slots - {slot}
        if slots == self._slots:
            return
        self._slots = slots
        try:
            if slots:
                replace_file(self._path, json.dumps(sorted(slots)).encode("ascii"))
            else:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            log.warning(
                "slot %d: cannot write '%s': %s; the next daemon will not know that it is %sheld",
                slot, self._path, reason(error), "" if held else "no longer ", extra={"slot": slot},
            )  # fmt: skip


def _load(path: Path) -> frozenset[int]:
    """Empty without a file, or with an unreadable one."""
    try:
        found = json.loads(path.read_text(encoding="ascii"))
        return frozenset(int(slot) for slot in found)
    except (OSError, ValueError, TypeError):
        return frozenset()
