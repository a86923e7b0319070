"""What the director makes of the agents' reports, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
from support.hand_clock import STEPS_S

from launcher.base.errors import LauncherError, NotFoundError, RefusedError
from launcher.fleet.director import LOST_S, Director, next_list
from launcher.fleet.members import MOST_DECISIONS, Decision, Member, MemberList, MemberState, Node, Report

READY, DRAINING, LOST = MemberState.READY, MemberState.DRAINING, MemberState.LOST


def member(host: str, state: MemberState = READY) -> Member:
    return Member(host=host, address=f"{host}:1", state=state)


def listed(*members: Member, epoch: int = 5, version: int = 1) -> MemberList:
    return MemberList(epoch=epoch, version=version, members=members)


def report(host: str, *, kept: MemberList | None = None, address: str | None = None) -> Report:
    return Report(node="n", address=f"{host}:1" if address is None else address, kept=kept)


def states(members: MemberList) -> dict[str, MemberState]:
    return {each.host: each.state for each in members.members}


def test_hosts_with_a_daemon_are_members_by_name() -> None:
    found = next_list(
        MemberList(epoch=5), {"b": report("b"), "a": report("a"), "c": report("c", address="")}, set()
    )
    assert found == listed(member("a"), member("b"))


def test_a_turn_that_finds_the_same_makes_no_new_version() -> None:
    mine = listed(member("a"))
    assert next_list(mine, {"a": report("a")}, set()) is mine


@pytest.mark.parametrize(
    ("before", "silent", "after"),
    [
        (READY, True, LOST),
        (LOST, True, LOST),
        # An upgrade may restart the host: it must not get requests because its agent is away.
        (DRAINING, True, DRAINING),
        (LOST, False, READY),
        (DRAINING, False, DRAINING),
    ],
)
def test_states(before: MemberState, silent: bool, after: MemberState) -> None:
    reports = {} if silent else {"a": report("a")}
    assert states(next_list(listed(member("a", before)), reports, {"a"} if silent else set())) == {"a": after}


def test_a_host_keeps_its_address_while_its_daemon_is_away() -> None:
    """The ingress sees for itself when the daemon answers again."""
    assert next_list(listed(member("a")), {"a": report("a", address="")}, set()) == listed(member("a"))


def test_a_new_address_is_a_new_version_and_a_new_node_is_none() -> None:
    found = next_list(listed(member("a")), {"a": Report(node="n2", address="other:1")}, set())
    assert found == listed(Member(host="a", address="other:1"), version=2)
    assert next_list(found, {"a": Report(node="n3", address="other:1")}, set()) is found


def test_a_new_director_takes_the_hosts_of_an_ingress_hosts_file() -> None:
    """At its start it has heard of few hosts: those of the file must not lose their requests."""
    kept = listed(member("a"), member("b"), member("c", DRAINING), epoch=3, version=9)
    found = next_list(MemberList(epoch=5), {"a": report("a", kept=kept)}, set())
    assert states(found) == {"a": READY, "b": READY, "c": DRAINING}
    assert found.newer_than(kept)


def test_a_newer_list_of_another_director_is_overtaken_with_its_content() -> None:
    """After a partition, or with a clock that went back: what the other side changed counts."""
    kept = listed(member("a", DRAINING), member("b"), epoch=8, version=2)
    found = next_list(listed(member("a"), member("d")), {"a": report("a", kept=kept)}, set())
    assert states(found) == {"a": DRAINING, "b": READY, "d": READY}
    assert found.epoch == 9


def test_a_director_that_is_restarted_within_a_second_has_a_newer_list() -> None:
    kept = listed(member("a"), member("b"), version=3)
    found = next_list(MemberList(epoch=5), {"a": report("a", kept=kept)}, set())
    assert states(found) == {"a": READY, "b": READY}
    assert found.newer_than(kept)


def test_a_forgotten_host_does_not_come_back_from_the_same_directors_old_list() -> None:
    kept = listed(member("a"), member("b"))
    assert states(next_list(listed(member("a"), version=2), {"a": report("a", kept=kept)}, set())) == {
        "a": READY
    }


@pytest.mark.parametrize("old_epoch", [4, 5, 9])
def test_a_forgotten_host_does_not_come_back_with_another_directors_list(old_epoch: int) -> None:
    """One that was cut off meanwhile: its list has the host, and its clock may be ahead."""
    cluster, clock = FakeCluster("a", "b"), Clock()
    director = started(cluster, clock)
    del cluster.hosts["b"]
    director.turn()
    director.forget("b")
    mine = cluster.files["a"]
    old = MemberList(epoch=int(clock.now) - 5 + old_epoch, version=7, members=(member("a"), member("b")))
    for merged in (
        next_list(old, {"a": report("a", kept=mine)}, set()),
        next_list(mine, {"a": report("a", kept=old)}, set()),
        next_list(MemberList(epoch=3000), {"a": report("a", kept=mine), "c": report("c", kept=old)}, set()),
    ):
        assert "b" not in states(merged)
        # Nor later, whoever has which list by then.
        assert "b" not in states(next_list(old, {"a": report("a", kept=merged)}, set()))
        assert "b" not in states(next_list(merged, {"a": report("a", kept=old)}, set()))


def test_a_forgotten_host_that_comes_back_itself_waits_for_fleet_up() -> None:
    """With its own old director, too: its agent answers there. The address may be another machine's by now."""
    cluster, clock = FakeCluster("a", "b"), Clock()
    cut_off, director = started(cluster, clock), started(cluster, clock)
    del cluster.hosts["b"]
    director.turn()
    director.forget("b")
    cluster.hosts["b"] = True
    for _ in range(2):
        cut_off.turn()
        director.turn()
        clock.now += 1
        assert states(cluster.files["a"]) == {"a": READY}
    director = started(cluster, clock)
    assert states(director.view().members) == {"a": READY}
    assert director.view().members.has_forgotten("b")
    director.admit(["a", "b"])
    for _ in range(2):
        assert states(cluster.files["a"]) == {"a": READY, "b": READY}
        cut_off.turn()
        director.turn()
    # And once more.
    del cluster.hosts["b"]
    director.turn()
    director.forget("b")
    cut_off.turn()
    assert states(cluster.files["a"]) == {"a": READY}


