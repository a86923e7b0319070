"""What tokens cost on this machine: the bill over what was served, and the share of the busy time alone. Pure.

Two figures, because one misleads. Allocated: the whole bill over what was served; idle hours are paid for, too. Used: the
bill of the busy time alone, what a token would cost on a machine that is never idle. Utilisation lies between them."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import msgspec

from launcher.config.usage_schema import Cost
from launcher.usage.bill import JOULES_PER_KWH, MONTH_S, bill, energy_joules, is_priced
from launcher.usage.compare import Comparison, Tokens, comparisons, per_million, units
from launcher.usage.references import References


class Sums(NamedTuple):
    """Of some requests."""

    requests: int
    tokens: Tokens
    prefill_s: float  # from asking an instance to the first byte
    decode_s: float  # from the first byte to the end
    picos: int = 0  # at the prices of the overflow endpoint

    @property
    def served(self) -> bool:
        return bool(self.tokens.total)


class Observed(NamedTuple):
    """What the ledger says of a window, in Unix seconds."""

    begin: int
    end: int
    local: Sums
    """Served by the instances here."""
    overflow: Sums
    slots: int
    """The most at once; 0: not known."""
    busy_s: float | None
    """Time of the whole machine: slot-seconds with requests, over the slots. None: not metered."""
    joules: float | None
    """None: not metered."""
    joules_s: float = 0.0
    """Seconds in which energy was metered."""

    @property
    def seconds(self) -> int:
        return self.end - self.begin


class PerMillion(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a million tokens, a number in the currency's unit; null: there were none."""

    output: float | None
    """The whole cost over the output tokens."""
    total: float | None
    """The whole cost over prompt and output tokens."""
    input_part: float | None
    """The cost of the time before the first byte of streams, over the prompt tokens that were not cached."""
    output_part: float | None
    """The cost of the time after the first byte, over the output tokens."""


class OverflowCost(msgspec.Struct, frozen=True, kw_only=True):
    """What was sent to overflow endpoints. Amounts are numbers in the currency's unit."""

    requests: int
    """Requests."""
    prompt_tokens: int
    """Their prompt tokens."""
    output_tokens: int
    """Their output tokens."""
    amount: float
    """What they cost there."""
    priced: bool
    """False: they have tokens but no cost, because the endpoint has no prices in [[proxy.overflow]]."""
    second_machine: float
    """Bill of one more machine like this for the same time."""
    saved: float
    """`second_machine` less `amount`; negative: one more machine would have been cheaper."""


class CostReport(msgspec.Struct, frozen=True, kw_only=True):
    """What tokens cost. Amounts are numbers in the currency's unit, times seconds since the epoch."""

    currency: str
    """Currency of all amounts."""
    zone: str
    """Time zone of the ledger's hours."""
    begin: int
    """Begin of the time, at an hour or at the ledger's begin."""
    end: int
    """Its end."""
    bill: float
    """The machine's bill for this time: `rent` + `purchase` + `energy`."""
    rent: float
    """By `hourly`."""
    purchase: float
    """Share of the purchase."""
    energy: float
    """By `price_per_kwh`."""
    kwh: float
    """Energy, by `watts` or measured."""
    kwh_measured_share: float | None
    """Share of the time in which energy was measured; null: it is not to be measured."""
    requests: int
    """Requests completed here, not by overflow endpoints."""
    prompt_tokens: int
    """Prompt tokens of requests served here, the cached ones included."""
    cached_tokens: int
    """Of these, tokens that were in a prefix cache."""
    output_tokens: int
    """Output tokens of requests served here."""
    slots: int
    """The most slots in an hour; 0: not metered."""
    utilisation: float | None
    """Share of the slots' time with requests; null: not metered."""
    input_share: float | None
    """Share of the streams' time on instances that was before the first byte; null: there were none."""
    allocated: PerMillion
    """The whole bill over what was served."""
    used: PerMillion | None
    """The busy share of the bill alone; null: utilisation is not known."""
    month_bill: float
    """The bill of 730 hours at the rate of this time."""
    month_tokens: int
    """Prompt and output tokens of 730 hours at the rate of this time."""
    references: tuple[Comparison, ...]
    """APIs."""
    references_note: str
    """Where their prices are from, and how old they are."""
    overflow: OverflowCost | None
    """Null without such requests."""


def cost_report(cost: Cost, observed: Observed, references: References, zone: str) -> CostReport:
    """`cost` must have a price (`is_priced`), and the window at least a second."""
    assert is_priced(cost)  # noqa: S101  the caller's
    seconds, local = observed.seconds, observed.local
    parts = bill(cost, seconds, observed.joules)
    # The busy share of the machine's time; clocks of metering and window may differ by a moment.
    busy = None if observed.busy_s is None else min(Fraction(1), Fraction(observed.busy_s) / seconds)
    input_share = _input_share(local)
    month = round(Fraction(parts.total * MONTH_S, seconds))
    return CostReport(
        currency=cost.currency,
        zone=zone,
        begin=observed.begin,
        end=observed.end,
        bill=units(parts.total),
        rent=units(parts.rent),
        purchase=units(parts.purchase),
        energy=units(parts.energy),
        kwh=float(energy_joules(cost, seconds, observed.joules) / JOULES_PER_KWH),
        kwh_measured_share=min(1.0, observed.joules_s / seconds) if cost.watts == "measured" else None,
        requests=local.requests,
        prompt_tokens=local.tokens.prompt,
        cached_tokens=local.tokens.cached,
        output_tokens=local.tokens.output,
        slots=observed.slots,
        utilisation=None if busy is None else float(busy),
        input_share=None if input_share is None else float(input_share),
        allocated=_per_million(Fraction(parts.total), local.tokens, input_share),
        used=None if busy is None else _per_million(parts.total * busy, local.tokens, input_share),
        month_bill=units(month),
        month_tokens=local.tokens.total * MONTH_S // seconds,
        references=comparisons(references.rows, local.tokens, month),
        references_note=references.note,
        overflow=_overflow(observed.overflow, parts.total),
    )


def _per_million(amount: Fraction, tokens: Tokens, input_share: Fraction | None) -> PerMillion:
    share = input_share
    return PerMillion(
        output=per_million(amount, tokens.output),
        total=per_million(amount, tokens.total),
        input_part=None if share is None else per_million(amount * share, tokens.prompt - tokens.cached),
        output_part=None if share is None else per_million(amount * (1 - share), tokens.output),
    )


def _input_share(sums: Sums) -> Fraction | None:
    """None where nothing was served, or output that was not streamed, whose time is not known."""
    before, after = Fraction(sums.prefill_s), Fraction(sums.decode_s)
    if not before + after or (sums.tokens.output and not after):
        return None
    return before / (before + after)


def _overflow(sums: Sums, machine: int) -> OverflowCost | None:
    if not sums.requests:
        return None
    return OverflowCost(
        requests=sums.requests,
        prompt_tokens=sums.tokens.prompt,
        output_tokens=sums.tokens.output,
        amount=units(sums.picos),
        priced=bool(sums.picos) or not sums.served,
        second_machine=units(machine),
        saved=units(machine - sums.picos),
    )
