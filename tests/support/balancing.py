"""Builds balancers with upstreams, and tickets for them."""

# ruff: noqa: S311
from __future__ import annotations

from random import Random

from launcher.balancing.balancer import Balancer
from launcher.balancing.cost_model import LEARNED
from launcher.balancing.upstreams import Demand, Ending, Ticket, Upstream
from launcher.base.address import UnixAddress
from launcher.config.schema import Policy


def up(
    slot: int, generation: int = 1, model: str = "m", seqs: int = 4, kv_tokens: int | None = None
) -> Upstream:
    """An instance."""
    return Upstream(slot, generation, model, UnixAddress("/x"), seqs, kv_tokens=kv_tokens)


def balancer(
    instances: int = 2,
    *,
    policy: Policy = Policy.PREFIX_AWARE,
    seqs: int = 4,
    max_requests: int = 100,
    **more: object,
) -> Balancer:
    """A balancer over instances of model "m", whose speed is known to be what is assumed at first."""
    made = Balancer(policy, Random(1).randrange, max_requests=max_requests, **more)  # type: ignore[arg-type]
    for slot in range(instances):
        made.add(up(slot, seqs=seqs))
    made.costs.fit("m").count = LEARNED
    return made


def ticket(
    now: float = 0.0,
    *,
    tokens: int = 10,
    output: int = 10,
    prefix: tuple[int, ...] = (),
    deadline: float = 1e9,
    model: str | None = "m",
    **more: object,
) -> Ticket:
    """A request."""
    demand = Demand(model, tokens, output, prefix, tokens * 4, **more)  # type: ignore[arg-type]
    return Ticket(demand, now, deadline)


def slot(one: Ticket) -> int:
    """Where it is bound."""
    assert one.upstream is not None
    return one.upstream.slot


def run(made: Balancer, one: Ticket, now: float, took_s: float = 0.1) -> None:
    """A bound request's first token and end."""
    made.first_token(one, now + took_s)
    made.progress(one, 5)
    made.release(one, now + 2 * took_s, Ending.WHOLE)
