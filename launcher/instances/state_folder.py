"""A folder that only root may read: the running instances, for the next daemon, and secrets for units that start."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.errors import reason
from launcher.host.replace_file import replace_file
from launcher.instances.state_file import Record, StateFile
from launcher.instances.unit import secrets_text

log = logging.getLogger("launcher.instances")


class StateFolder:
    """A full disk prevents no start: the next daemon then restarts the instance. The folder is made when needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = StateFile(path / "instances.json")

    @property
    def records(self) -> Mapping[int, Record]:
        return self._file.records

    def remember(self, record: Record) -> None:
        """Record a running instance; if it can't be written now, it is written with the next one."""
        try:
            self._file.put(record)
        except OSError as error:
            log.warning(
                "cannot write '%s': %s; a daemon that starts now would restart slot %d",
                self._file.path, reason(error), record.slot, extra={"slot": record.slot},
            )  # fmt: skip

    def forget(self, slot: int) -> None:
        try:
            self._file.remove(slot)
        except OSError as error:  # harmless: a record is compared with its unit before an adoption
            log.warning("cannot write '%s': %s", self._file.path, reason(error))

    @contextlib.contextmanager
    def secrets(self, slot: int, values: Mapping[str, str]) -> Iterator[str | None]:
        """An EnvironmentFile= with `values` until systemd has read it; None without values. Raises OSError."""
        if not values:
            yield None
            return
        path = self.path / f"slot{slot}.env"
        replace_file(path, secrets_text(values))
        try:
            yield str(path)
        finally:
            path.unlink(missing_ok=True)
