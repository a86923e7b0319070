"""What a key may do, and how long it has to wait when it may not."""

from __future__ import annotations

from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hand_clock import HandClock
from support.stored_sums import StoredSums

from launcher.accounts.budgets import Budgets, Past, Rules
from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.spending import Spent
from launcher.base.api_errors import HttpError
from launcher.base.money import token_prices
from launcher.keys.key_record import KeyRecord
from launcher.keys.rate_limits import Bucket, Grant, KeyLimits, Limit

M = ("m",)


def record(**fields: object) -> KeyRecord:
    plain = {
        "id": "abcdefgh",
        "name": "n",
        "hash": "0" * 64,
        "salt": "0" * 32,
        "created": "2026-11-20T10:00:00Z",
    }
    return KeyRecord(**{**plain, **fields})  # type: ignore[arg-type]


def limits(**fields: object) -> KeyLimits:
    return KeyLimits(record(**fields))


def admit(of: KeyLimits, names: tuple[str, ...], now: float, tokens: int = 0) -> Grant:
    """A request whose body is there at once."""
    grant = of.begin(now)
    try:
        grant.charge(names, now, tokens)
    except HttpError:
        grant.finish(0, now)
        raise
    return grant


def refusal(of: KeyLimits, now: float, tokens: int = 0, names: tuple[str, ...] = M) -> HttpError:
    with pytest.raises(HttpError) as caught:
        admit(of, names, now, tokens)
    return caught.value


def test_without_limits_everything_goes() -> None:
    free = limits()
    grants = [admit(free, M, 0.0, 10**9) for _ in range(1000)]
    assert free.in_flight == 1000
    for grant in grants:
        grant.finish(5, 1.0)
        grant.finish(5, 1.0)  # the second call does nothing
    assert (free.in_flight, free.sums.tokens) == (0, 5000)


def test_concurrency() -> None:
    two = limits(concurrency=2)
    first = admit(two, M, 0.0)
    admit(two, M, 0.0)
    refused = refusal(two, 0.0)
    assert refused.status == 429
    assert refused.code == "rate_limit_exceeded"
    assert refused.headers == {"Retry-After": "1"}
    first.finish(0, 0.5)
    admit(two, M, 0.5)
    assert two.sums.refused == {Limit.CONCURRENCY: 1}


def test_concurrency_learns_how_long_requests_take() -> None:
    one = limits(concurrency=1)
    now = 0.0
    for _ in range(50):
        admit(one, M, now).finish(0, now + 20)
        now += 20
    admit(one, M, now)
    assert refusal(one, now).headers == {"Retry-After": "20"}


def test_requests_per_minute() -> None:
    of = limits(requests_per_minute=30)
    for _ in range(30):
        admit(of, M, 100.0).finish(0, 100.0)
    assert refusal(of, 100.0).headers == {"Retry-After": "2"}
    assert refusal(of, 101.5).headers == {"Retry-After": "1"}
    admit(of, M, 102.0)
    assert refusal(of, 102.0).status == 429
    for _ in range(30):
        admit(of, M, 1000.0)  # no more than a minute's worth is saved up
    assert refusal(of, 1000.0).headers == {"Retry-After": "2"}


def test_tokens_are_charged_by_estimate_and_corrected() -> None:
    of = limits(tokens_per_minute=600)
    grant = admit(of, M, 0.0, 500)
    assert refusal(of, 0.0, 200).headers == {"Retry-After": "10"}
    grant.finish(100, 0.0)
    admit(of, M, 0.0, 200).finish(800, 0.0)  # took more than was said: 300 in debt
    assert refusal(of, 0.0, 1).headers == {"Retry-After": "31"}
    assert refusal(of, 29.0, 1).headers == {"Retry-After": "2"}
    admit(of, M, 31.0, 1)


def test_a_request_larger_than_a_minute_needs_a_full_bucket() -> None:
    of = limits(tokens_per_minute=60)
    admit(of, M, 0.0, 1000).finish(1000, 0.0)
    assert refusal(of, 0.0, 1000).headers == {"Retry-After": "1000"}
    admit(of, M, 1000.0, 1000)


def test_a_refused_request_costs_nothing() -> None:
    of = limits(requests_per_minute=10, tokens_per_minute=60)
    admit(of, M, 0.0, 60)
    for _ in range(20):
        refusal(of, 0.0, 1)
    for _ in range(9):
        admit(of, M, 60.0, 1)
    assert of.sums.refused == {Limit.TOKENS: 20}


def test_models() -> None:
    of = limits(models=("gpt-4o", "b"))
    admit(of, ("llama", "gpt-4o"), 0.0)  # an alias counts
    admit(of, (), 0.0)  # a request that names no model
    refused = refusal(of, 0.0, names=("secret",))
    assert (refused.status, refused.code, refused.param) == (403, "model_not_allowed", "model")
    assert not of.allows("secret")
    assert limits().allows("secret")


def test_a_changed_record_keeps_what_was_spent() -> None:
    of = limits(requests_per_minute=10, tokens_per_minute=10, concurrency=1)
    grant = admit(of, M, 0.0, 10)
    of.follow(record(requests_per_minute=20), of.sums, 0.0)
    for _ in range(19):
        admit(of, M, 0.0, 10**6)
    assert refusal(of, 0.0).headers == {"Retry-After": "3"}
    grant.finish(3, 0.0)
    assert of.in_flight == 19
    of.follow(record(requests_per_minute=20), of.sums, 60.0)
    admit(of, M, 60.0)


