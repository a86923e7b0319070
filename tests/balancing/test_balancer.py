"""The balancer as its owner sees it: offers, pumps, ends, instances that come and go."""

# ruff: noqa: S311
from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.balancing import balancer, run, slot, ticket, up
from support.examples import examples

from launcher.balancing.balancer import RETRY_MAX_S, TICK_S, WINDOW, Balancer
from launcher.balancing.cost_model import UNKNOWN_AT_ONCE
from launcher.balancing.policies import PrefixAware, Upstreams
from launcher.balancing.upstreams import Ending, FullError, Ticket, Upstream
from launcher.config.schema import Policy


def busy(made: Balancer, count: int, now: float = 0.0) -> list[Ticket]:
    """So many requests that are past their prefill."""
    tickets = []
    for _ in range(count):
        one = ticket(now)
        assert made.offer(one, now) is not None
        made.first_token(one, now)
        tickets.append(one)
    return tickets


def test_a_request_is_bound_at_once_or_queued_at_the_concurrency_limit() -> None:
    made = balancer(1, seqs=2)
    running = busy(made, 2)
    waiting = ticket()
    assert made.offer(waiting, 0.0) is None
    assert waiting.queued
    assert made.pump(0.1) == []
    made.release(running[0], 1.0, Ending.WHOLE)
    assert made.pump(1.0) == [waiting]
    assert slot(waiting) == 0
    assert not waiting.queued
    assert made.pump(1.0) == []


def test_a_request_waits_while_the_instance_has_enough_prefill() -> None:
    made = balancer(1)
    long, short = ticket(tokens=5000), ticket(tokens=10)
    assert made.offer(long, 0.0) is not None
    assert made.offer(short, 0.0) is None
    when = made.next_pump(0.0)
    assert when == pytest.approx(5.0 - 0.06, abs=0.01)
    assert made.pump(when - 0.1) == []
    assert made.pump(when + TICK_S) == [short]
    assert made.next_pump(9.0) is None


def test_a_first_burst_starts_before_the_speed_is_known() -> None:
    made = balancer(1)
    made.costs.fit("m").count = 0
    assert all(made.offer(ticket(tokens=5000), 0.0) is not None for _ in range(UNKNOWN_AT_ONCE))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tokens", [20, 250, 4000])
