"""Counters in one value."""

from __future__ import annotations

from launcher.base.money import PICOS
from launcher.config import schema
from launcher.proxy.observability.stats import Counters, Totals, totals
from launcher.proxy.request.actions import Outcome
from launcher.proxy.upstream.overflow import Overflow


async def test_sums_over_models_reasons_and_endpoints() -> None:
    counters = Counters()
    counters.accepted, counters.ended = 9, 7
    counters.outcomes[Outcome.FAILED] = 2
    counters.queue_rejected.update({"requests": 3, "deadline": 1})
    counters.count_tokens("a", 10, 4, 5)
    counters.count_tokens("b", 1, 0, 2)
    free = schema.Overflow(url="http://127.0.0.1:1/v1", models={"a": "x"}, name="free")
    priced = schema.Overflow(
        url="http://127.0.0.1:2/v1", models={"a": "x"}, name="priced", input=1.0, output=2.0
    )
    overflow = Overflow([free, priced], 1.0)
    for endpoint in overflow:
        endpoint.sent["a"] = 4
        endpoint.cost.spent = PICOS * 3 // 2
    assert totals(counters, overflow, (0.5,)) == Totals(
        accepted=9, failed=2, prompt_tokens=11, output_tokens=7, overflowed=8, overflow_spent=1.5, queue_rejected=4,
        in_flight=2, first_tokens=(0.5,),
    )  # fmt: skip
    assert totals(counters, Overflow([free], 1.0), ()).overflow_spent is None
    assert totals(counters, None, ()).overflowed == 0
