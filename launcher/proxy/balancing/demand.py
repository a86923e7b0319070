"""What the scheduler must know of a request, its place in the schedule, and why it is turned away."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.proxy.balancing.upstreams import Upstream

Key = tuple[int, int]  # (slot, generation): one process life


class Ending(Enum):
    """How a request left its instance, which tells what may be learned of it."""

    WHOLE = "whole"  # an answer below 400, all of it
    REFUSED = "refused"  # a 4xx: the instance is well, and has computed nothing
    LEFT = "left"  # given up by its client, or by us; says nothing of the instance
    BROKEN = "broken"  # the instance could not be used


@dataclass(frozen=True, slots=True)
class Demand:
    """One request, as far as its cost and its place in the queue depend on it. Tokens are estimates."""

    model: str | None  # None: an instance of any model will do
    prompt_tokens: int = 0  # Balancer.prompt_tokens(bytes of the prompt) is a learned guess
    output_tokens: int = 0  # Balancer.output_tokens(max_tokens, n) is a learned guess
    prefix: tuple[int, ...] = ()  # prefixes.fingerprint of the prompt's raw bytes
    body_bytes: int = 0
    session: str | None = None
    key: str | None = None  # the API key's name: keys share fairly
    priority: int = 0  # smaller first, as vLLM's
    pinned: Key | None = None  # only this instance keeps the stored response; ignored once it has gone
    max_tokens: int | None = None  # what the client asked for, of one answer
    stream: bool = True  # False: the answer comes whole, so its first byte does not tell when prefill ended


@dataclass(slots=True, eq=False)
class Ticket:
    """One attempt to get a request started. Times are the caller's clock, seconds. Owned by the scheduler."""

    demand: Demand
    arrived: float
    deadline: float  # it is `expired` when it still waits then
    tried: set[Key] = field(default_factory=set)  # instances that failed it; it never goes back to them
    upstream: Upstream | None = None  # while it is bound
    bound: float = 0.0  # when
    first: float | None = None  # when its first token came
    uncached: float = 0.0  # prompt tokens believed to be computed anew where it is bound
    computed: float | None = None  # the same, as its usage tells
    held: int = 0  # blocks of its prefix that were held where it is bound, before
    work: float = 0.0  # prompt tokens that were to be computed there up to its first token
    work_s: float = 0.0  # seconds of prefill that it adds to the queue
    family: int | None = (
        None  # the last block of its prompt that some instance holds: what it shares with others
    )
    home: Upstream | None = None  # while it waits: the instance that it waits for, as far as is known
    tokens: int = 0  # produced so far
    waits: bool = False  # in the queue
    rank: float = 0.0  # place within its lane of the queue: smaller first
    number: int = 0  # order of arrival
    cost: float = 0.0  # what it is charged in the fair share of its key


class FullError(Exception):
    """The queue takes no more. `reason` is for a person; `retry_after_s` >= 1 comes from the drain rate."""

    def __init__(self, reason: str, retry_after_s: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s


Full = FullError
