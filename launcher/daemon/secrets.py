"""Secrets that answers of the control socket must not show."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

from launcher.base.disk import DISK_REMEDY, DISK_S, OneRead
from launcher.base.errors import BusyError
from launcher.base.redaction import Redactor
from launcher.config.loading import secret_values
from launcher.config.schema import Config

# Those of the configuration in force and of earlier ones, the latest first.
MAX_SECRETS: Final = 256


class Secrets:
    """`config`: the configuration in force."""

    def __init__(self, config: Callable[[], Config]) -> None:
        self._config = config
        self._reading = OneRead(self._read, "secrets")
        self._values: dict[str, None] = {}
        self._of: Config | None = None
        """The last one that was read."""
        self._masks: tuple[str, ...] = ()
        self._redactor = Redactor()

    async def redactor(self) -> Redactor:
        """Its files are read each time. Where their disk hangs it masks what was read before. Raises BusyError where nothing
        was, since the configuration is in force."""
        until = time.monotonic() + DISK_S
        try:
            while True:
                config, values = await self._reading.result(until - time.monotonic())
                if config is self._config():  # no reload while they were read
                    break
        except (TimeoutError, BusyError) as error:
            if self._of is self._config():
                return self._redactor
            why, remedy = f"their files were not read within {DISK_S:g} s", DISK_REMEDY
            if isinstance(error, BusyError):
                why, remedy = error.message, error.remedy
            raise BusyError(f"cannot mask secrets: {why}", remedy) from None
        self._of = config
        # Earlier secrets stay known: a file may be unreadable for want of descriptors, and log lines outlive a reload.
        self._values = dict.fromkeys((*values, *self._values))
        while len(self._values) > MAX_SECRETS:
            self._values.popitem()
        known = tuple(self._values)
        if known != self._masks:
            self._masks, self._redactor = known, Redactor(known)
        return self._redactor

    def _read(self) -> tuple[Config, list[str]]:
        config = self._config()
        return config, secret_values(config, os.environ)[0]
