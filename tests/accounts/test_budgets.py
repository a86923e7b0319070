"""Budgets: never more than one request's worth over, whatever happens in which order."""

from __future__ import annotations

import datetime as dt
import json
from math import inf
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from support.stored_sums import StoredSums

from launcher.accounts.budgets import Budgets, BudgetState, Past, Refusal, Reservation, Rules, Why
from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.spending import Spent
from launcher.base.clock import Clock
from launcher.base.errors import LauncherError
from launcher.base.money import PICOS, token_prices

BERLIN = ZoneInfo("Europe/Berlin")
RULES = Rules(currency="EUR", price=token_prices(1, 4, 0.5))

NOTHING_LOST = Past()


def instant(text: str, zone: ZoneInfo = BERLIN) -> float:
    return dt.datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


class Daemon:
    """Budgets with a clock that is set by hand."""

    def __init__(
        self,
        *,
        now: float = instant("2026-11-20T12:00"),
        past: Past | None = NOTHING_LOST,
        rules: Rules = RULES,
        stored: StoredSums | None = None,
        **budgets: str,
    ) -> None:
        self.now = now
        self.sums = StoredSums() if stored is None else stored.next()
        self.budgets = Budgets(rules, BERLIN, Clock(lambda: self.now, lambda: self.now), self.sums.slot)
        self.budgets.follow(budgets)
        if past is not None:
            self.budgets.learn(past)

    def admit(self, tokens: int, name: str = "ann", picos: int = 0) -> Reservation:
        found = self.budgets.admit(name, Spent(tokens, picos))
        assert isinstance(found, Reservation), found.message
        return found

    def refused(self, name: str = "ann") -> Refusal:
        found = self.budgets.admit(name, Spent(1, 1))
        assert isinstance(found, Refusal)
        return found

    def end(self, reservation: Reservation, tokens: int, name: str = "ann", picos: int = 0) -> None:
        reservation.release()
        self.budgets.spend(entry(name, self.now, tokens, picos))

    def spent(self, name: str = "ann") -> int | str | None:
        return next(state.spent for state in self.budgets.states() if state.key == name)


def entry(name: str, at: float, tokens: int, picos: int = 0) -> EndedRequest:
    return EndedRequest(
        ended_at=at, request_id="r", key=name, prompt_tokens=tokens // 2, output_tokens=tokens - tokens // 2,
        cached_tokens=tokens // 4, picos=picos,
    )  # fmt: skip


def test_a_request_that_could_be_large_is_not_refused_early() -> None:
    daemon = Daemon(ann="1000-tokens/day")
    first = daemon.admit(10**6)  # the only one: it may be as large as it wants
    assert daemon.refused().why is Why.RESERVED
    daemon.end(first, 400)
    second = daemon.admit(500)
    third = daemon.admit(500)  # 900 of 1,000 are spent or reserved
    refusal = daemon.refused()
    assert refusal.why is Why.RESERVED
    assert refusal.wait_s == 5.0
    assert "running requests may spend the rest of its budget, 1000-tokens/day" in refusal.message
    daemon.end(second, 100)
    daemon.end(third, 0)  # it was not served
    assert daemon.spent() == 500
    daemon.end(daemon.admit(499), 499)
    daemon.end(daemon.admit(10**6), 5000)  # one request's worth over
    assert daemon.refused().why is Why.SPENT


def test_what_a_client_is_told_when_it_is_spent() -> None:
    daemon = Daemon(ann="1000-tokens/month", bob="12.50-eur/week")
    daemon.end(daemon.admit(1000), 1003)
    refusal = daemon.refused()
    assert refusal.message == (
        "you exceeded your current quota: the budget of this API key is 1000-tokens/month, 1,003 of 1,000 tokens are "
        "spent; the next period begins at 2026-12-01T00:00:00+01:00"
    )
    assert refusal.wait_s == instant("2026-12-01T00:00") - daemon.now
    daemon.end(daemon.admit(1, "bob", PICOS), 1, "bob", 13 * PICOS)
    refusal = daemon.refused("bob")
    assert "the budget of this API key is 12.50-eur/week, 13.00 of 12.50 EUR are spent" in refusal.message
    assert "2026-11-23T00:00:00+01:00" in refusal.message