def test_what_was_forgotten_is_bounded() -> None:
    cluster, clock = FakeCluster("a"), Clock()
    director = started(cluster, clock)
    many = tuple(
        Decision(host=f"h{number}", forgotten=True, epoch=1, version=number)
        for number in range(MOST_DECISIONS + 5)
    )
    cluster.files["a"] = MemberList(epoch=1, decisions=many)
    director.turn()
    members = director.view().members
    assert len(members.decisions) == MOST_DECISIONS
    assert (members.has_forgotten("h0"), members.has_forgotten("h20")) == (False, True)


class FakeCluster:
    """Nodes, their agents and the files of ingress hosts."""

    def __init__(self, *hosts: str, ingress: Iterable[str] = ("a",)) -> None:
        self.hosts = dict.fromkeys(hosts, True)
        self.files = {host: MemberList() for host in ingress}
        self.unwritable: set[str] = set()
        self.namesakes: dict[str, tuple[str, ...]] = {}
        self.written = 0

    def nodes(self) -> Sequence[Node]:
        return [
            Node(
                id="n",
                host=host,
                address=host,
                names=frozenset({host}),
                namesakes=self.namesakes.get(host, ()),
            )
            for host in self.hosts
        ]

    def report(self, node: Node) -> Report:
        return report(node.host, kept=self.files.get(node.host)) if self.hosts[node.host] else Report()

    def keep(self, host: str, members: MemberList) -> None:
        if host in self.unwritable:
            raise LauncherError("disk full", "free space")
        self.written += 1
        if members.newer_than(self.files[host]):
            self.files[host] = members


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def started(cluster: FakeCluster, clock: Clock, elapsed: Callable[[], float] | None = None) -> Director:
    director = Director(cluster, "spec", clock, elapsed or clock)
    director.turn()
    return director


def test_the_ingress_hosts_get_each_version_once() -> None:
    cluster, clock = FakeCluster("a", "b", ingress=("a", "b")), Clock()
    director = started(cluster, clock)
    director.turn()
    assert cluster.written == 2
    assert cluster.files["a"] == cluster.files["b"] == director.view().members