@pytest.mark.parametrize("instances", [1, 4])
def test_a_burst_waits_little_on_engines_faster_than_the_prior(
    instances: int, tokens: int, seed: int
) -> None:
    random, count, over, step_s = Random(seed), 1000, 0.5, 0.001
    made = balancer(instances, seqs=4096, max_requests=count)
    made.costs.fit("m").count = 0
    coming = [ticket(now, tokens=tokens) for now in sorted(random.uniform(0.0, over) for _ in range(count))]
    took = {one: random.uniform(0.024, 0.027) for one in coming}
    bound: list[tuple[float, Ticket]] = []
    first = 0  # of those in `bound` that may have no first token yet
    for now in (step_s * step for step in range(4000)):
        for since, one in bound[first:]:
            if one.first_token_at is None and now >= since + took[one]:
                made.first_token(one, now)
        while first < len(bound) and bound[first][1].first_token_at is not None:
            first += 1
        while coming and coming[0].arrived <= now:
            one = coming.pop(0)
            if made.offer(one, now) is not None:
                bound.append((now, one))
        bound += [(now, one) for one in made.pump(now)]
    waits = sorted(since - one.arrived for since, one in bound)
    assert len(waits) == count
    assert waits[count // 2] <= step_s
    assert waits[count * 99 // 100] < 0.15  # six of their first tokens


def test_a_first_token_starts_the_next_request() -> None:
    made = balancer(1)
    one, two = ticket(tokens=5000), ticket(tokens=5000)
    made.offer(one, 0.0)
    made.offer(two, 0.0)
    made.first_token(one, 0.5)
    made.first_token(one, 0.6)
    made.first_token(two, 0.6)
    assert one.first_token_at == 0.5
    assert two.first_token_at is None
    assert made.pump(0.6) == [two]


def test_while_the_speed_is_unknown_only_streams_without_a_first_token_are_limited() -> None:
    made = balancer(1, seqs=9)
    made.costs.fit("m").count = 0
    tickets = [ticket(tokens=5000, stream=n > 2) for n in range(3 + UNKNOWN_AT_ONCE)]
    for one in tickets:
        assert made.offer(one, 0.0) is not None
    third = ticket()
    assert made.offer(third, 0.0) is None
    before = made.costs.fit("m").slope
    made.release(tickets[0], 0.1, Ending.WHOLE)
    assert made.costs.fit("m").slope < before
    made.first_token(tickets[3], 0.2)
    assert made.pump(0.2) == [third]


def test_a_full_queue_refuses_with_retry_after() -> None:
    made = balancer(1, seqs=1, max_requests=1)
    busy(made, 1)
    assert made.retry_after_s(5.0) == 1
    assert made.offer(ticket(), 0.0) is None
    with pytest.raises(FullError, match="1 requests wait already") as full:
        made.offer(ticket(9.0), 9.0)
    assert full.value.retry_after_s == 10  # nothing has left yet: the oldest has waited so long
    again = ticket(0.0)
    again.number = 99
    assert made.offer(again, 0.0) is None  # one that was accepted before is not refused


def test_retry_after_follows_the_measured_drain_rate() -> None:
    made = balancer(1, seqs=100)
    for n in range(100):
        run(made, busy(made, 1, n * 0.5)[0], n * 0.5)
    for one in busy(made, 100, 50.0):
        assert one.upstream is not None
    for _ in range(39):
        made.offer(ticket(50.0), 50.0)
    assert made.retry_after_s(50.0) == pytest.approx(40 / 2, abs=3)
    # From here on a rate is 0 as a number; shortly before, its inverse is none.
    assert {made.retry_after_s(50_000.0), *map(made.retry_after_s, range(20_000, 24_000, 10))} == {
        RETRY_MAX_S
    }


def test_withdrawn_and_expired_tickets_are_not_started() -> None:
    made = balancer(1, seqs=1)
    running = busy(made, 1)
    gone, late, kept = ticket(), ticket(deadline=2.0), ticket()
    for one in (gone, late, kept):
        made.offer(one, 0.0)
    assert made.next_pump(0.0) == 2.0
    made.withdraw(gone)
    made.withdraw(gone)
    assert made.queue.expired(1.9) == []
    assert made.queue.expired(2.0) == [late]
    made.release(running[0], 3.0, Ending.WHOLE)
    made.release(running[0], 3.0, Ending.WHOLE)
    assert made.pump(3.0) == [kept]


def test_models_do_not_delay_each_other() -> None:
    made = balancer(1, seqs=1)
    made.add(up(1, model="n", seqs=1))
    busy(made, 1)
    waits, other, whichever = ticket(), ticket(model="n"), ticket(model=None)
    assert made.offer(waits, 0.0) is None
    assert made.offer(other, 0.0) is not None
    assert made.offer(whichever, 0.0) is None
    assert not made.possible(ticket(model="none"))
    made.first_token(other, 0.1)
    made.release(other, 0.2, Ending.WHOLE)
    assert made.pump(0.3) == [whichever]
    nowhere = ticket(model="none")
    assert made.offer(nowhere, 0.3) is None
    assert made.pump(0.3) == []


def test_retries_avoid_tried_instances_and_pinned_requests_go_to_theirs() -> None:
    made = balancer(2)
    one = ticket()
    one.tried.add((0, 1))
    made.offer(one, 0.0)
    assert slot(one) == 1
    cached = ticket(pinned=(1, 1))
    made.first_token(one, 0.1)
    made.offer(cached, 0.2)
    assert slot(cached) == 1
    made.table.drain(1, 1)
    elsewhere = ticket(pinned=(1, 1))
    made.offer(elsewhere, 0.3)
    assert slot(elsewhere) == 0
    lost = ticket(pinned=(9, 9))
    made.first_token(elsewhere, 0.4)
    made.offer(lost, 0.5)
    assert slot(lost) == 0


def test_a_pin_to_another_models_instance_is_ignored() -> None:
    made = balancer(1)
    made.add(up(1, model="n"))
    made.offer(one := ticket(pinned=(1, 1)), 0.0)
    assert slot(one) == 0
    made.offer(whichever := ticket(pinned=(1, 1), model=None), 0.0)
    assert slot(whichever) == 1


def test_a_pinned_request_that_failed_on_its_instance_goes_elsewhere() -> None:
    made = balancer(2)
    one = ticket(pinned=(1, 1))
    one.tried.add((1, 1))
    made.offer(one, 0.0)
    assert slot(one) == 0


def test_drained_and_removed_instances_get_nothing_and_their_requests_can_be_offered_again() -> None:
    made = balancer(2)
    one = ticket()
    made.offer(one, 0.0)
    was = one.upstream
    assert was is not None
    assert made.table.remove(*was.key, "killed") is was
    made.release(one, 1.0, Ending.BROKEN)
    assert was.in_flight == 0
    made.offer(one, 1.0)
    assert slot(one) != was.slot
    assert made.table.drain(1 - was.slot, 1) is not None
    parked = ticket()
    assert made.offer(parked, 2.0) is None
    assert made.pump(2.0) == []
    made.add(up(0, generation=2))
    assert made.pump(3.0) == [parked]
    assert made.add(up(0, generation=1)) is None


def test_failures_eject_and_a_single_request_tries_the_instance_again() -> None:
    made = balancer(1, eject_failures=2, eject_s=10.0)
    upstream = made.table.get(0, 1)
    assert upstream is not None
    assert not made.failed(upstream, 0.0)
    assert made.failed(upstream, 0.0)
    assert made.notes() == ["slot 0: ejected for 10 s"]
    assert made.notes() == []
    first, second = ticket(), ticket()
    assert made.offer(first, 1.0) is None
    assert made.offer(second, 1.0) is None
    assert made.next_pump(1.0) == 10.0
    assert made.pump(10.0) == [first]
    assert made.pump(10.1) == []
    made.first_token(first, 10.2)
    made.release(first, 10.3, Ending.WHOLE)
    assert made.pump(10.3) == [second]
    upstream.outliers.eject(99.0)
    assert made.offer(ticket(), 11.0) is None
    assert made.next_pump(100.0) is not None


def test_the_reported_size_of_a_kv_cache_sets_the_capacity() -> None:
    made = balancer(1)
    made.add(known := up(1, kv_tokens=1280))
    assert known.prefixes.capacity == 10
    made.add(told := up(2))
    made.reconcile(told, 0, 0, kv_tokens=1280)
    assert told.prefixes.capacity == 10


def test_requests_that_the_instance_reports_take_capacity() -> None:
    made = balancer(1, seqs=2)
    upstream = next(iter(made.table))
    made.reconcile(upstream, 2, 0)
    one = ticket()
    assert made.offer(one, 0.0) is not None
    made.release(one, 0.1, Ending.WHOLE)
    made.reconcile(upstream, 2, 0)
    made.reconcile(upstream, 2, 0)
    waits = ticket()
    assert made.offer(waits, 1.0) is None
    made.reconcile(upstream, 0, 0)
    assert made.pump(1.0) == [waits]
    made.first_token(waits, 1.1)
    made.reconcile(upstream, 0, 1, 0.99)
    full = ticket()
    assert made.offer(full, 2.0) is None
    made.reconcile(upstream, 1, 0, 0.5)
    assert made.pump(2.0) == [full]


def test_estimates_follow_usage() -> None:
    made = balancer(1)
    one = ticket(tokens=100, max_tokens=50)
    made.offer(one, 0.0)
    made.first_token(one, 0.1)
    made.progress(one, 3)
    made.usage(one, 400, 200, 25, cached_tokens=0)
    made.usage(one, 400, 200, 25)
    made.release(one, 1.0, Ending.WHOLE)
    assert made.prompt_tokens(400) == 201
    assert made.output_tokens(None) == 25
    assert made.output_tokens(50) == 25
    made.usage(one, 400, 200, 0, cached_tokens=0)
    made.progress(one, 1)


def test_a_straggler_is_logged_and_recovers() -> None:
    made = balancer(3, policy=Policy.ROUND_ROBIN, seqs=64)
    now = 0.0

    def play(rounds: int, slow_s: float) -> None:
        nonlocal now
        for _ in range(rounds):
            one = ticket(now, tokens=100)
            upstream = made.offer(one, now)
            assert upstream is not None
            run(made, one, now, slow_s if upstream.slot == 2 else 0.1)
            now += 2.0

    play(240, 0.5)
    slow = made.table.get(2, 1)
    assert slow is not None
    assert slow.lag > 1.5
    assert any("times slower to first token" in note for note in made.notes())
    play(900, 0.1)
    assert slow.lag == 1.0
    assert "slot 2: as fast as its siblings again" in made.notes()


def test_a_pump_looks_at_a_window_of_the_queue() -> None:
    made = balancer(2, seqs=1000)
    prompt = tuple(range(50))
    cached = ticket(tokens=6400, prefix=prompt)
    made.offer(cached, 0.0)
    for _ in range(WINDOW + 10):
        made.offer(ticket(tokens=6401, prefix=prompt), 0.0)
    assert made.queue.count > WINDOW
    before = made.queue.count
    made.pump(0.0)
    assert made.queue.count <= before


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("keys", [1, 3])
def test_requests_for_a_model_without_instances_delay_no_others(policy: Policy, keys: int) -> None:
    made = balancer(1, policy=policy, seqs=2, max_requests=1000)
    made.add(up(1, model="gone"))
    made.table.remove(1, 1, "crash")
    running = busy(made, 2)
    for n in range(4 * WINDOW):
        assert made.offer(ticket(0.1, model="gone", key=str(n % keys)), 0.1) is None
    waiting, whichever = [ticket(0.2), ticket(0.3)], ticket(0.4, model=None)
    assert not any(made.offer(one, 0.4) for one in (*waiting, whichever))
    made.release(running[0], 1.0, Ending.WHOLE)
    made.release(running[1], 1.0, Ending.WHOLE)
    assert made.pump(1.0) == [whichever, waiting[0]]
    made.release(whichever, 1.1, Ending.WHOLE)
    assert made.pump(1.1) == [waiting[1]]
    made.add(up(1, model="gone", generation=2))
    assert made.pump(2.0)[0].demand.model == "gone"


@pytest.mark.parametrize("tried", [False, True])
def test_requests_pinned_to_a_busy_instance_delay_no_others(tried: bool) -> None:
    made = balancer(2, seqs=1, max_requests=1000)
    running = busy(made, 2)
    assert {slot(one) for one in running} == {0, 1}
    for _ in range(4 * WINDOW):
        made.offer(one := ticket(0.1, pinned=None if tried else (0, 1)), 0.1)
        if tried:
            one.tried.add((1, 1))
    made.offer(last := ticket(0.2), 0.2)
    made.release(next(one for one in running if slot(one) == 1), 1.0, Ending.WHOLE)
    assert made.pump(1.0) == [last]


def test_others_pass_a_request_that_waits_for_its_cache() -> None:
    made = balancer(2)
    prompt = tuple(range(50))
    made.offer(first := ticket(tokens=6400, prefix=prompt, pinned=(0, 1)), 0.0)
    made.first_token(first, 6.4)
    made.offer(ticket(6.4, tokens=1000, pinned=(0, 1)), 6.4)
    again, other = ticket(6.5, tokens=6410, prefix=prompt), ticket(6.5)
    assert made.offer(again, 6.5) is None
    assert made.pump(6.6) == []
    assert made.offer(other, 6.6) is not None
    assert slot(other) == 1
    made.first_token(other, 6.7)
    assert made.pump(7.6) == [again]
    assert slot(again) == 0


@pytest.mark.parametrize(("again_s", "asked"), [(0.0, 3), (0.25, 2), (10.0, 1)])
def test_a_ticket_that_waits_for_an_instance_is_asked_again_after_a_time(
    monkeypatch: pytest.MonkeyPatch, again_s: float, asked: int
) -> None:
    made = balancer(2, ask_again_s=again_s)
    prompt = tuple(range(50))
    made.offer(first := ticket(tokens=6400, prefix=prompt, pinned=(0, 1)), 0.0)
    made.first_token(first, 6.4)
    made.offer(ticket(6.4, tokens=1000, pinned=(0, 1)), 6.4)
    again = ticket(6.5, tokens=6410, prefix=prompt)
    assert made.offer(again, 6.5) is None
    looks: list[Ticket] = []
    choose = PrefixAware.choose

    def counted(self: PrefixAware, one: Ticket, all_: Upstreams, opened: Upstreams, now: float) -> Upstream:
        looks.append(one)
        return choose(self, one, all_, opened, now)

    monkeypatch.setattr(PrefixAware, "choose", counted)
    cached = made.table.get(0, 1)
    assert cached is not None
    for now in (6.6, 6.7, 7.0):
        assert made.pump(now) == []
        assert cached.load.ahead == 1
        due = made.next_pump(now)
        assert due is not None
        assert not again_s or due <= now + again_s
    assert len(looks) == asked
    # The instance that it waits for can start it: at once, whenever it was asked last.
    assert made.pump(7.6) == [again]
    assert slot(again) == 0


def test_load_counts_the_tickets_that_wait_for_an_instance() -> None:
    made = balancer(2, seqs=9)
    prompt = tuple(range(50))
    made.offer(ticket(tokens=6400, prefix=prompt, pinned=(1, 1)), 0.0)
    made.offer(ticket(tokens=6400, pinned=(0, 1)), 0.0)
    cached = made.table.get(1, 1)
    assert cached is not None
    waiting = [ticket(0.1, tokens=6500, prefix=prompt) for _ in range(3)]
    assert not any(made.offer(one, 0.1) for one in waiting)
    assert [one.awaited for one in waiting] == [cached] * 3
    assert (cached.load.waiting, cached.load.waiting_s) == (3, pytest.approx(0.3))
    made.withdraw(waiting[0])
    assert (cached.load.waiting, cached.load.waiting_s) == (2, pytest.approx(0.2))
    assert made.pump(6.45) == [waiting[1]]
    made.withdraw(waiting[2])
    assert (cached.load.waiting, cached.load.waiting_s) == (0, 0.0)


ACTS = ("offer", "offer", "first", "end", "withdraw", "drain", "add", "remove", "fail")


class Play:
    """Random acts on a balancer, and what must hold after each of them."""

    def __init__(self, policy: Policy) -> None:
        self.made = balancer(3, policy=policy, seqs=3, max_requests=20)
        self.waiting: list[Ticket] = []
        self.bound: list[Ticket] = []
        self.now = 0.0
        self.generation = 1

    def act(self, what: str, number: int) -> None:
        self.now += 0.05
        getattr(self, what)(number)
        for one in self.made.pump(self.now):
            self.waiting.remove(one)
            self.bound.append(one)
        when = self.made.next_pump(self.now)
        assert when is None or when >= self.now
        queue = self.made.queue
        assert {one for model in queue.models() for one in queue.ordered(model)} == set(self.waiting)
        for upstream in self.made.table:
            assert upstream.load.waiting == sum(one.awaited is upstream for one in self.waiting)
        for upstream in {one.upstream for one in self.bound}:
            assert upstream is not None
            mine = [one for one in self.bound if one.upstream is upstream]
            assert len(mine) == upstream.in_flight <= upstream.max_num_seqs

    def offer(self, number: int) -> None:
        one = ticket(
            self.now, tokens=1 + number * 100, prefix=tuple(range(number)), key=str(number % 3),
            priority=number % 2, stream=number != 5, model=None if number == 7 else "m",
        )  # fmt: skip
        try:
            (self.waiting if self.made.offer(one, self.now) is None else self.bound).append(one)
        except FullError:
            assert len(self.waiting) == 20
            assert self.made.retry_after_s(self.now) >= 1

    def first(self, number: int) -> None:
        if self.bound:
            self.made.first_token(self.bound[number % len(self.bound)], self.now)

    def end(self, number: int) -> None:
        if self.bound:
            one = self.bound.pop(number % len(self.bound))
            self.made.progress(one, number)
            self.made.release(one, self.now, tuple(Ending)[number % 4])

    def withdraw(self, number: int) -> None:
        if self.waiting:
            self.made.withdraw(self.waiting.pop(number % len(self.waiting)))

    def drain(self, number: int) -> None:
        self.made.table.drain(number % 3, self.generation)

    def add(self, number: int) -> None:
        self.generation += number % 2
        self.made.add(up(number % 3, generation=self.generation, seqs=3))

    def remove(self, number: int) -> None:
        self.made.table.remove(number % 3, self.generation, "gone")

    def fail(self, number: int) -> None:
        if self.bound:
            upstream = self.bound[number % len(self.bound)].upstream
            assert upstream is not None
            self.made.failed(upstream, self.now)

    def settle(self) -> None:
        """Fresh instances serve all that wait, whatever happened before."""
        for number in range(3):
            self.made.add(up(number, generation=self.generation + 1, seqs=3))
        for _ in range(500):
            self.now += 30.0
            for one in self.bound:
                self.made.first_token(one, self.now)
                self.made.release(one, self.now, Ending.WHOLE)
            self.bound = self.made.pump(self.now)
            self.waiting = [one for one in self.waiting if one not in self.bound]
        assert not self.waiting
        assert self.made.queue.count == self.made.queue.bytes == 0


@settings(max_examples=examples(150), deadline=None)
@given(
    st.sampled_from(list(Policy)),
    st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 11)), max_size=120),
)
def test_nothing_is_lost_doubled_or_bound_over_the_limit(policy: Policy, acts: list[tuple[str, int]]) -> None:
    play = Play(policy)
    for what, number in acts:
        play.act(what, number)
    play.settle()