@pytest.mark.parametrize(
    ("budget", "now", "ends"),
    [
        ("100-tokens/day", "2026-03-28T12:00", "2026-03-29T00:00:00+01:00"),
        ("100-tokens/day", "2026-03-29T01:59", "2026-03-30T00:00:00+02:00"),  # a day of 23 hours
        ("100-tokens/day", "2026-10-25T12:00", "2026-10-26T00:00:00+01:00"),  # a day of 25 hours
        ("100-tokens/week", "2026-10-25T23:59", "2026-10-26T00:00:00+01:00"),
        ("100-tokens/month", "2026-10-25T12:00", "2026-11-01T00:00:00+01:00"),
        ("100-tokens/month", "2026-12-31T23:59:59", "2027-01-01T00:00:00+01:00"),
    ],
)
def test_a_period_ends_at_midnight_of_the_zone(budget: str, now: str, ends: str) -> None:
    daemon = Daemon(now=instant(now), ann=budget)
    daemon.end(daemon.admit(100), 100)
    assert ends in daemon.refused().message
    daemon.now = dt.datetime.fromisoformat(ends).timestamp() - 0.001
    refusal = daemon.refused()
    assert refusal.why is Why.SPENT
    assert 0 < refusal.wait_s < 0.01
    daemon.now += 0.001
    running = daemon.admit(60)
    assert daemon.spent() == 0
    daemon.end(running, 60)
    assert daemon.spent() == 60


def test_a_request_over_midnight_counts_in_the_period_of_its_end() -> None:
    daemon = Daemon(now=instant("2026-11-20T23:59:59"), ann="100-tokens/day")
    running = daemon.admit(100)
    daemon.now += 2
    assert daemon.refused().why is Why.RESERVED  # it may still spend all of the new day's
    daemon.end(running, 30)
    assert daemon.spent() == 30
    assert daemon.sums.now["key", "ann", "tokens/day"] == (int(instant("2026-11-21T00:00")), 30)