def test_an_ingress_host_that_could_not_write_gets_the_list_later() -> None:
    cluster, clock = FakeCluster("a", "b"), Clock()
    cluster.unwritable = {"a"}
    director = started(cluster, clock)
    assert cluster.files["a"] == MemberList()
    cluster.unwritable = set()
    director.turn()
    assert cluster.files["a"] == director.view().members


def test_an_agent_is_lost_after_a_while_and_comes_back_by_itself() -> None:
    cluster, clock = FakeCluster("a", "b"), Clock()
    director = started(cluster, clock)
    cluster.hosts["b"] = False
    clock.now += LOST_S
    director.turn()
    assert states(cluster.files["a"])["b"] is READY
    clock.now += 1
    director.turn()
    assert states(cluster.files["a"])["b"] is LOST
    cluster.hosts["b"] = True
    director.turn()
    assert states(cluster.files["a"])["b"] is READY


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_set_clock_loses_nobody_and_keeps_nobody(step_s: float) -> None:
    cluster, clock, elapsed = FakeCluster("a", "b"), Clock(), Clock()
    director = started(cluster, clock, elapsed)
    clock.now += step_s
    cluster.hosts["b"] = False
    director.turn()
    assert states(cluster.files["a"])["b"] is READY
    elapsed.now += LOST_S + 1
    director.turn()
    assert states(cluster.files["a"])["b"] is LOST


def test_a_restarted_director_waits_as_long_for_hosts_that_it_only_read_of() -> None:
    cluster, clock = FakeCluster("a", "b"), Clock()
    started(cluster, clock)
    del cluster.hosts["b"]
    clock.now += 100
    director = started(cluster, clock)
    assert states(director.view().members)["b"] is READY
    clock.now += LOST_S + 1
    director.turn()
    assert states(cluster.files["a"])["b"] is LOST


def test_hold_is_in_the_file_when_it_returns_and_survives_the_director() -> None:
    cluster, clock = FakeCluster("a", "b"), Clock()
    director = started(cluster, clock)
    director.hold("b", True)
    assert states(cluster.files["a"])["b"] is DRAINING
    clock.now += 1
    director = started(cluster, clock)
    assert states(director.view().members)["b"] is DRAINING
    director.hold("b", False)
    assert states(cluster.files["a"])["b"] is READY


def test_hold_says_when_an_ingress_host_has_not_written_it() -> None:
    cluster, clock = FakeCluster("a", "b"), Clock()
    director = started(cluster, clock)
    cluster.unwritable = {"a"}
    with pytest.raises(LauncherError, match="cannot tell ingress host a of b: disk full"):
        director.hold("b", True)


def test_hold_and_forget_want_a_host_of_the_fleet() -> None:
    director = started(FakeCluster("a"), Clock())
    with pytest.raises(NotFoundError, match="'x'"):
        director.hold("x", True)
    with pytest.raises(NotFoundError, match="'x'"):
        director.forget("x")


def test_forget_is_for_hosts_that_are_gone() -> None:
    cluster, clock = FakeCluster("a", "b"), Clock()
    director = started(cluster, clock)
    with pytest.raises(RefusedError, match="its agent answers"):
        director.forget("b")
    del cluster.hosts["b"]
    director.turn()
    director.forget("b")
    director.turn()
    assert states(cluster.files["a"]) == {"a": READY}


def test_hosts_with_one_name_are_a_reported_problem() -> None:
    cluster, clock = FakeCluster("a", "b"), Clock()
    cluster.namesakes["b"] = ("10.0.0.8",)
    director = started(cluster, clock)
    assert states(director.view().members) == {"a": READY, "b": READY}
    reports = director.view().reports
    assert (reports["a"].problem, reports["b"].address) == ("", "b:1")
    assert reports["b"].problem == "several hosts have this name: b is used, 10.0.0.8 not"
    assert "NODE_NAME" in reports["b"].remedy


def test_of_two_directors_the_newer_ones_list_stays() -> None:
    """Each side of a partition has one; the file takes the newer list, whoever writes last."""
    cluster, clock = FakeCluster("a", "b"), Clock()
    old = started(cluster, clock)
    clock.now += 10
    new = started(cluster, clock)
    new.hold("b", True)
    cluster.keep("a", old.view().members)
    assert cluster.files["a"] == new.view().members
