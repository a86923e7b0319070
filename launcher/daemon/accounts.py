"""What the daemon keeps of the requests that ended: built here, started before the proxy, stopped after it."""

from __future__ import annotations

import os
import time

from launcher.config.schema import Config
from launcher.host.state_folder import state_folder
from launcher.money import TokenPrices, token_prices
from launcher.proxy.accounting import Accounting
from launcher.usage.caps import make_caps
from launcher.usage.daily_cap import DailyCap
from launcher.usage.schema import ledger_path
from launcher.usage.spans import zone_of
from launcher.usage.spent_file import SpentFile


class Accounts:
    def __init__(self, config: Config) -> None:
        """Raises LauncherError for a time zone that this machine does not know."""
        self._settings = config.usage
        self._sums: SpentFile | None = None
        self.accounting = Accounting(caps=self._caps(config), prices=_prices(config))
        """What the proxy tells of, and asks."""

    def _caps(self, config: Config) -> dict[str, DailyCap]:
        """Of overflow endpoints."""
        if all(endpoint.max_per_day is None for endpoint in config.proxy.overflow):
            return {}
        path = ledger_path(config.usage, state_folder(None, os.environ, os.geteuid()))
        self._sums = SpentFile(path.with_name(f"{path.name}.spent"))
        return make_caps(
            config.proxy.overflow, path, zone_of(config.usage.zone), time.time(), self._sums.slot,
            allow_unknown=config.usage.when_unknown == "allow",
        )  # fmt: skip

    def start(self) -> None:
        """Before the proxy accepts its first request. Never fails: a ledger that cannot be kept is said in the log."""

    async def stop(self) -> None:
        """After the last request has ended: what is waiting is written."""

    def warnings(self) -> tuple[str, ...]:
        """What `status` says of them."""
        return ()


def _prices(config: Config) -> TokenPrices | None:
    price = config.cost.price
    return None if price is None else token_prices(price.input, price.output, price.cached)
