"""What tokens cost on this machine: the bill over what was served, and the share of the busy time alone. Pure.

Two figures, because one misleads. Allocated: the whole bill over what was served; idle hours are paid for, too. Used: the
bill of the busy time alone, what a token would cost on a machine that is never idle. Utilization lies between them."""

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
    """Cost of a million tokens, in the currency's unit; None: there were none."""

    output: float | None
    """The whole cost over the output tokens."""
    total: float | None
    """The whole cost over prompt and output tokens."""
    input_part: float | None
    """The part of the time before the first byte, over the prompt tokens that were not cached."""
    output_part: float | None
    """The part of the time after the first byte, over the output tokens."""


class OverflowCost(msgspec.Struct, frozen=True, kw_only=True):
    """What was sent elsewhere."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    amount: float
    priced: bool
    """False: tokens without a price: the endpoint has none in [[proxy.overflow]]."""
    second_machine: float
    """Bill of one more machine like this for the same time."""
    saved: float
    """`second_machine` less `amount`; negative: one more machine would have been cheaper."""


class CostReport(msgspec.Struct, frozen=True, kw_only=True):
    """`numa-launcher cost --json`. Amounts are in the currency's unit, times in Unix seconds."""

    currency: str
    zone: str
    """Time zone of the ledger's hours."""
    begin: int
    end: int
    bill: float
    rent: float
    purchase: float
    energy: float
    kwh: float
    kwh_measured_share: float | None
    """Share of the time in which energy was measured; None: it is not to be measured."""
    requests: int
    """Served here, as the tokens."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    slots: int
    utilization: float | None
    """Share of the slots' time with requests; None: not metered."""
    input_share: float | None
    """Share of the time before the first byte; None: nothing was served."""
    allocated: PerMillion
    used: PerMillion | None
    """None: utilization is not known."""
    month_bill: float
    """At the rate of this window, for 730 hours."""
    month_tokens: int
    references: tuple[Comparison, ...]
    references_note: str
    overflow: OverflowCost | None


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
        utilization=None if busy is None else float(busy),
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
    before, after = Fraction(sums.prefill_s), Fraction(sums.decode_s)
    return before / (before + after) if before + after else None


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