RATES = st.integers(1, 10_000)


@given(
    RATES, st.lists(st.tuples(st.floats(0, 30), st.integers(0, 20_000), st.integers(0, 20_000)), max_size=40)
)
def test_what_retry_after_says_is_enough(rate: int, steps: list[tuple[float, int, int]]) -> None:
    of = limits(tokens_per_minute=rate)
    now = 0.0
    for pause, estimate, took in steps:
        now += pause
        try:
            grant = admit(of, M, now, estimate)
        except HttpError as refused:
            wait = int(refused.headers["Retry-After"])
            if wait == 3600:
                continue  # longer than anybody should be told to wait
            now += wait
            grant = admit(of, M, now, estimate)
        grant.finish(took, now)


@given(RATES, st.lists(st.floats(0, 5), max_size=200))
def test_no_minute_holds_more_than_two_minutes_worth(rate: int, pauses: list[float]) -> None:
    """A full bucket and what refills meanwhile: that is the most a window of a minute can see."""
    bucket = Bucket(rate)
    now, taken = 0.0, []
    for pause in pauses:
        now += pause
        if bucket.wait_s(1, now) == 0:
            bucket.take(1, now)
            taken.append(now)
    for start in taken:
        assert sum(start <= at < start + 60 for at in taken) <= 2 * rate + 1


def test_a_request_counts_before_its_body_is_here() -> None:
    of = limits(requests_per_minute=3, tokens_per_minute=100, concurrency=1)
    first = of.begin(0.0)
    with pytest.raises(HttpError) as caught:
        of.begin(0.0)
    assert caught.value.status == 429
    first.charge(M, 0.0, 100)
    first.finish(100, 0.0)
    with pytest.raises(HttpError):  # no token is left: why read a body
        of.begin(0.0, large=True)
    late = of.begin(30.0, large=True)
    with pytest.raises(HttpError):
        late.charge(M, 30.0, 60)
    late.finish(0, 30.0)
    late = of.begin(30.0)  # what ran into the other limit is no request of this minute
    late.charge(M, 30.0, 50)
    late.finish(50, 30.0)
    last = of.begin(60.0)
    with pytest.raises(HttpError):
        last.charge(("other",), 60.0, 10**6)


def budgets(tmp_path: Path, past: Past, **texts: str) -> Budgets:
    """On 20 November 2026, 10:00."""
    rules = Rules(price=token_prices(1, 2))
    made = Budgets(rules, ZoneInfo("UTC"), HandClock(1_795_168_800.0), StoredSums().slot)
    made.follow(texts)
    made.learn(past)
    return made


def reserved(of: KeyLimits, held: Budgets, tokens: int) -> Grant:
    grant = of.begin(0.0)
    try:
        grant.charge(M, 0.0, tokens)
        grant.reserve(held, "n", Spent(tokens, 0), 0.0)
    except HttpError:
        grant.finish(0, 0.0)
        raise
    return grant


def test_a_budget_that_is_spent(tmp_path: Path) -> None:
    of, held = limits(requests_per_minute=10), budgets(tmp_path, Past(), n="100-tokens/day")
    first = reserved(of, held, 60)
    second = reserved(of, held, 60)
    with pytest.raises(HttpError) as caught:
        reserved(of, held, 1)
    refused = caught.value
    assert (refused.status, refused.type, refused.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert refused.headers == {"Retry-After": "5"}
    first.finish(0, 1.0)
    first.finish(0, 1.0)  # a fault ends a request twice
    reserved(of, held, 30).finish(30, 1.0)
    second.finish(60, 1.0)
    held.spend(EndedRequest(ended_at=1_795_168_800.0, request_id="r", key="n", prompt_tokens=100))
    with pytest.raises(HttpError) as caught:
        reserved(of, held, 1)
    refused = caught.value
    assert (refused.status, refused.type, refused.code) == (429, "insufficient_quota", "insufficient_quota")
    assert refused.headers == {"Retry-After": "50400", "X-Should-Retry": "false"}
    with pytest.raises(HttpError, match="you exceeded your current quota"):
        of.begin(0.0, large=True).check_budget(held, "n", 0.0)
    assert of.sums.refused == {Limit.BUDGET: 3}
    assert of.requests.spent == 3  # the refused ones do not count for the minute
    assert of.in_flight == 1  # of the last one nothing was finished
    assert held._accounts["n"].reserved == (0, 0)


def test_a_budget_of_which_nobody_knows(tmp_path: Path) -> None:
    of, held = limits(), budgets(tmp_path, Past(lost_at=1_795_168_800.0), n="100-tokens/day")
    with pytest.raises(HttpError) as caught:
        reserved(of, held, 1)
    refused = caught.value
    assert (refused.status, refused.code) == (503, "budget_unknown")
    assert refused.headers == {"Retry-After": "60", "X-Should-Retry": "false"}


def test_a_key_without_a_budget_reserves_nothing(tmp_path: Path) -> None:
    held = budgets(tmp_path, Past(lost_at=1_795_168_800.0), other="1-tokens/day")
    assert reserved(limits(), held, 10**9).reservation is None
    limits().begin(0.0).check_budget(held, "n", 0.0)


def test_prompt_and_output_tokens_are_summed_apart() -> None:
    of = limits()
    of.begin(0.0).finish(70, 1.0, output=20)
    assert (of.sums.prompt_tokens, of.sums.output_tokens, of.sums.tokens) == (50, 20, 70)
