"""The choice of host and instance."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from launcher.fleet.loads import HostLoad, InstanceLoad, ModelNames
from launcher.fleet.picker import EJECT_S, HOLD_S, REPORTS, Choice, Picker
from launcher.proxy.request.beginning import Asked


def instance(slot: int, **more: object) -> InstanceLoad:
    fields = {
        "generation": 1,
        "model": "m",
        "ready": True,
        "running": 0,
        "waiting": 0,
        "concurrency_limit": 2,
    }
    return InstanceLoad(slot=slot, **(fields | more))  # type: ignore[arg-type]


def load(*instances: InstanceLoad, waiting: int = 0) -> HostLoad:
    """Of a host with these instances; `waiting`: in its daemon's queue."""
    running = sum(each.running for each in instances)
    return HostLoad(running=running, waiting=waiting + sum(i.waiting for i in instances), instances=instances)


def picker(hosts: int = 2, *, instances: int = 1, limit: int = 2) -> Picker:
    """Hosts a, b, ..., all of them idle."""
    made = Picker(Random(0).randrange)  # noqa: S311
    made.serve(dict.fromkeys("abcdef"[:hosts], False), 0.0)
    for n in range(hosts):
        idle(made, "abcdef"[n], 0.0, instances=instances, limit=limit)
    return made


def idle(made: Picker, host: str, now: float, *, instances: int = 1, limit: int = 2) -> None:
    made.report(host, load(*(instance(slot, concurrency_limit=limit) for slot in range(instances))), now)


def asked(id_: str, *, model: str | None = "m", prefix: tuple[int, ...] = (), size: int = 40) -> Asked:
    return Asked(id=id_, model=model, prefix=prefix, prompt_bytes=size, stream=True)


def host(choice: Choice | None) -> str:
    assert choice is not None
    return choice.host


def busy(made: Picker, count: int, now: float = 0.0, name: str = "busy") -> list[str]:
    """The hosts of so many requests that are past their prefill; their ids are `name`0, ..."""
    found = []
    for n in range(count):
        found.append(host(made.offer(asked(f"{name}{n}"), now)))
        made.first(f"{name}{n}", 200, now + 0.01)
    return found


def end(made: Picker, id_: str, now: float, *, status: int = 200, how: str = "--") -> None:
    made.ended(id_, status, how, now)


def test_requests_go_to_the_least_busy_instances_of_all_hosts() -> None:
    assert sorted(busy(picker(2, instances=2), 4)) == ["a", "a", "b", "b"]


def test_a_slot_is_named_as_its_host_names_it() -> None:
    made = picker(0)
    made.serve({"a": False}, 0.0)
    made.report("a", load(instance(3)), 0.0)
    assert made.offer(asked("r"), 0.0) == ("a", 3)


def test_a_prompt_goes_where_its_beginning_is_cached() -> None:
    made = picker(6)
    prefix = tuple(range(1, 40))
    first = host(made.offer(asked("0", prefix=prefix, size=20_000), 0.0))
    made.first("0", 200, 1.0)
    end(made, "0", 2.0)
    for n in range(1, 9):
        assert host(made.offer(asked(str(n), prefix=(*prefix, n), size=20_500), 3.0 * n)) == first
        made.first(str(n), 200, 3.0 * n + 0.1)
        end(made, str(n), 3.0 * n + 1)


def test_a_held_request_gets_the_place_that_is_free_first() -> None:
    made = picker(2)
    where = busy(made, 4)
    assert made.offer(asked("late"), 0.1) is None
    assert made.holds("late")
    assert made.turn(0.2) == []
    end(made, "busy3", 0.3)
    assert made.turn(0.3) == [("late", Choice(where[3], 0))]
    assert not made.holds("late")
    assert made.held == 0


