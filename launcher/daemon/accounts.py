"""What the daemon keeps of the requests that ended: built here, started before the proxy, stopped after it."""

from __future__ import annotations

from launcher.config.schema import Config
from launcher.proxy.accounting import Accounting


class Accounts:
    def __init__(self, config: Config) -> None:
        self._settings = config.usage
        self.accounting = Accounting()
        """What the proxy tells of, and asks."""

    def start(self) -> None:
        """Before the proxy accepts its first request. Never fails: a ledger that cannot be kept is said in the log."""

    async def stop(self) -> None:
        """After the last request has ended: what is waiting is written."""

    def warnings(self) -> tuple[str, ...]:
        """What `status` says of them."""
        return ()
