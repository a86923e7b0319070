"""Amounts of money as integers, so that sums and caps are exact.

An amount is a number of picos: 1e-12 of the currency's unit. A price per million tokens with up to six decimals is then
a whole number of picos per token. 2**63 picos, what a database's integer holds, are 9.2 million units.
"""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Context, Decimal, InvalidOperation
from typing import Final, NamedTuple

PICOS: Final = 10**12
"""Of one unit of the currency."""
_MILLION: Final = 10**6
# More digits than any amount of numbers that a person may give; the default of 28 is not.
_WIDE: Final = Context(prec=100)


def picos(amount: Decimal | float | str) -> int:
    """An amount in the currency's unit, such as 0.79. A float counts as the shortest decimal number that is equal to it.
    Raises ValueError for what is no number, is negative, or is finer than a pico.
    """
    return _whole(amount, PICOS)


def picos_per_token(per_million: Decimal | float | str) -> int:
    """A price per million tokens, as APIs are priced. Raises ValueError as `picos`."""
    return _whole(per_million, PICOS // _MILLION)


def _whole(amount: Decimal | float | str, factor: int) -> int:
    try:
        exact = Decimal(repr(amount) if isinstance(amount, float) else amount) * factor
    except InvalidOperation:
        raise ValueError(f"{amount!r} is no number") from None
    if not exact.is_finite() or exact < 0:
        raise ValueError(f"{amount!r} is no amount")
    if exact != int(exact):
        raise ValueError(f"{amount!r} has too many decimals")
    return int(exact)


def to_decimal(amount: int) -> Decimal:
    """Picos in the currency's unit, exactly."""
    return Decimal(amount) / PICOS


def to_text(amount: int, currency: str, decimals: int = 2) -> str:
    """An amount for people: "25.50 USD". An amount that the decimals would show as zero gets more of them."""
    exact = _WIDE.divide(Decimal(amount), Decimal(PICOS))
    while decimals < 12 and exact and abs(exact) < Decimal(1).scaleb(-decimals):
        decimals += 1
    rounded = exact.quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_HALF_EVEN, context=_WIDE)
    return f"{rounded:,f} {currency}"


def shown(amount: float, currency: str = "") -> str:
    """As `to_text`, of an amount in the currency's unit that was already divided for people."""
    return to_text(round(_WIDE.multiply(Decimal(repr(amount)), PICOS)), currency).rstrip()


class TokenPrices(NamedTuple):
    """Picos for one token."""

    prompt: int
    cached: int
    output: int

    def amount(self, prompt: int, cached: int, output: int) -> int:
        """Picos for so many tokens; `prompt` includes the cached ones."""
        return (prompt - cached) * self.prompt + cached * self.cached + output * self.output


def token_prices(prompt: float, output: float, cached: float | None = None) -> TokenPrices:
    """From prices per million tokens; `cached`: of cached prompt tokens, None: as others. Raises ValueError as `picos`."""
    return TokenPrices(
        picos_per_token(prompt),
        picos_per_token(prompt if cached is None else cached),
        picos_per_token(output),
    )