def test_what_needs_no_place_is_not_held() -> None:
    made = picker(2)
    busy(made, 4)
    assert made.offer(asked("waits"), 1.0) is None
    found = [made.offer(Asked(id=f"t{n}", model="m", takes_place=False), 1.0) for n in range(20)]
    assert {host(choice) for choice in found} == {"a", "b"}
    assert (made.holds("waits"), made.holds("t0"), made.held) == (True, False, 1)
    end(made, "t0", 1.1)
    assert made.turn(1.2) == []
    assert made.offer(Asked(id="other", model="x", takes_place=False), 1.0) is None


def test_nothing_is_held_longer_than_a_second() -> None:
    made = picker(2)
    busy(made, 4)
    assert made.offer(asked("late"), 0.1) is None
    assert made.next_turn(0.1) == 0.1
    assert made.turn(0.1) == []
    when = made.next_turn(0.1)
    assert when == pytest.approx(0.1 + HOLD_S)
    assert made.turn(when - 0.01) == []
    ((id_, choice),) = made.turn(when)
    assert (id_, choice is not None) == ("late", True)
    # Its head may come with a comment of the host's queue: it says nothing about the prefill.
    made.first("late", 200, 2.0)
    end(made, "late", 3.0)
    assert made.turn(3.0) == []


def test_the_shorter_queue_gets_what_was_held_too_long() -> None:
    made = picker(2, limit=4)
    where = busy(made, 8)
    for n in range(40):
        assert made.offer(asked(f"late{n}"), 1.0 + n / 1000) is None
    found = [host(choice) for _, choice in made.turn(2.5)]
    assert abs(found.count("a") - found.count("b")) <= 2, found
    assert sorted(set(where)) == ["a", "b"]


def test_a_client_that_leaves_while_its_request_is_held() -> None:
    made = picker(1)
    busy(made, 2)
    made.offer(asked("late"), 0.1)
    made.ended("late", 0, "CQ", 0.2)
    assert (made.holds("late"), made.held) == (False, 0)
    end(made, "busy0", 0.3)
    assert made.turn(0.3) == []


def test_keys_share_what_is_free() -> None:
    made = picker(1)
    busy(made, 2)
    for n in range(20):
        made.offer(Asked(id=f"many{n}", model="m", key="many", prompt_bytes=40, stream=True), 0.1 + n / 1e3)
    made.offer(Asked(id="one", model="m", key="one", prompt_bytes=40, stream=True), 0.2)
    end(made, "busy0", 0.3)
    made.turn(0.3)
    made.first("many0", 200, 0.31)
    end(made, "busy1", 0.4)
    assert [id_ for id_, _ in made.turn(0.4)] == ["one"]


# --- models ----------------------------------------------------------------------------------------


def test_a_model_that_no_host_reports_is_left_to_the_fallback() -> None:
    made = picker(2)
    assert made.offer(asked("r", model="other"), 0.0) is None
    assert not made.holds("r")


def test_a_model_that_the_cut_body_does_not_say_is_clear_where_there_is_one() -> None:
    made = picker(1)
    assert made.offer(asked("r", model=None), 0.0) is not None
    made.report("a", load(instance(0), instance(1, model="other")), 1.0)
    assert made.offer(asked("s", model=None), 1.0) is None


def test_an_adapter_goes_to_the_hosts_that_have_it() -> None:
    made = picker(3, limit=64)
    other = load(instance(0, concurrency_limit=64))
    names = {"m": ModelNames(aliases=("big",), adapters=("lora",))}
    made.report("b", msgspec.structs.replace(other, models=names), 0.0)
    assert {host(made.offer(asked(f"r{n}", model="lora"), 0.0)) for n in range(4)} == {"b"}
    assert {host(made.offer(asked(f"s{n}"), 0.0)) for n in range(4)} == {"a", "c"}
    made.serve({"a": False, "c": False}, 9.0)
    assert made.offer(asked("late", model="lora"), 9.0) is None
    assert not made.holds("late")


