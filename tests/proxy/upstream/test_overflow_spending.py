"""A daily cap over any sequence of requests: whatever an endpoint answers, and whatever usage it says."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.hand_clock import at

from launcher.balancing.upstreams import Ending
from launcher.base.money import PICOS, token_prices
from launcher.base.money_limits import DailyCap, Day
from launcher.config import schema
from launcher.proxy.openai.prompts import bounds_of, said_usage
from launcher.proxy.upstream.overflow_endpoint import Left, OverflowCall, OverflowCost, OverflowEndpoint

CHAT = "/v1/chat/completions"
CAP = PICOS // 50
PRICES = token_prices(1.0, 4.0, 0.5)
SETTINGS = schema.Overflow(
    url="http://x/v1", models={"m": "big"}, input=1.0, output=4.0, cached=0.5, max_per_day=CAP / PICOS,
    max_output_tokens=200, max_requests=1000,
)  # fmt: skip

NUMBERS = (
    st.integers(-2, 3000) | st.integers() | st.just(None) | st.text(max_size=3) | st.floats() | st.booleans()
)
USAGES = st.none() | st.fixed_dictionaries(
    {},
    optional={
        "prompt_tokens": NUMBERS,
        "completion_tokens": NUMBERS,
        "prompt_tokens_details": st.none() | st.fixed_dictionaries({"cached_tokens": NUMBERS}),
    },
)
SENDS = st.tuples(st.just("send"), st.none() | st.integers(1, 400), st.integers(1, 3), st.integers(0, 2000))
ENDS = st.tuples(
    st.just("end"),
    st.sampled_from(list(Ending)),
    st.sampled_from([None, 200, 400, 429, 500]),
    st.booleans(),
    USAGES,
)
EVENTS = st.lists(SENDS | ENDS | st.just(("midnight",)) | st.just(("crash",)), max_size=50)


class Record:
    """What survives a crash."""

    kept: tuple[int, int] = (0, 0)

    def store(self, begin: int, amount: int) -> None:
        self.kept = begin, amount


class World:
    def __init__(self) -> None:
        self.record = Record()
        self.now = 0.0
        self.calls: list[OverflowCall] = []
        self.excess = 0
        self.begin()

    def begin(self) -> None:
        begins = int(self.now // 100 * 100)
        spent = self.record.kept[1] if self.record.kept[0] == begins else 0
        self.cap = DailyCap(CAP, _day, at(self.now), spent=spent, record=self.record)
        self.endpoint = OverflowEndpoint(SETTINGS, 1.0, OverflowCost(SETTINGS, self.cap))

    def send(self, max_tokens: int | None, choices: int, size: int) -> None:
        body: dict[str, Any] = {"n": choices, "messages": "x" * size}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        raw = json.dumps(body).encode()
        if self.endpoint.affords(CHAT, bounds_of(raw)):
            self.calls.append(self.endpoint.begin("m", CHAT, bounds_of(raw)))

    def end(self, ending: Ending, status: int | None, reached: bool, usage: Any) -> None:
        if not self.calls:
            return
        call = self.calls.pop(0)
        said = None if usage is None else said_usage(b'{"usage":' + json.dumps(usage).encode() + b"}")
        amount, exact = self.endpoint.end(call, Left(ending, status, reached, None, said), self.now, self.now)
        assert amount >= 0
        if exact and said is not None and amount:
            assert amount == PRICES.amount(said.prompt, said.cached, said.output)
        if call.tokens.output is not None or not exact:
            assert amount <= call.reserved  # no usage is paid that its client did not allow
        self.excess += max(0, amount - call.reserved)

    def midnight(self) -> None:
        self.now = self.now // 100 * 100 + 100
        self.endpoint.cost.tick(at(self.now))
        self.excess = 0

    def crash(self) -> None:
        self.calls = []
        self.begin()

    def check(self) -> None:
        assert self.cap.reserved == sum(call.reserved for call in self.calls)
        assert self.endpoint.in_flight == len(self.calls)
        assert self.cap.settled + self.cap.reserved <= CAP + self.excess


def _day(now: float) -> Day:
    return Day(now // 100 * 100, now // 100 * 100 + 100)


@given(EVENTS)
def test_the_cap_holds(events: list[tuple[Any, ...]]) -> None:
    async def run() -> None:
        world = World()
        for name, *arguments in events:
            getattr(world, name)(*arguments)
            world.check()

    asyncio.run(run())