def test_the_first_that_happens_in_a_new_period_is_an_end(caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon(now=instant("2026-11-20T23:59:59"), ann="100-tokens/day")
    first, second = daemon.admit(50), daemon.admit(40)
    daemon.end(first, 50)
    daemon.now += 2
    daemon.end(second, 40)
    assert daemon.sums.now["key", "ann", "tokens/day"] == (int(instant("2026-11-21T00:00")), 40)
    daemon.now += 86400
    caplog.clear()
    daemon.budgets.spend(entry("ann", daemon.now, 100))
    assert "budget spent: 100-tokens/day, 100 of 100 tokens, until 2026-11-23" in caplog.text


def test_it_is_told_once_at_80_percent_and_once_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon(ann="1000-tokens/day")
    for tokens in (799, 1, 50, 149, 1, 1):
        daemon.budgets.spend(entry("ann", daemon.now, tokens))
    told = [record.message for record in caplog.records]
    assert told == [
        "API key ann: 80 % of the budget spent: 1000-tokens/day, 800 of 1,000 tokens, until 2026-11-21T00:00:00+01:00",
        "API key ann: budget spent: 1000-tokens/day, 1,000 of 1,000 tokens, until 2026-11-21T00:00:00+01:00",
    ]
    assert caplog.records[0].__dict__["key"] == "ann"
    again = Daemon(now=daemon.now, stored=daemon.sums, ann="1000-tokens/day")  # a restart tells nothing new
    assert again.spent() == 1001
    again.now += 86400
    again.end(again.admit(0), 1000)
    assert len(caplog.records) == 3


def test_a_budget_is_changed_while_requests_run() -> None:
    daemon = Daemon(ann="1000-tokens/day", bob="5-tokens/day")
    daemon.end(daemon.admit(400), 400, picos=7)
    running = daemon.admit(500, picos=2 * PICOS)
    daemon.budgets.follow({"ann": "500-tokens/month"})
    assert daemon.spent() == 400
    assert daemon.refused().why is Why.RESERVED
    daemon.budgets.follow({"ann": "1-eur/day"})
    assert daemon.spent() == "0.000000000007"
    assert daemon.refused().why is Why.RESERVED  # 2 EUR
    running.release()
    daemon.budgets.follow({})
    daemon.budgets.spend(entry("ann", daemon.now, 50))  # without a budget it is counted, too
    daemon.budgets.follow({"ann": "1G-tokens/week"})
    assert daemon.spent() == 450


def test_a_key_that_gets_a_budget_later_has_spent_what_the_ledger_says() -> None:
    yesterday = instant("2026-11-19T23:00")
    daemon = Daemon(past=Past([("ann", yesterday, 900, 5), ("bob", yesterday, 1, 1)]))
    daemon.budgets.follow({"ann": "1000-tokens/month"})
    assert daemon.spent() == 900
    daemon.budgets.follow({"ann": "1000-tokens/day"})
    assert daemon.spent() == 0


def test_what_a_killed_daemon_served_counts_though_the_ledger_lacks_it() -> None:
    first = Daemon(ann="1000-tokens/month")
    first.end(first.admit(300), 300)
    first.end(first.admit(300), 300)
    second = Daemon(
        now=first.now + 1, stored=first.sums, past=Past([("ann", first.now, 300, 0)]), ann="1000-tokens/month"
    )
    assert second.spent() == 600
    second.end(second.admit(100), 100)
    assert second.spent() == 700
    third = Daemon(
        now=second.now, stored=second.sums, past=Past([("ann", first.now, 750, 0)]), ann="1000-tokens/month"
    )
    assert third.spent() == 750  # the ledger says more


class TestWithoutALedger:
    LOST = Past(lost_at=instant("2026-11-20T11:00"), why="cannot read the usage ledger '/x': malformed")

    def test_before_it_was_read_nothing_is_known(self) -> None:
        daemon = Daemon(past=None, ann="1000-tokens/day")
        assert daemon.refused().why is Why.UNKNOWN
        daemon.budgets.learn(Past())
        daemon.admit(1)

    def test_requests_are_refused(self, caplog: pytest.LogCaptureFixture) -> None:
        daemon = Daemon(past=self.LOST, ann="1000-tokens/day")
        refusal = daemon.refused()
        assert refusal.why is Why.UNKNOWN
        assert "does not know what this API key has spent" in refusal.message
        [state] = daemon.budgets.states()
        assert (state.spent, state.left, state.limit) == (None, None, 1000)
        assert daemon.budgets.ratios() == {}
        assert "malformed; requests are refused: ann; stop the daemon, restore a backup" in caplog.text
        daemon.budgets.spend(entry("ann", daemon.now, 5))
        assert not daemon.sums.now  # the next daemon must not take a part for the whole
        daemon.now = instant("2026-11-21T00:00")
        daemon.admit(1)
        assert daemon.spent() == 0

    def test_or_allowed(self, caplog: pytest.LogCaptureFixture) -> None:
        daemon = Daemon(past=self.LOST, rules=RULES._replace(allow_unknown=True), ann="1000-tokens/day")
        daemon.end(daemon.admit(1000), 1000)
        assert daemon.refused().why is Why.SPENT  # of what is known
        assert "requests are allowed: ann" in caplog.text

    def test_the_file_of_sums_knows_it(self) -> None:
        first = Daemon(ann="1000-tokens/day")
        first.end(first.admit(1), 400)
        daemon = Daemon(past=self.LOST, stored=first.sums, ann="1000-tokens/day", bob="1-tokens/day")
        assert daemon.spent() == 400
        assert daemon.refused("bob").why is Why.UNKNOWN

    def test_a_loss_before_the_period_does_not_matter(self) -> None:
        daemon = Daemon(
            past=Past(lost_at=instant("2026-11-19T23:59")), ann="1000-tokens/day", bob="1-tokens/week"
        )
        daemon.admit(1)
        assert daemon.refused("bob").why is Why.UNKNOWN

    def test_no_key_has_a_budget(self, caplog: pytest.LogCaptureFixture) -> None:
        Daemon(past=self.LOST)
        assert not caplog.records


def test_states_are_for_programs() -> None:
    daemon = Daemon(ann="20k-tokens/month", bob="50-eur/week")
    daemon.admit(300)
    daemon.end(daemon.admit(5, "bob", PICOS), 5, "bob", 3 * PICOS // 2)
    ann, bob = daemon.budgets.states()
    assert (ann.key, ann.unit, ann.limit, ann.spent, ann.reserved, ann.left) == (
        "ann",
        "tokens",
        20000,
        0,
        300,
        20000,
    )
    assert (bob.unit, bob.limit, bob.spent, bob.reserved, bob.left) == ("EUR", "50", "1.5", "0", "48.5")
    assert (ann.begins, ann.ends) == ("2026-11-01T00:00:00+01:00", "2026-12-01T00:00:00+01:00")
    assert daemon.budgets.ratios() == {"ann": 0.0, "bob": 0.03}


@pytest.mark.parametrize(
    ("text", "rules", "error", "remedy"),
    [
        ("much", RULES, "'much' is no budget such as", "NUMBER-UNIT/PERIOD"),
        (
            "1-tokens/day",
            RULES._replace(enabled=False),
            "no usage ledger is kept",
            "set enabled = true and path",
        ),
        ("1-usd/day", RULES, "cannot hold budget '1-usd/day': amounts are in EUR", "write the budget in eur"),
        (
            "1-eur/day",
            RULES._replace(price=None),
            "has no price",
            "[cost.price]; 0 where only overflow counts",
        ),
    ],
)
def test_budgets_that_cannot_be_held(text: str, rules: Rules, error: str, remedy: str) -> None:
    with pytest.raises(LauncherError) as caught:
        rules.check(text)
    assert error in caught.value.message
    assert remedy in caught.value.remedy


@given(limit=st.integers(1, 10**15), spent=st.integers(0, 10**15))
def test_shares_are_exact(limit: int, spent: int) -> None:
    daemon = Daemon(ann=f"{limit}-tokens/day")
    daemon.budgets.spend(entry("ann", daemon.now, spent))
    told = daemon.budgets._accounts["ann"].tell_at
    assert (told == inf) == (spent >= limit)
    assert (told == limit) == (spent < limit and 5 * spent >= 4 * limit) or limit < 5
    assert spent < told


LIMIT, MOST = 1000, 300


class AnyOrder(RuleBasedStateMachine):
    """Requests begin and end in any order, time passes over midnights, the daemon is killed and started again with a
    ledger that lacks its last entries. The sums of each day that clients got are counted beside."""

    running = Bundle("running")

    @initialize()
    def start(self) -> None:
        self.served: dict[dt.date, int] = {}
        self.entries: list[tuple[str, float, int, int]] = []
        self.reserved = 0
        self.alive = 0
        self.daemon = Daemon(ann=f"{LIMIT}-tokens/day")

    @rule(target=running, most=st.integers(0, MOST))
    def begin(self, most: int) -> tuple[int, Reservation | None, int]:
        found = self.daemon.budgets.admit("ann", Spent(most, 0))
        spent = self.served.get(self.today, 0)
        assert isinstance(found, Reservation) == (spent + self.reserved < LIMIT)
        if isinstance(found, Refusal):
            return self.alive, None, 0
        self.reserved += most
        return self.alive, found, most

    @rule(request=consumes(running), share=st.floats(0, 1), again=st.booleans())
    def end(self, request: tuple[int, Reservation | None, int], share: float, again: bool) -> None:
        alive, reservation, most = request
        if reservation is None or alive != self.alive:
            return
        tokens = int(most * share)
        self.reserved -= most
        if again:
            reservation.release()  # a fault may end a request twice
        self.daemon.end(reservation, tokens)
        self.entries.append(("ann", self.daemon.now, tokens, 0))
        self.served[self.today] = self.served.get(self.today, 0) + tokens

    @rule(seconds=st.sampled_from([0.5, 3600.0, 40000.0]))
    def wait(self, seconds: float) -> None:
        self.daemon.now += seconds

    @rule(lacking=st.integers(0, 5))
    def kill(self, lacking: int) -> None:
        before = self.daemon
        entered = self.entries[: max(0, len(self.entries) - lacking)]
        lacked = self.entries[len(entered) :]
        # Only what ended in the last second may lack.
        entered += [row for row in lacked if row[1] < before.now - 1]
        self.daemon = Daemon(
            now=before.now, past=Past(entered), stored=before.sums, ann=f"{LIMIT}-tokens/day"
        )
        self.alive += 1
        self.reserved = 0

    @property
    def today(self) -> dt.date:
        return dt.datetime.fromtimestamp(self.daemon.now, BERLIN).date()

    @invariant()
    def never_more_than_one_request_over(self) -> None:
        assert all(tokens < LIMIT + MOST for tokens in self.served.values())

    @invariant()
    def the_sums_are_right(self) -> None:
        account = self.daemon.budgets._accounts["ann"]
        assert account.reserved == (self.reserved, 0)
        assert self.daemon.spent() == self.served.get(self.today, 0)


TestAnyOrder = AnyOrder.TestCase


def state_of(daemon: Daemon, name: str = "ann") -> BudgetState:
    return next(state for state in daemon.budgets.states() if state.key == name)


def tell(daemon: Daemon, amount: int | str, name: str = "ann", **other: str) -> dict[str, int | list[str]]:
    """A fleet reports what other hosts' daemons said, as fleet/hosts.py does."""
    state = state_of(daemon, name)
    said = {"key": name, "budget": state.budget, "begins": state.begins, "amount": amount, **other}
    return daemon.budgets.told(json.dumps({"spent": [said]}).encode())


def test_what_was_spent_on_other_hosts_counts() -> None:
    daemon = Daemon(ann="100-tokens/day", bob="5-eur/day")
    daemon.end(daemon.admit(30), 30)
    assert state_of(daemon).elsewhere_age_s is None
    assert tell(daemon, 69) == {"taken": 1, "ignored": []}
    daemon.now += 2
    state = state_of(daemon)
    assert (state.spent, state.spent_here, state.spent_elsewhere, state.left, state.elsewhere_age_s) == (
        99, 30, 69, 1, 2.0,
    )  # fmt: skip
    assert daemon.budgets.ratios()["ann"] == 0.99
    daemon.admit(1).release()
    tell(daemon, 70)
    assert daemon.refused().why is Why.SPENT
    assert "100 of 100 tokens are spent" in daemon.refused().message
    tell(daemon, 40)  # by a director that did not hear a host that is lost
    assert daemon.refused().why is Why.SPENT
    assert state_of(daemon).spent_elsewhere == 70
    tell(daemon, "5.00", "bob")
    assert daemon.refused("bob").why is Why.SPENT
    assert state_of(daemon, "bob").spent_elsewhere == "5"
    assert daemon.sums.now["key", "ann", "tokens/day"][1] == 30  # of this host alone


def test_what_was_spent_elsewhere_ends_with_the_period() -> None:
    daemon = Daemon(ann="100-tokens/day")
    tell(daemon, 100)
    begins = state_of(daemon).begins
    daemon.now += 86_400
    daemon.admit(1).release()
    assert state_of(daemon).spent_elsewhere == 0
    assert tell(daemon, 100, begins=begins)["taken"] == 0  # of a host that still has the day before
    daemon.admit(1).release()


def test_what_was_spent_elsewhere_outlives_a_changed_amount_and_no_other_change() -> None:
    daemon = Daemon(ann="100-tokens/day")
    tell(daemon, 60)
    daemon.budgets.follow({"ann": "50-tokens/day"})
    assert daemon.refused().why is Why.SPENT
    daemon.budgets.follow({"ann": "5-eur/day"})
    assert state_of(daemon).spent_elsewhere == "0"


def test_a_fleet_that_falls_silent_is_told() -> None:
    daemon = Daemon(ann="100-tokens/day")
    assert daemon.budgets.warnings() == ()  # no fleet
    tell(daemon, 60)
    daemon.now += 60
    assert daemon.budgets.warnings() == ()
    daemon.now += 15
    (warning,) = daemon.budgets.warnings()
    assert "no report for 75 s of what API keys spent on other hosts" in warning
    assert state_of(daemon).spent == 60
    daemon.budgets.told(b'{"spent": []}')  # nobody spent anything since the daemons began
    assert daemon.budgets.warnings() == ()


def test_spending_elsewhere_is_logged_as_spending_here_is(caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon(ann="100-tokens/day")
    for amount in (79, 80, 90, 100, 100):
        tell(daemon, amount)
    assert [record.getMessage().partition(": 100-tokens")[0] for record in caplog.records] == [
        "API key ann: 80 % of the budget spent", "API key ann: budget spent",
    ]  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), max_size=60), st.integers(1, 10))