# --- hosts come and go -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["draining", "lost", "gone", "not ready", "no instance"])
def test_a_host_that_may_not_have_requests_gets_none(how: str) -> None:
    made = picker(2, limit=64)
    match how:
        case "draining":
            made.serve({"a": True, "b": False}, 1.0)
        case "lost":
            made.lost("a")
        case "gone":
            made.serve({"b": False}, 1.0)
        case "not ready":
            made.report("a", load(instance(0, ready=False)), 1.0)
        case _:
            made.report("a", load(), 1.0)
    assert set(busy(made, 8, 2.0)) == {"b"}
    made.serve({"a": False, "b": False}, 3.0)
    idle(made, "a", 3.0, limit=64)
    assert busy(made, 6, 4.0, "more") == ["a"] * 6


def test_what_is_held_when_the_last_host_goes_is_left_to_the_fallback() -> None:
    made = picker(1)
    busy(made, 2)
    made.offer(asked("late"), 0.1)
    made.lost("a")
    assert made.turn(0.2) == []
    assert made.turn(0.1 + HOLD_S) == [("late", None)]
    assert not made.holds("late")
    end(made, "late", 2.0)


def test_a_new_generation_has_none_of_the_old_ones_requests() -> None:
    made = picker(1)
    busy(made, 2)
    made.report("a", load(instance(0, generation=2)), 1.0)
    assert busy(made, 2, 1.0, "new") == ["a", "a"]
    end(made, "busy0", 1.5)
    end(made, "new0", 1.6)


def test_a_daemon_that_starts_its_generations_anew() -> None:
    made = picker(0)
    made.serve({"a": False}, 0.0)
    made.report("a", load(instance(0, generation=9)), 0.0)
    made.report("a", load(instance(0, generation=1)), 1.0)
    assert made.offer(asked("r"), 1.0) == ("a", 0)


# --- what the hosts report -------------------------------------------------------------------------


def test_requests_that_others_sent_take_places() -> None:
    made = picker(2, limit=4)
    for now in (1.0, 2.0):  # a single report may be older than what was sent since
        made.report("a", load(instance(0, running=3, concurrency_limit=4)), now)
    assert busy(made, 5, 2.0).count("b") >= 4


def test_a_request_on_another_slot_of_its_host_is_not_counted_twice() -> None:
    made = picker(0)
    made.serve({"a": False}, 0.0)
    made.report("a", load(instance(0), instance(1)), 0.0)
    choice = made.offer(asked("r"), 0.0)
    assert choice is not None
    for now in (1.0, 2.0):
        made.report("a", load(*(instance(slot, running=int(slot != choice.slot)) for slot in (0, 1))), now)
    made.first("r", 200, 2.0)
    assert len(busy(made, 3, 2.0)) == 3


def test_an_end_that_is_never_told_does_not_count_for_ever() -> None:
    made = picker(1)
    busy(made, 2)
    for turn in range(REPORTS):
        assert made.status()["a"]["sent"] == 2
        made.report("a", load(instance(0, running=1)), 1.0 + turn)
    assert made.status()["a"]["sent"] == 1
    assert made.offer(asked("next"), 9.0) == ("a", 0)
    end(made, "busy0", 9.5)  # after all
    assert made.status()["a"]["sent"] == 2


def test_one_report_that_is_older_than_a_request_drops_nothing() -> None:
    made = picker(1)
    busy(made, 2)
    for turn in range(3 * REPORTS):
        made.report("a", load(instance(0, running=2 if turn % REPORTS == 1 else 0)), 1.0 + turn)
    assert made.status()["a"]["sent"] == 2


# --- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "how"), [(503, "--"), (200, "SD")])
def test_a_host_that_fails_three_times_is_left_alone_for_a_while(status: int, how: str) -> None:
    made = picker(2, limit=64)
    made.serve({"a": False, "b": True}, 0.0)
    busy(made, 3)
    made.serve({"a": False, "b": False}, 1.0)
    for n in range(3):
        end(made, f"busy{n}", 1.0, status=status, how=how)
    assert set(busy(made, 5, 1.1, "new")) == {"b"}
    assert [note for note in made.notes() if "host a: slot 0: ejected" in note]
    for n in range(5):
        end(made, f"new{n}", 1.2)
    assert "a" in {host(made.offer(asked(f"back{n}"), 1.2 + EJECT_S)) for n in range(2)}


