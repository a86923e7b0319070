"""What an operator may ask of a daemon, as the control socket needs it; daemon and tests implement it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from launcher.control.messages import Request
from launcher.redaction import Redactor


class Operations(Protocol):
    """What the daemon does for an operator."""

    def status(self) -> Any:
        """The whole state."""

    def act(self, slot: int, request: Request) -> None:
        """Ask for a change. Returns at once; raises NotFoundError for an unknown slot, RefusedError."""

    async def reload(
        self, overrides: Sequence[str], *, dry_run: bool = False, force: bool = False
    ) -> dict[str, Any]:
        """Re-read the configuration and begin to go there. Raises LauncherError; nothing has changed then."""

    async def history(self, span: str, after: int, slots: str) -> bytes:
        """The rows of a span after a time, as JSON. Raises LauncherError."""

    def reloading(self) -> dict[str, Any]:
        """How far the last reload has come."""

    def events(self, count: int, after: int) -> list[dict[str, Any]]:
        """The last events with a number above `after`, oldest first."""

    def plan(self) -> dict[str, Any]:
        """The plan that is running, as `plan --json` prints it."""

    def topology(self) -> dict[str, Any]:
        """The machine that the running plan was made for."""

    async def machine(self) -> Any:
        """The load of the machine."""

    async def measurements(self) -> Any:
        """The newest results of bench and tune."""

    def config(self) -> dict[str, Any]:
        """The configuration that is in force, secrets masked."""

    async def metrics(self) -> str:
        """The metrics page. Raises LauncherError."""

    async def usage_today(self) -> Any:
        """What was served since midnight; None without a ledger that can be read at once."""

    def budgets(self) -> Any:
        """The budgets of API keys, by name."""

    def spent_elsewhere(self, body: bytes) -> Any:
        """What API keys spent on other hosts. Raises LauncherError."""

    async def usage(self, asked: Mapping[str, str]) -> Any:
        """A report of the usage ledger. `asked`: the options of the request. Raises LauncherError."""

    async def usage_requests(self, asked: Mapping[str, str], limit: int) -> Any:
        """The latest single requests of the usage ledger. Raises LauncherError."""

    async def request(self, request_id: str) -> Any:
        """What became of one request. Raises NotFoundError for an unknown one."""

    async def cost(self, since: str) -> Any:
        """What tokens cost since a time. Raises LauncherError."""

    async def redactor(self) -> Redactor:
        """What masks every secret that the daemon knows."""

    def log_tail(self, slot: int, lines: int) -> list[dict[str, Any]]:
        """The last lines of a slot, oldest first. Raises LauncherError for an unknown slot."""

    def log_follow(self, slot: int, lines: int) -> AsyncIterator[dict[str, Any]]:
        """The last lines and then those that come, none lost between. Raises LauncherError for an unknown slot."""

    async def verify(self, slot: int) -> None:
        """Compare a slot's threads and pages with the plan now; the result is in `status`."""