def test_hosts_spend_at_most_one_interval_more_than_the_budget(
    requests: list[tuple[int, int]], interval: int
) -> None:
    """Each host takes requests of its own; a report after every `interval` of them."""
    hosts = [Daemon(ann="100-tokens/day") for _ in range(3)]
    here, before, limit = [0, 0, 0], 0, 100
    for count, (at, tokens) in enumerate(requests):
        if count % interval == 0:
            for mine, host in enumerate(hosts):
                tell(host, sum(here) - here[mine])
            before = sum(here)
        found = hosts[at].budgets.admit("ann", Spent(tokens, 0))
        if isinstance(found, Reservation):
            assert before < limit  # nothing is admitted once all hosts know that it is spent
            hosts[at].end(found, tokens)
            here[at] += tokens
        else:
            assert sum(here) >= limit  # and nothing is refused before


class TestALedgerThatIsReadLater:
    GONE = Past(lost_at=instant("2026-11-20T11:00"), why="permission denied", unreadable=True)
    ROWS = (("ann", instant("2026-11-20T00:00"), 300, 0), ("ann", instant("2026-11-02T00:00"), 50, 0))

    def test_what_was_spent_before_and_since_counts(self, caplog: pytest.LogCaptureFixture) -> None:
        daemon = Daemon(past=self.GONE, ann="1000-tokens/day")
        assert "permission denied; requests are refused: ann; make the usage ledger readable" in caplog.text
        daemon.budgets.spend(entry("ann", daemon.now, 20))
        assert daemon.refused().why is Why.UNKNOWN
        daemon.budgets.learn(Past(self.ROWS))
        assert daemon.spent() == 320
        assert daemon.sums.now["key", "ann", "tokens/day"][1] == 320
        daemon.end(daemon.admit(1), 5)
        assert daemon.spent() == 325
        daemon.budgets.follow({"ann": "1000-tokens/month"})
        assert daemon.spent() == 375

    def test_the_file_of_sums_counts_once(self) -> None:
        first = Daemon(ann="1000-tokens/day")
        first.end(first.admit(1), 320)
        daemon = Daemon(past=self.GONE, stored=first.sums, ann="1000-tokens/day")
        daemon.end(daemon.admit(1), 7)
        assert daemon.spent() == 327
        daemon.budgets.learn(Past(self.ROWS))  # the ledger lacks 20 of them
        assert daemon.spent() == 327

    def test_one_that_was_broken_stays_unknown(self, caplog: pytest.LogCaptureFixture) -> None:
        daemon = Daemon(past=self.GONE, ann="1000-tokens/day", bob="1000-tokens/week")
        daemon.budgets.learn(Past(lost_at=instant("2026-11-19T12:00")))
        assert daemon.spent("ann") == 0  # of a day before it broke
        assert daemon.refused("bob").why is Why.UNKNOWN
        assert "moved aside; requests are refused: bob; stop the daemon, restore a backup" in caplog.text