def test_the_last_instance_is_not_ejected() -> None:
    made = picker(1, limit=64)
    busy(made, 5)
    for n in range(5):
        end(made, f"busy{n}", 1.0, status=503)
    assert made.offer(asked("r"), 1.0) is not None


@pytest.mark.parametrize("status", [500, 502, 504])
def test_a_request_at_which_every_host_fails_ejects_none(status: int) -> None:
    """Its daemons have tried it on their instances, and blame none of them."""
    made = picker(3, limit=64)
    for n in range(30):
        made.offer(asked(f"r{n}"), float(n))
        end(made, f"r{n}", n + 0.5, status=status)
    assert made.notes() == []
    assert set(busy(made, 9, 31.0)) == {"a", "b", "c"}


@pytest.mark.parametrize(("how", "sent"), [("CD", True), ("cD", True), ("SC", False)])
def test_clients_that_leave_and_an_haproxy_without_servers_are_no_fault(how: str, *, sent: bool) -> None:
    made = picker(2)
    made.serve({"a": False, "b": True}, 0.0)
    for n in range(9):
        made.offer(asked(f"r{n}"), n)
        made.ended(f"r{n}", 503, how, n + 0.5, sent=sent)
    assert made.notes() == []


def test_a_slow_host_gets_less_and_is_named() -> None:
    made = picker(3, limit=64)
    where: list[str] = []
    for now in range(200):
        count = 3 if now < 100 else 2
        at = [host(made.offer(asked(f"{now}.{n}", size=4000), float(now))) for n in range(count)]
        for n in sorted(range(count), key=lambda n: at[n] == "b"):
            made.first(f"{now}.{n}", 200, now + (0.9 if at[n] == "b" else 0.2))
        for n in range(count):
            end(made, f"{now}.{n}", now + 0.95)
        where += at
    assert made.status()["b"]["stragglers"] == [0]
    assert made.status()["a"]["stragglers"] == []
    assert any("host b: slot 0" in note for note in made.notes())
    assert [where[-200:].count(each) for each in ("a", "b", "c")] == [100, 0, 100]


def test_what_is_not_known_changes_nothing() -> None:
    made = picker(1)
    made.first("nobody", 200, 0.0)
    end(made, "nobody", 0.0)
    made.report("stranger", load(instance(0)), 0.0)
    made.lost("stranger")
    assert list(made.status()) == ["a"]
    assert made.offer(asked("r"), 0.0) is not None
    assert made.offer(asked("r"), 0.0) is None  # the same id again


def test_a_host_shows_its_instances_and_its_share_of_the_last_minute() -> None:
    made = picker(2)
    assert made.shares(0.0) == {}
    ready = instance(0, kv_usage=0.25), instance(1, kv_usage=0.75, ready=False), instance(2)
    made.report("a", load(*ready), 0.0)
    shown = made.status()["a"]
    assert (shown["ready"], shown["instances"], shown["kv_usage"]) == (2, 3, 0.5)
    assert made.status()["b"]["kv_usage"] is None
    made.serve({"a": True, "b": False}, 0.0)
    for n in range(30):
        made.offer(asked(f"b{n}"), 0.0)
        end(made, f"b{n}", 0.0)
    made.serve({"a": False, "b": True}, 0.0)
    for n in range(10):
        made.offer(asked(f"a{n}"), 60.0)
        end(made, f"a{n}", 60.0)
    # 30 / e of a minute ago, and 10.
    assert made.shares(60.0) == {"a": pytest.approx(0.4754, abs=1e-3), "b": pytest.approx(0.5246, abs=1e-3)}
    assert made.shares(600.0) == {}
