"""How the configuration file differs from the deployment in force, looked at again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from launcher.base.background import Failures, attempt
from launcher.base.errors import LauncherError
from launcher.config.schema import Config
from launcher.daemon.deployment import Deployment
from launcher.daemon.rollout import changed_keys, keys_of_a_restart

log = logging.getLogger("launcher.daemon")

# Between two readings of the configuration; one takes milliseconds.
CONFIGURATION_INTERVAL_S: Final = 10.0
# Keys that the difference names; it counts the others.
NAMED: Final = 8

ReadConfig = Callable[[], Config]
"""The configuration as the file, the environment and the options say now. Blocking. Raises LauncherError."""


class ConfigurationWatch:
    """`in_force`: the deployment that the last reload has applied. `read` is None for a daemon without a file."""

    def __init__(self, read: ReadConfig | None, in_force: Callable[[], Deployment]) -> None:
        self._read = read
        self._in_force = in_force
        self._found: tuple[Deployment | None, str] = (None, "")
        """What was compared with the file, and how they differ."""

    @property
    def unapplied(self) -> str:
        """How the file differs from what is in force; empty where it does not, or is unknown since a reload."""
        compared, text = self._found
        return text if compared is self._in_force() else ""

    async def run(self) -> None:
        failures = Failures(log, "compare the configuration file")
        while True:
            await asyncio.sleep(CONFIGURATION_INTERVAL_S)
            await attempt(self.check, failures)

    async def check(self) -> None:
        """Read the file once; log a new difference."""
        if self._read is None:
            return
        in_force, before = self._in_force(), self.unapplied
        try:
            text = difference(in_force.config, await asyncio.to_thread(self._read))
        except LauncherError as error:
            text = f"the configuration cannot be used: {error.message} ({error.remedy})"
        self._found = (in_force, text)
        if text and text != before:
            log.warning("%s", text)
        elif before and not text:
            log.info("the configuration file is what is in force")


def difference(in_force: Config, file: Config) -> str:
    """The keys that differ, and those of them that a reload cannot apply; empty without any."""
    if in_force == file:
        return ""
    keys = changed_keys(in_force, file)
    if not keys:
        return ""
    text = f"the configuration file is not applied: {_named(keys)} differ{'s' * (len(keys) == 1)}"
    once = keys_of_a_restart(in_force, file)
    return f"{text}; only a restart of the daemon applies {_named(once)}" if once else text


def _named(keys: tuple[str, ...]) -> str:
    more = len(keys) - NAMED
    return ", ".join(keys[:NAMED]) + (f" and {more} more" if more > 0 else "")
