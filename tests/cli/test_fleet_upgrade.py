"""The rolling upgrade over real control sockets: in which order, where it stops, and how it continues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.fake_operations import VERIFIED, Backstage, FakeOperations, slot_status
from support.local_hosts import LocalHosts

from launcher.base.errors import LauncherError, TimedOutError
from launcher.cli.fleet_upgrade import RELOAD, Figures, Settings, accept, upgrade, worse
from launcher.control.client import UnreachableError
from launcher.daemon.status import Status
from launcher.instances.verify import Difference

NAMES = ("h1", "h2", "h3")
GOOD = Figures(version="1", ready=4, slots=4, level=0, misplaced=())


class Daemon(FakeOperations):
    """One whose requests end after some looks, and whose placement can be wrong."""

    misplaced: bool = False
    in_flight: int = 0
    """Looks at which requests run."""

    def status(self) -> Status:
        self.in_flight = max(0, self.in_flight - 1)
        return replace(super().status(), requests={"in_flight": self.in_flight})

    async def verify(self, slot: int) -> None:
        wrong = replace(VERIFIED, differences=(Difference("threads", "0-3", "4-7"),))
        self.slots[slot] = replace(self.slots[slot], verified=wrong if self.misplaced else VERIFIED)


class Fleet:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.daemons = {name: Daemon() for name in NAMES}
        self.sockets = {name: str(folder / f"{name}.sock") for name in NAMES}
        for name in NAMES:
            stack.enter_context(Backstage(self.sockets[name], self.daemons[name]))
        self.hosts = LocalHosts(self.sockets, folder)
        self.said: list[str] = []
        self.waits = 0
        self.settings = Settings(how=("true",), file=folder / "state" / "upgrade.json", wait=self.wait)

    def wait(self, _seconds: float) -> None:
        self.waits += 1

    def upgrade(self, names: tuple[str, ...] = NAMES) -> tuple[str, ...]:
        return upgrade(self.hosts, names, self.settings, self.said.append)


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tmp_path_factory.mktemp("f"), stack)


def test_one_host_after_the_other(fleet: Fleet) -> None:
    assert fleet.upgrade() == ()
    assert fleet.hosts.held == [(name, draining) for name in NAMES for draining in (True, False)]
    assert fleet.hosts.ran == [(name, ("true",)) for name in NAMES]
    assert fleet.said[2] == "h1: 2 of 2 ready, version 0; serves again"
    assert not fleet.settings.file.exists()


def test_it_waits_for_running_requests_before_the_command(fleet: Fleet) -> None:
    fleet.daemons["h1"].in_flight = 40
    fleet.upgrade(("h1",))
    assert fleet.waits > 40


def test_requests_that_do_not_end_change_nothing(fleet: Fleet) -> None:
    fleet.daemons["h1"].in_flight = 10**9
    with pytest.raises(TimedOutError) as caught:
        fleet.upgrade()
    assert "cannot upgrade h1: its running requests took longer than 300 s" in caught.value.message
    assert caught.value.remedy.startswith("it serves again, and nothing was changed; ")
    assert fleet.hosts.held == [("h1", True), ("h1", False)]
    assert not fleet.hosts.ran


def test_a_host_that_cannot_be_measured_serves_again(fleet: Fleet) -> None:
    def fails(host: str) -> tuple[float, float]:
        raise LauncherError(f"cannot measure {host}: status 401", "give --key-file")

    fleet.settings = Settings(how=("true",), file=fleet.settings.file, wait=fleet.wait, bench=fails)
    with pytest.raises(LauncherError, match="cannot upgrade h1: cannot measure h1: status 401"):
        fleet.upgrade()
    assert fleet.hosts.held == [("h1", True), ("h1", False)]
    assert not fleet.hosts.ran


def test_it_stops_at_the_first_host_that_gets_worse_and_continues_there(fleet: Fleet) -> None:
    """The figures of before the first try are what the second is compared with."""
    broken = fleet.daemons["h2"]
    fleet.settings = Settings(how=("true",), file=fleet.settings.file, wait=fleet.wait)
    run = fleet.hosts.run
    slots = dict(broken.slots)

    def breaking(host: str, words: tuple[str, ...], timeout_s: float) -> tuple[int, str]:
        if host == "h2":
            broken.slots[1] = slot_status(1, state="failed")
        return run(host, words, timeout_s)

    fleet.hosts.run = breaking  # type: ignore[method-assign, assignment]
    with pytest.raises(LauncherError) as caught:
        fleet.upgrade()
    assert (
        caught.value.message
        == "cannot upgrade h2: it got worse: 1 of 2 instances are ready, before it were 2"
    )
    assert "it gets no new requests" in caught.value.remedy
    assert "--accept h2" in caught.value.remedy
    with pytest.raises(LauncherError, match="it got worse"):  # still broken: not taken for its usual state
        fleet.upgrade()
    fleet.hosts.run = run  # type: ignore[method-assign]
    broken.slots = slots
    fleet.upgrade()
    assert [host for host, _ in fleet.hosts.ran] == ["h1", "h2", "h2", "h2", "h3"]
    assert {member.state.value for member in fleet.hosts.members()} == {"ready"}


def test_it_waits_for_instances_that_have_not_begun_to_start(fleet: Fleet) -> None:
    """A command may return before the daemon starts them."""
    h1, ready = fleet.daemons["h1"], dict(fleet.daemons["h1"].slots)
    run = fleet.hosts.run

    def restarting(host: str, words: tuple[str, ...], timeout_s: float) -> tuple[int, str]:
        h1.slots |= {slot: slot_status(slot, state="stopped", generation=0) for slot in ready}
        fleet.waits = 0
        return run(host, words, timeout_s)

    def wait(_seconds: float) -> None:
        fleet.waits += 1
        if fleet.waits == 5:
            h1.slots |= ready

    fleet.hosts.run = restarting  # type: ignore[method-assign, assignment]
    fleet.settings = Settings(how=("true",), file=fleet.settings.file, wait=wait)
    fleet.upgrade(("h1",))
    assert fleet.waits == 5
    assert fleet.said[-1] == "h1: 2 of 2 ready, version 0; serves again"


def test_threads_that_are_no_longer_in_place_stop_it(fleet: Fleet) -> None:
    run = fleet.hosts.run

    def breaking(host: str, words: tuple[str, ...], timeout_s: float) -> tuple[int, str]:
        fleet.daemons[host].misplaced = True
        return run(host, words, timeout_s)

    fleet.hosts.run = breaking  # type: ignore[method-assign, assignment]
    with pytest.raises(LauncherError, match="not placed as planned: slot 0, 1"):
        fleet.upgrade()


def test_a_host_can_be_accepted_as_it_is(fleet: Fleet) -> None:
    fleet.settings = Settings(
        how=("sh", "-c", 'test "$HOST" != h2'), file=fleet.settings.file, wait=fleet.wait
    )
    with pytest.raises(LauncherError, match=r"cannot upgrade h2: the command ended with exit code 1"):
        fleet.upgrade()
    accept(fleet.hosts, "h2", fleet.settings)
    fleet.upgrade()
    assert [host for host, _ in fleet.hosts.ran] == ["h1", "h2", "h3"]
    assert fleet.hosts.held[-3:] == [("h2", False), ("h3", True), ("h3", False)]


def test_a_reload_that_is_rolled_back_stops_it(fleet: Fleet) -> None:
    fleet.settings = Settings(how=RELOAD, file=fleet.settings.file, wait=fleet.wait)
    done = {"stage": "done", "changes": {}}
    fleet.daemons["h1"].rollouts = [{"stage": "running"}, {"stage": "running"}, done]
    bad = {"stage": "rolled back", "error": "slot 1 did not become ready", "remedy": "see why 1"}
    fleet.daemons["h2"].rollouts = [bad]
    with pytest.raises(
        LauncherError, match="cannot upgrade h2: reload rolled back: slot 1 did not become ready"
    ):
        fleet.upgrade()
    assert fleet.daemons["h1"].reloads
    assert not fleet.daemons["h3"].reloads
    assert not fleet.hosts.ran


def test_an_interrupt_leaves_the_host_and_says_so(fleet: Fleet) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    fleet.settings = Settings(how=("true",), file=fleet.settings.file, wait=interrupt)
    with pytest.raises(KeyboardInterrupt):
        fleet.upgrade()
    assert fleet.said[-1] == (
        "h1: interrupted: it gets no new requests, and nothing was changed; a second start continues with it"
    )
    assert fleet.hosts.held == [("h1", True)]
    fleet.settings = Settings(how=("true",), file=fleet.settings.file, wait=fleet.wait)
    fleet.upgrade()
    assert [host for host, _ in fleet.hosts.ran] == [*NAMES]


def test_a_host_that_does_not_answer_waits_for_a_later_start(fleet: Fleet) -> None:
    fleet.hosts.away = {"h2"}
    assert fleet.upgrade() == ("h2",)
    fleet.hosts.away = set()
    assert fleet.upgrade() == ()
    assert [host for host, _ in fleet.hosts.ran] == ["h1", "h3", "h2"]


def test_another_upgrade_does_not_continue_an_unfinished_one(fleet: Fleet) -> None:
    fleet.hosts.away = {"h2"}
    fleet.upgrade()
    fleet.settings = Settings(how=RELOAD, file=fleet.settings.file, wait=fleet.wait)
    with pytest.raises(LauncherError, match="one by 'true' is unfinished"):
        fleet.upgrade()


def test_a_daemon_that_is_gone_for_the_whole_time_stops_it(fleet: Fleet) -> None:
    ask = fleet.hosts.ask

    def silent(host: str, *rest: object, **more: object) -> object:
        if fleet.hosts.ran:
            raise UnreachableError("cannot reach it", "start it")
        return ask(host, *rest, **more)  # type: ignore[arg-type]

    fleet.hosts.ask = silent  # type: ignore[method-assign]
    with pytest.raises(LauncherError, match="cannot upgrade h1: its instances took longer than 3600 s"):
        fleet.upgrade()


@pytest.mark.parametrize(
    ("after", "found"),
    [
        (GOOD, []),
        ({"ready": 3, "level": 1}, ["3 of 4 instances are ready, before it were 4"]),
        ({"ready": 2, "slots": 2}, []),  # the configuration wants fewer
        ({"level": 1}, ["instances are not watched that were before"]),
        ({"misplaced": (1, 3)}, ["not placed as planned: slot 1, 3"]),
        ({"ttft_s": 0.2}, []),  # not measured before
    ],
)
def test_what_is_worse(after: object, found: list[str]) -> None:
    assert worse(GOOD, after if isinstance(after, Figures) else replace(GOOD, **after)) == found  # type: ignore[arg-type]


def test_slower_is_worse_beyond_noise() -> None:
    def measured(ttft_s: float, tpot_s: float) -> Figures:
        return Figures(version="1", ready=1, slots=1, level=0, misplaced=(), ttft_s=ttft_s, tpot_s=tpot_s)

    assert worse(measured(0.1, 0.02), measured(0.14, 0.024)) == []
    assert worse(measured(0.002, 0.0002), measured(0.004, 0.0004)) == []
    assert worse(measured(0.1, 0.02), measured(0.16, 0.02)) == [
        "first token takes 160 ms, before it were 100 ms"
    ]
    assert worse(measured(0.1, 0.02), measured(0.1, 0.03)) == [
        "time per token takes 30 ms, before it were 20 ms"
    ]