@given(st.lists(st.floats(0.0, 10.0), min_size=2, max_size=40))
def test_equal_requests_start_in_order_of_arrival(gaps: list[float]) -> None:
    made = balancer(1, seqs=1)
    busy(made, 1)
    now, came = 0.0, []
    for gap in gaps:
        now += gap
        one = ticket(now)
        assert made.offer(one, now) is None
        came.append(one)
    running = next(iter(made.table))
    assert running.in_flight == 1
    started: list[Ticket] = []
    last: Ticket | None = None
    running.in_flight = 0
    for _ in came:
        now += 1.0
        if last is not None:
            made.first_token(last, now)
            made.release(last, now, Ending.WHOLE)
        (last,) = made.pump(now)
        started.append(last)
    assert started == came


def test_a_stream_of_small_prompts_does_not_starve_a_large_one() -> None:
    made = balancer(1, seqs=1)
    (running,) = busy(made, 1)
    large = ticket(0.0, tokens=50_000)
    assert made.offer(large, 0.0) is None
    now = 0.0
    for _ in range(200):
        now += 0.1
        made.offer(ticket(now, tokens=1), now)
        made.release(running, now, Ending.WHOLE)
        (running,) = made.pump(now)
        if running is large:
            break
        made.first_token(running, now)
    assert running is large
    assert now < 10.0


