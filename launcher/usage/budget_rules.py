"""Which budgets can be held: by the configuration of ledger, currency and prices. Pure."""

from __future__ import annotations

from typing import NamedTuple

from launcher.budget import Budget, parse_budget
from launcher.config.schema import Config
from launcher.errors import LauncherError
from launcher.money import TokenPrices, token_prices


class Rules(NamedTuple):
    """What is configured for all keys."""

    enabled: bool = True  # [usage] enabled: the ledger is kept
    currency: str = "USD"
    price: TokenPrices | None = None  # [cost.price]
    allow_unknown: bool = False  # [usage] when_unknown = "allow"

    def check(self, text: str) -> Budget:
        """The budget of these words. Raises LauncherError where it cannot be held."""
        why = f"cannot hold budget '{text}'"
        try:
            budget = parse_budget(text)
        except ValueError as error:
            raise LauncherError(f"cannot use a budget: {error}", "write it as NUMBER-UNIT/PERIOD") from None
        if not self.enabled:
            raise LauncherError(
                f"{why}: no usage ledger is kept",
                "set enabled = true and path under [usage], or remove the budget",
            )
        if budget.is_money and budget.unit != self.currency.lower():
            raise LauncherError(
                f"{why}: amounts are in {self.currency}",
                f"write the budget in {self.currency.lower()}, or set currency under [cost]",
            )
        if budget.is_money and self.price is None:
            raise LauncherError(
                f"{why}: a token that is served here has no price",
                "set input and output under [cost.price]; 0 where only overflow counts",
            )
        return budget


def rules_of(config: Config) -> Rules:
    price = config.cost.price
    return Rules(
        enabled=config.usage.enabled,
        currency=config.cost.currency,
        price=None if price is None else token_prices(price.input, price.output, price.cached),
        allow_unknown=config.usage.when_unknown == "allow",
    )
