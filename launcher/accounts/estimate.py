"""What a machine would cost for a throughput and a demand, without a ledger. Pure."""

from __future__ import annotations

from fractions import Fraction

import msgspec

from launcher.accounts.cost import HOUR_S, MONTH_HOURS, MONTH_S, bill, exact
from launcher.accounts.references import MILLION, Comparison, References, Tokens, comparisons, units
from launcher.config.usage_schema import Cost


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a month, and the tokens of each: at least one request, and one output token."""

    requests: int
    input: int
    output: int

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.requests * self.input, 0, self.requests * self.output)

    @property
    def output_tokens_per_s(self) -> float:
        """On average over the month."""
        return self.tokens.output / MONTH_S


class Month(msgspec.Struct, frozen=True, kw_only=True):
    """What a demand takes and costs. Amounts are in the currency's unit."""

    demand: Demand
    prompt_tokens: int
    output_tokens: int
    busy_hours: float
    """Of one machine at the given throughput."""
    utilisation: float
    """Share of the month of one machine; above 1 it does not fit."""
    machines: int
    """That it takes."""
    bill: float
    """Of all of them."""
    per_million_output: float
    per_million_total: float
    references: tuple[Comparison, ...]
    references_note: str

    @property
    def fits(self) -> bool:
        return self.machines <= 1


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """`numa-launcher cost estimate --json`. Amounts are in the currency's unit."""

    currency: str
    hourly: float
    """Everything that an hour of one machine costs."""
    month_bill: float
    """Of one machine, for 730 hours."""
    tokens_per_s: float
    tokens_per_hour: float
    per_million_output: float
    """If it never was idle."""
    month: Month | None


def estimate(cost: Cost, tokens_per_s: float, demand: Demand | None, references: References) -> Estimate:
    """`tokens_per_s`: output tokens a second of the whole machine, above 0."""
    speed = exact(tokens_per_s)
    month_bill = bill(cost, MONTH_S).total
    return Estimate(
        currency=cost.currency,
        hourly=units(Fraction(month_bill, MONTH_HOURS)),
        month_bill=units(month_bill),
        tokens_per_s=tokens_per_s,
        tokens_per_hour=float(speed * HOUR_S),
        per_million_output=units(Fraction(month_bill) * MILLION / (speed * MONTH_S)),
        month=None if demand is None else _month(month_bill, speed, demand, references),
    )


def _month(machine: int, speed: Fraction, demand: Demand, references: References) -> Month:
    tokens = demand.tokens
    busy_s = Fraction(tokens.output) / speed
    share = busy_s / MONTH_S
    machines = max(1, -(-share.numerator // share.denominator))
    most = speed * MONTH_S * tokens.total / tokens.output
    return Month(
        demand=demand,
        prompt_tokens=tokens.prompt,
        output_tokens=tokens.output,
        busy_hours=float(busy_s / HOUR_S),
        utilisation=float(share),
        machines=machines,
        bill=units(machine * machines),
        per_million_output=units(Fraction(machine * machines * MILLION, tokens.output)),
        per_million_total=units(Fraction(machine * machines * MILLION, tokens.total)),
        references=comparisons(references.rows, tokens, machine, most),
        references_note=references.note,
    )
