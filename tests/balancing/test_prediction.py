"""When the first token of a request will come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.balancing import balancer, run, ticket

from launcher.balancing.balancer import Balancer
from launcher.balancing.prediction import Predictor, end_of, filled_to
from launcher.balancing.upstreams import Ending, FullError, LateError, Ticket, Upstream
from launcher.proxy.openai.models import ModelNames, ModelTraits
from launcher.proxy.pages.host_load import HostLoad

STEP_S = 0.05
times = st.lists(st.floats(0.0, 50.0), min_size=1, max_size=8)


def taught(instances: int = 2, *, seqs: int = 8, base_s: float = 0.1, token_s: float = 0.002) -> Balancer:
    """A balancer that has seen enough prefills of idle and of busy instances, of that speed; nothing runs."""
    made = balancer(instances, seqs=seqs)
    now = -1000.0
    for number in range(60):
        tokens = 100 + 50 * (number % 7)
        first, second = ticket(now, tokens=tokens), ticket(now, tokens=tokens)
        made.offer(first, now)
        upstream = first.upstream
        assert upstream is not None
        second.demand.pinned = upstream.key
        made.offer(second, now)
        for one in (first, second):
            now += base_s + token_s * tokens
            made.first_token(one, now)
            made.pump(now)
        for one in (first, second):
            assert one.first_token_at is not None
            made.progress(one, 10)
            made.release(one, one.first_token_at + 9 * STEP_S, Ending.WHOLE)
        now += 10.0
    return made


def offered(made: Balancer, *, tokens: int, now: float = 0.0, **more: object) -> Ticket:
    one = ticket(now, tokens=tokens, **more)  # type: ignore[arg-type]
    made.offer(one, now)
    return one


def test_nothing_is_predicted_from_nothing() -> None:
    made = balancer(1)
    made.costs.fit("m").count = 0
    assert made.predicted_ttft(ticket().demand, 0.0) is None
    assert offered(made, tokens=100).predicted_s is None
    other = ticket(model="of nobody")
    assert made.predicted_ttft(other.demand, 0.0) is None


def test_an_idle_instance_starts_at_once() -> None:
    made = taught()
    one = ticket(tokens=300)
    assert made.predicted_ttft(one.demand, 0.0) == pytest.approx(0.7, rel=0.1)
    assert not made.queue.count
    assert offered(made, tokens=300).predicted_s == pytest.approx(0.7, rel=0.1)


def test_work_ahead_is_shared_by_the_instances() -> None:
    made = taught(2)
    running = [offered(made, tokens=1000) for _ in range(2)]
    assert all(one.upstream is not None for one in running)
    queued = [offered(made, tokens=1000) for _ in range(4)]
    assert made.queue.count == 4
    # Each takes 2.1 s: two at once.
    for one, turns in zip(queued, (2, 2, 3, 3), strict=True):
        assert one.predicted_s == pytest.approx(2.1 * turns, rel=0.1)


def test_elapsed_time_counts_from_the_arrival() -> None:
    made = taught(1)
    offered(made, tokens=1000)
    early = offered(made, tokens=1000, now=0.0)
    late = ticket(0.0, tokens=1000)
    made.withdraw(early)
    made.offer(late, 1.0)  # its body took a second
    assert late.predicted_s == pytest.approx(early.predicted_s, rel=0.01)


def test_a_free_place_is_waited_for() -> None:
    made = taught(1, seqs=2)
    running = [ticket(tokens=1, output=400), ticket(tokens=1, output=400)]
    for number, one in enumerate(running):
        made.offer(one, float(number))
        made.first_token(one, number + 0.2)
    one = offered(made, tokens=1, now=2.0, output=400)
    assert one.upstream is None
    assert one.predicted_s == pytest.approx(0.2 + 400 * STEP_S - 2.0, rel=0.1)


def test_priority_and_other_keys() -> None:
    made = taught(1)
    offered(made, tokens=1000)
    for _ in range(4):
        offered(made, tokens=1000, key="many")
    first = made.predicted_ttft(ticket(tokens=1000, priority=-1, key="many").demand, 0.0)
    fair = made.predicted_ttft(ticket(tokens=1000, key="other").demand, 0.0)
    last = made.predicted_ttft(ticket(tokens=1000, key="many").demand, 0.0)
    assert first == pytest.approx(2 * 2.1, rel=0.1)
    assert fair == pytest.approx(3 * 2.1, rel=0.34)  # one of the other key's at most goes before it
    assert last == pytest.approx(6 * 2.1, rel=0.1)


def test_another_keys_share_goes_before_a_long_queue() -> None:
    made = taught(1)
    offered(made, tokens=1000)
    for key in ("one", "other"):
        for _ in range(3):
            offered(made, tokens=1000, key=key)
    last = made.predicted_ttft(ticket(tokens=1000, key="one").demand, 0.0)
    assert last == pytest.approx(8 * 2.1, rel=0.2)


def test_the_first_of_like_prompts_computes_what_they_share() -> None:
    made = taught(1)
    prompt = tuple(range(100, 120))
    tokens = 20 * 128
    offered(made, tokens=1000)
    first, second = (offered(made, tokens=tokens, prefix=prompt) for _ in range(2))
    assert first.predicted_s is not None
    assert second.predicted_s is not None
    assert second.predicted_s - first.predicted_s < 0.2 * 0.002 * tokens


def test_beyond_its_limit_it_is_neither_bound_nor_queued() -> None:
    made = taught(1)
    running = offered(made, tokens=1000)
    assert running.upstream is not None
    one = ticket(tokens=1000)
    one.limit_s = 4.0
    with pytest.raises(LateError):
        made.offer(one, 0.0)
    assert one.predicted_s == pytest.approx(4.2, rel=0.1)
    assert (made.queue.count, running.upstream.in_flight) == (0, 1)
    one.limit_s = None  # nobody else takes it
    assert made.offer(one, 0.0) is None
    assert made.queue.count == 1
    idle = taught(1)
    long = ticket(tokens=5000)
    long.limit_s = 4.0
    with pytest.raises(LateError):  # its own prefill takes longer
        idle.offer(long, 0.0)
    assert all(not upstream.in_flight for upstream in idle.table)


def test_a_limit_holds_for_nearly_all_that_stay() -> None:
    made = taught(1)
    offered(made, tokens=1000)
    one = ticket(tokens=850)
    one.limit_s = 4.0
    # 3.9 s, but predictions of queued requests have not proved to be that good.
    with pytest.raises(LateError):
        made.offer(one, 0.0)
    assert one.predicted_s is not None
    assert one.predicted_s < 4.0
    one.limit_s = 40.0
    assert made.offer(one, 0.0) is None
    assert made.queue.count == 1


def test_a_full_queue_says_so_first_where_nothing_is_late() -> None:
    made = taught(1, seqs=2)
    made.queue.max_requests = 0
    for _ in range(2):
        offered(made, tokens=10)
    with pytest.raises(FullError):
        offered(made, tokens=10)


def test_what_was_learned_follows_the_machine() -> None:
    made = taught(1)
    now = 0.0
    for _ in range(300):
        one = offered(made, tokens=300, now=now)
        run(made, one, now, 1.4)  # half as fast as it was
        now += 10.0
    assert made.predicted_ttft(ticket(tokens=300).demand, now) == pytest.approx(1.4, rel=0.1)


@given(times, st.floats(0.0, 100.0))
def test_work_goes_to_whichever_is_free_first(busy: list[float], work_s: float) -> None:
    level = filled_to(busy, work_s)
    assert sum(max(0.0, level - each) for each in busy) == pytest.approx(work_s, abs=1e-6)
    assert level >= min(busy)


def test_without_instances_there_is_no_level() -> None:
    assert filled_to([], 1.0) == 0.0


@given(times, st.integers(1, 30), st.floats(0.1, 20.0))
def test_ends_come_in_order(ends: list[float], number: int, decode_s: float) -> None:
    at = [end_of(ends, count, decode_s) for count in range(1, number + 1)]
    assert at == sorted(at)
    assert at[0] == pytest.approx(min(ends))
    # Each place ends one request per decode_s: no more can have ended.
    assert at[-1] <= max(ends) + number / len(ends) * decode_s + 1e-6


def test_ends_of_full_instances_are_timed() -> None:
    """A place is kept 20 s as far as the expected tokens tell, and 10 s as ends do."""
    made = taught(1, seqs=4)
    now = 0.0
    running = [offered(made, tokens=1, output=400) for _ in range(4)]
    for _ in range(80):
        offered(made, tokens=1, output=400)
    for _ in range(40):
        now += 2.5
        one = running.pop(0)
        made.release(one, now, Ending.LEFT)
        running += made.pump(now)
    late = made.predicted_ttft(ticket(tokens=1, output=400).demand, now)
    assert made.queue.count == 40
    assert late == pytest.approx(41 * 2.5, rel=0.2)


class Failing:
    """A predictor each method of which raises."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error
        self.asked: set[str] = set()

    def _fail(self, name: str) -> NoReturn:
        self.asked.add(name)
        raise self._error("it fails")

    def at_once(self, ticket: Ticket, upstream: Upstream) -> float | None:
        self._fail("at_once")

    def queued(self, ticket: Ticket, candidates: Sequence[Upstream], now: float) -> float | None:
        self._fail("queued")

    def at_worst(self, ticket: Ticket, predicted_s: float) -> float:
        self._fail("at_worst")

    def seen_accepted(self, ticket: Ticket, upstream: Upstream) -> None:
        self._fail("seen_accepted")

    def seen_first_token(
        self, ticket: Ticket, upstream: Upstream, began: float, tokens: float, now: float
    ) -> None:
        self._fail("seen_first_token")

    def seen_free_place(self, upstream: Upstream, now: float) -> None:
        self._fail("seen_free_place")

    def seen_end(self, ticket: Ticket, upstream: Upstream, now: float) -> None:
        self._fail("seen_end")


