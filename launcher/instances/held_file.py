"""Which slots are held, so that the next daemon holds them too. Replaced as a whole."""

from __future__ import annotations

import json
import logging
from pathlib import Path

log = logging.getLogger("launcher.instances")


class HeldFile:
    """Slot numbers, in memory and in a file that is there only while some slot is held."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._slots = _load(path)

    @property
    def slots(self) -> frozenset[int]:
        """Those that are held."""
        return self._slots

    def note(self, slot: int, *, held: bool) -> None:
        """Remember that a slot is held, or is not any more. A file that can't be written is only said."""
        slots = self._slots | {slot} if held else self._slots - {slot}
        if slots == self._slots:
            return
        self._slots = slots
        try:
            if slots:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                fresh = self._path.with_name(f"{self._path.name}.new")
                fresh.write_text(json.dumps(sorted(slots)), encoding="ascii")
                fresh.replace(self._path)
            else:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot remember which slots are held: %s", error, extra={"slot": slot})


def _load(path: Path) -> frozenset[int]:
    """None where there is no file, or one that is not ours."""
    try:
        found = json.loads(path.read_text(encoding="ascii"))
        return frozenset(int(slot) for slot in found)
    except (OSError, ValueError, TypeError):
        return frozenset()