def test_with_a_full_queue_an_instance_below_its_limit_takes_the_request() -> None:
    made = balancer(2, seqs=2, max_requests=0)
    for _ in range(4):  # each waits for the prefill before it, and is below the limit
        assert made.offer(ticket(tokens=5000), 0.0) is not None
    with pytest.raises(FullError):
        made.offer(ticket(tokens=10), 0.0)


def test_a_withdrawn_ticket_is_no_longer_ahead_of_others() -> None:
    made = balancer(2)
    prompt = tuple(range(50))
    made.offer(first := ticket(tokens=6400, prefix=prompt, pinned=(0, 1)), 0.0)
    made.first_token(first, 6.4)
    made.offer(ticket(6.4, tokens=1000, pinned=(0, 1)), 6.4)
    waiting = ticket(6.5, tokens=6410, prefix=prompt)
    assert made.offer(waiting, 6.5) is None
    cached = made.table.get(0, 1)
    assert cached is not None
    assert cached.load.ahead == 1
    made.withdraw(waiting)
    made.offer(ticket(6.6), 6.6)
    assert (cached.load.ahead, cached.load.ahead_s) == (0, 0.0)


def test_a_retry_whose_other_instances_are_busy_stays_queued() -> None:
    made = balancer(2, seqs=1)
    running = busy(made, 2)
    retry = ticket(0.1)
    retry.tried.add((0, 1))
    assert made.offer(retry, 0.1) is None
    made.release(next(one for one in running if slot(one) == 0), 1.0, Ending.WHOLE)
    assert made.pump(1.0) == []
    made.release(next(one for one in running if one.upstream is not None), 2.0, Ending.WHOLE)
    assert made.pump(2.0) == [retry]
    assert slot(retry) == 1


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("wished", [0, 1, 2])
def test_a_gateway_chooses_the_instance_that_is_open(policy: Policy, wished: int) -> None:
    made = balancer(3, policy=policy)
    for _ in range(4):
        one = ticket(prefix=(7,), wished=wished)
        assert made.offer(one, 0.0) is not None
        assert slot(one) == wished
        made.first_token(one, 0.0)