@pytest.mark.parametrize("error", [ZeroDivisionError, IndexError, TypeError, OverflowError, RuntimeError])
def test_a_prediction_that_fails_fails_no_request(error: type[Exception]) -> None:
    failing = Failing(error)
    made = balancer(1, seqs=1, predictor=failing)
    load = HostLoad(made, ModelTraits(ModelNames(("m",))), lambda: (frozenset(), frozenset()))
    first, second = offered(made, tokens=10), offered(made, tokens=10, now=0.1)
    assert load.load(("m",), {}, None, 0.2).predicted_ttft_s is None
    assert (first.upstream is not None, second.queued) == (True, True)
    run(made, first, 0.2)
    assert made.pump(1.0) == [second]
    run(made, second, 1.0)
    assert (first.predicted_s, second.predicted_s, made.queue.count) == (None, None, 0)
    assert load.load(("m",), {}, None, 2.0).predicted_ttft_s is None
    assert failing.asked == {name for name in vars(Predictor) if name[0] != "_"} - {"at_worst"}
    notes = [note for note in made.notes() if "predict" in note]
    assert len(notes) == 1
    assert error.__name__ in notes[0]


def test_a_limit_holds_while_the_worst_case_cannot_be_predicted() -> None:
    class Late(Failing):
        def at_once(self, ticket: Ticket, upstream: Upstream) -> float | None:
            return 5.0

    made = balancer(1, predictor=Late(ValueError))
    one = ticket(tokens=10)
    one.limit_s = 4.0
    with pytest.raises(LateError, match=r"in up to 5\.0 s"):
        made.offer(one, 0.0)


