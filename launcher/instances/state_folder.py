"""The folder that only root may read: what runs, for the next daemon, and secrets on their way to a unit."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.errors import reason
from launcher.instances.state_file import Record, StateFile, write_private
from launcher.instances.unit import secrets_text

log = logging.getLogger("launcher.instances")


class StateFolder:
    """A full disk keeps no instance from starting: the next daemon then starts it anew. Made when needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = StateFile(path / "instances.json")

    @property
    def records(self) -> Mapping[int, Record]:
        """By slot."""
        return self._file.records

    def remember(self, record: Record) -> None:
        """That an instance runs. It is written with the next record where it can't be written now."""
        try:
            self._file.put(record)
        except OSError as error:
            log.warning(
                "cannot write '%s': %s; a daemon that starts now would restart slot %d",
                self._file.path, reason(error), record.slot, extra={"slot": record.slot},
            )  # fmt: skip

    def forget(self, slot: int) -> None:
        """That it ran."""
        try:
            self._file.remove(slot)
        except OSError as error:  # harmless: what the old record speaks of is looked at before it is believed
            log.warning("cannot write '%s': %s", self._file.path, reason(error))

    @contextlib.contextmanager
    def secrets(self, slot: int, values: Mapping[str, str]) -> Iterator[str | None]:
        """An EnvironmentFile= with `values`, there until systemd has read it; None where there are none. Raises OSError."""
        if not values:
            yield None
            return
        path = self.path / f"slot{slot}.env"
        write_private(path, secrets_text(values))
        try:
            yield str(path)
        finally:
            path.unlink(missing_ok=True)