def test_a_wish_that_cannot_be_had_now_leaves_the_choice_to_the_balancer() -> None:
    made = balancer(2, seqs=1)
    full = ticket(wished=0)
    made.offer(full, 0.0)
    for wished in (0, 7):  # busy, unknown
        one = ticket(wished=wished)
        assert made.offer(one, 0.0) is not None
        assert slot(one) == 1
        made.release(one, 0.0, Ending.WHOLE)
    made.table.drain(1, 1)
    assert made.offer(ticket(wished=1), 0.0) is None
    made.release(full, 1.0, Ending.WHOLE)
    assert [slot(one) for one in made.pump(1.0)] == [0]


def test_a_wish_neither_widens_nor_outlives_the_first_offer() -> None:
    made = balancer(2)
    made.add(up(2, model="other"))
    other = ticket(wished=2)
    assert made.offer(other, 0.0) is not None
    assert slot(other) in {0, 1}  # of its own model
    stored = ticket(wished=1, pinned=(0, 1))
    assert made.offer(stored, 0.0) is not None
    assert slot(stored) == 0
    again = ticket(wished=1, prefix=(7,))
    made.offer(again, 0.0)
    made.release(again, 0.0, Ending.BROKEN)
    again.tried.add((1, 1))
    assert made.offer(again, 0.0) is not None
    assert slot(again) == 0
    made.release(again, 0.0, Ending.BROKEN)
    again.tried.clear()
    for _ in range(2):
        made.offer(ticket(wished=1), 0.0)
    assert made.offer(again, 0.0) is not None
    assert slot(again) == 0  # a retry goes where the balancer wants it