@pytest.mark.parametrize("waiting", [1, 4, 40])
def test_while_all_instances_are_ejected_and_idle_their_return_is_waited_for(waiting: int) -> None:
    made = taught(1, seqs=4)
    (upstream,) = made.table
    upstream.outliers.eject(30.0)
    predicted = [offered(made, tokens=300).predicted_s or 0.0 for _ in range(waiting)]
    assert predicted[0] == pytest.approx(30.0 + 0.1 + 0.6, rel=0.1)
    assert predicted == sorted(predicted)
    assert made.predicted_ttft(ticket(tokens=300).demand, 0.0) == pytest.approx(predicted[-1], rel=0.3)


@pytest.mark.parametrize("full", [False, True])
def test_refused_requests_teach_nothing(full: bool) -> None:
    """An engine refuses `max_tokens` and `n` that are absurd, and prompts beyond its context, at once."""
    calm, flooded = taught(1, seqs=4), taught(1, seqs=4)
    for made in (calm, flooded):
        for _ in range(3 if full else 0):
            made.first_token(offered(made, tokens=100, output=100), 0.2)
    for number in range(200):
        made, now = flooded, 1.0 + 0.01 * number
        made.release(offered(made, tokens=100_000, output=10**9, now=now), now + 0.005, Ending.REFUSED)
    late = []
    for made in (calm, flooded):
        for _ in range(5):
            offered(made, tokens=100, output=100, now=4.0)
        late.append(made.predicted_ttft(ticket(tokens=100).demand, 4.0))
    assert late[0] == pytest.approx(late[1], rel=0.01)
    assert calm.costs.typical_uncached == pytest.approx(flooded.costs.typical_uncached)


def test_a_slow_refusal_teaches_nothing() -> None:
    """Others are bound while the engine looks at the prompt that it refuses."""
    made = taught(1, seqs=4)
    before = made.costs.typical_uncached
    refused = offered(made, tokens=100_000)
    for number in range(1000):
        run(made, offered(made, tokens=100, now=0.5 * number), 0.5 * number)
    made.release(refused, 501.0, Ending.REFUSED)
    assert 90 <= made.costs.typical_uncached <= before


def test_one_request_with_many_choices_is_one_sample() -> None:
    """Its client left after the first token."""
    made = taught(1, seqs=4)
    one = offered(made, tokens=100, output=131_072 * 16_384)
    made.first_token(one, 0.3)
    made.release(one, 0.4, Ending.LEFT)
    for _ in range(8):
        offered(made, tokens=100, output=100, now=1.0)
    late = made.predicted_ttft(ticket(tokens=100).demand, 1.0)
    assert late is not None
    assert late < 3600