def test_an_ejected_instance_is_not_had_by_a_wish() -> None:
    made = balancer(2, eject_failures=1, eject_s=10.0)
    made.failed(next(u for u in made.table if u.slot == 1), 0.0)
    one = ticket(wished=1)
    assert made.offer(one, 1.0) is not None
    assert slot(one) == 0


# --- a queue further on ----------------------------------------------------------------------------


def test_a_request_is_bound_where_it_costs_least_though_nothing_is_open() -> None:
    made = balancer(2, seqs=2)
    busy(made, 4)
    long, late = ticket(tokens=4000), ticket(tokens=100)
    for one in (long, late):
        assert made.offer(one, 1.0) is None
    first = made.bind_soonest(long, 2.0)
    assert first is not None
    other = made.bind_soonest(late, 2.0)
    assert {first.slot, 0 if other is None else other.slot} == {0, 1}
    assert made.queue.count == 0
    assert sorted(upstream.in_flight for upstream in made.table) == [3, 3]


def test_a_request_bound_to_a_full_instance_teaches_nothing_by_its_first_byte() -> None:
    made = balancer(1, seqs=1)
    (running,) = busy(made, 1)
    late = ticket(tokens=5000)
    made.offer(late, 0.0)
    made.bind_soonest(late, 1.0)
    fit = made.costs.fit("m")
    learned = fit.count
    made.first_token(late, 1.01)
    assert fit.count == learned
    for one in (late, running):
        made.release(one, 2.0, Ending.LEFT)
    assert made.offer(ticket(), 2.0) is not None


def test_nothing_is_bound_where_there_is_no_instance() -> None:
    made = balancer(0)
    late = ticket()
    made.offer(late, 0.0)
    assert made.bind_soonest(late, 1.0) is None
    assert made.queue.count == 0
