"""One item for each thing that happened, whatever number of events it makes."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from launcher.dashboard.changes import FIRST, KEPT, Changes, Event

CONTROLLER = "launcher.instances.slot_controller"
REMEDY = "see who sent it: journalctl"
NUMBERS = count(1)


def event(time: float, message: str, level: str = "info", logger: str = CONTROLLER, **fields: Any) -> Event:
    return {
        "number": next(NUMBERS), "time": time, "level": level, "logger": logger, "message": message, "fields": fields,
    }  # fmt: skip


def killed(time: float, slot: int = 2, generation: int = 1) -> list[Event]:
    """What an engine leaves behind that was killed."""
    about = {"slot": slot, "generation": generation}
    return [
        event(
            time, f"slot {slot}: the proxy could not use its instance: connection reset", "warning", "launcher.daemon.main",
            slot=slot,
        ),
        event(
            time + 0.02, f"slot {slot}: killed: SIGKILL by uid 0; {REMEDY}", "error", **about,
            state="backoff", cause="killed", remedy=REMEDY, evidence=["last words"],
        ),
        event(time + 0.03, f"slot {slot}: next start in 1.0 s", "warning", **about, state="backoff"),
        event(time + 0.04, f"slot {slot}: ready -> backoff", **about, state="backoff"),
    ]  # fmt: skip


def started(time: float, slot: int = 2, generation: int = 2) -> list[Event]:
    about = {"slot": slot, "generation": generation}
    return [
        event(time, f"slot {slot}: backoff -> starting", **about, state="starting"),
        event(time + 3, f"slot {slot}: starting -> ready", **about, state="ready"),
    ]


def asked(time: float, verb: str, slot: int | str = 2, audit: str = "done", **user: str) -> Event:
    return event(
        time, f"POST /v1/slots/{slot}/{verb} by ada (uid 1000, pid 7): 200", logger="launcher.control",
        audit=audit, verb=verb, slot=slot, **(user or {"user": "ada"}),
    )  # fmt: skip


def folded(*events: Event, after: int = 0) -> list[dict[str, Any]]:
    changes = Changes()
    changes.add(events)
    return changes.since(after)


def titles(*events: Event) -> list[str]:
    return [item["title"] for item in folded(*events)]


def test_a_crash_is_one_item_that_grows() -> None:
    changes, crash, start = Changes(), killed(100.0), started(101.0)
    changes.add(crash)
    (item,) = changes.since(0)
    assert item["title"] == "slot 2: killed: SIGKILL by uid 0, in back-off"
    assert (item["slot"], item["cause"], item["remedy"], item["user"]) == (2, "killed", REMEDY, None)
    assert (item["number"], item["time"], item["until"], item["level"]) == (
        crash[0]["number"],
        100.0,
        100.04,
        "error",
    )
    assert [shown["message"] for shown in item["events"]] == [made["message"] for made in crash]
    assert item["events"][0] == {
        "number": crash[0]["number"], "time": 100.0, "level": "warning", "message": crash[0]["message"],
    }  # fmt: skip
    assert item["events"][1]["fields"] == {"generation": 1, "state": "backoff", "evidence": ["last words"]}
    newest = changes.newest
    assert changes.since(newest) == []
    changes.add(start)
    (grown,) = changes.since(newest)
    assert grown["number"] == item["number"]
    assert grown["title"] == "slot 2: killed: SIGKILL by uid 0, ready again after 4s"
    assert len(grown["events"]) == 6
    assert len(changes.since(0)) == 1


def test_the_same_events_again_change_nothing() -> None:
    changes, crash = Changes(), killed(100.0)
    changes.add(crash)
    changes.add(crash)
    assert [len(item["events"]) for item in changes.since(0)] == [4]


def test_two_slots_that_die_at_once_are_two_items() -> None:
    pairs = zip(killed(100.0, 0), killed(100.0, 1), strict=True)
    found = folded(*({**one, "number": next(NUMBERS)} for pair in pairs for one in pair))
    assert [(item["slot"], len(item["events"])) for item in found] == [(0, 4), (1, 4)]


def test_each_crash_of_a_loop_is_an_item() -> None:
    found = folded(
        *killed(100.0), *started(101.0)[:1], *killed(102.0, generation=2), *started(103.0, generation=3)
    )
    assert [(item["cause"], item["title"].rpartition(", ")[2]) for item in found] == [
        ("killed", "starting"), ("killed", "ready again after 3s"),
    ]  # fmt: skip


def test_a_crash_after_a_start_is_an_item_of_its_own() -> None:
    assert titles(*started(100.0), *killed(200.0)) == [
        "slot 2, ready after 3s",
        "slot 2: killed: SIGKILL by uid 0, in back-off",
    ]


@pytest.mark.parametrize("user", [{"user": "ada"}, {"peer_user": "ada"}])
@pytest.mark.parametrize("slot", [2, "2"])
def test_a_command_is_one_item_with_what_follows(slot: int | str, user: dict[str, str]) -> None:
    about = {"slot": 2, "generation": 1}
    found = folded(
        asked(100.0, "restart", slot, **user),
        event(100.1, "slot 2: ready -> draining", **about, state="draining"),
        event(160.0, "slot 2: draining -> stopping", **about, state="stopping"),
        *started(161.0),
    )
    assert [(item["title"], item["user"], item["slot"]) for item in found] == [
        ("slot 2: restart by ada, ready after 1m04s", "ada", 2)
    ]


def test_drained_and_resumed() -> None:
    about = {"slot": 2, "generation": 1}
    assert titles(
        asked(100.0, "drain"), event(100.1, "slot 2: ready -> draining", **about, state="draining"),
        asked(160.0, "resume"), event(160.1, "slot 2: draining -> ready", **about, state="ready"),
    ) == ["slot 2: drain by ada, draining", "slot 2: resume by ada, ready after 0s"]  # fmt: skip


def test_a_command_is_logged_after_its_first_effects() -> None:
    changes, about = Changes(), {"slot": 2, "generation": 1}
    draining = event(100.0, "slot 2: ready -> draining", **about, state="draining")
    drain = asked(100.001, "drain")
    ready = event(160.0, "slot 2: draining -> ready", **about, state="ready")
    resume = asked(160.001, "resume")
    changes.add([draining, drain])
    changes.add([ready, resume])
    assert [item["title"] for item in changes.since(0)] == [
        "slot 2: drain by ada, draining",
        "slot 2: resume by ada, ready after 0s",
    ]
    assert [item["title"] for item in changes.since(drain["number"])] == [
        "slot 2: resume by ada, ready after 0s"
    ]
    # Also where the daemon was asked between the two.
    apart = Changes()
    apart.add([draining])
    apart.add([drain])
    assert [(item["title"], item["user"]) for item in apart.since(0)] == [
        ("slot 2: drain by ada, draining", "ada")
    ]


def test_a_start_that_fails_belongs_to_the_command() -> None:
    (item,) = folded(
        asked(100.0, "start"), event(100.1, "slot 2: stopped -> starting", slot=2, generation=3, state="starting"),
        event(130.0, "slot 2: no-model: not found", "error", slot=2, generation=3, state="failed", cause="no-model"),
        event(130.0, "slot 2: starting -> failed", slot=2, generation=3, state="failed"),
    )  # fmt: skip
    assert (item["title"], item["cause"], item["user"]) == (
        "slot 2: no-model: not found, failed",
        "no-model",
        "ada",
    )


def test_a_refused_command() -> None:
    why = "cannot use slot '2': no such slot"
    refused = event(
        100.0, f"POST /v1/slots/2/stop by ada (uid 1000, pid 7): 404: {why}", logger="launcher.control",
        audit="refused", verb="stop", slot=2, user="ada", status=404,
    )  # fmt: skip
    assert titles(refused) == [f"slot 2: stop by ada refused: {why}"]
    of_a_signal = event(100.0, "cannot reload: no such file", audit="refused", verb="reload")
    assert titles(of_a_signal) == ["reload refused: cannot reload: no such file"]


def test_a_reload() -> None:
    rollout = "launcher.rollout"
    found = folded(
        event(
            100.0,
            "POST /v1/reload by ada",
            logger="launcher.control",
            audit="done",
            verb="reload",
            slot="",
            user="ada",
        ),
        event(101.0, "reload: slot 0 answers in 3.000 s", logger=rollout, slot=0),
        event(140.0, "slot 0: starting -> ready", slot=0, generation=2, state="ready"),
        event(200.0, "reload: done, 1 slots changed", logger=rollout, audit="done"),
        event(300.0, "reload: slot 0 answers in 3.000 s", logger=rollout, slot=0),
    )
    assert [(item["title"], item["user"], len(item["events"])) for item in found] == [
        ("reload by ada", "ada", 3), ("slot 0, ready after 0s", None, 1),
        ("reload: slot 0 answers in 3.000 s", None, 1),
    ]  # fmt: skip


def test_drift_is_one_item_until_it_ends() -> None:
    def drift(time: float, text: str) -> Event:
        message = f"the machine has changed: {text}" if text else "the machine matches the plan again"
        return event(time, message, "warning", "launcher.daemon.drift", drift=text)

    found = folded(
        drift(100.0, "cpu 3 is offline"),
        drift(150.0, "cpu 4 is offline"),
        drift(190.0, ""),
        drift(900.0, "x"),
    )
    assert [(item["title"], len(item["events"])) for item in found] == [
        ("the machine has changed: cpu 3 is offline", 3), ("the machine has changed: x", 1),
    ]  # fmt: skip


def test_a_repeated_message_is_counted() -> None:
    def full(time: float) -> Event:
        return event(time, "cannot write: disk full", "error", "launcher.usage")

    assert titles(full(0.0), full(60.0), full(120.0), full(9000.0)) == [
        "cannot write: disk full (3 times)",
        "cannot write: disk full",
    ]


def test_a_warning_about_a_ready_slot() -> None:
    def misplaced(time: float) -> Event:
        return event(time, "slot 2: placement differs from the plan: stray", "warning", slot=2)

    assert [item["level"] for item in folded(*started(0.0), misplaced(100.0), misplaced(200.0))] == [
        "info", "warning", "warning",
    ]  # fmt: skip


def test_memory_is_bounded() -> None:
    changes = Changes()
    changes.add(event(number, f"message {number}", logger="l") for number in range(5 * KEPT))
    changes.add(event(9e6 + number, "the same", logger="l") for number in range(1000))
    assert len(changes.since(1)) == KEPT
    assert len(changes.since(0)) == FIRST
    last = changes.since(0)[-1]
    assert (last["title"], len(last["events"])) == ("the same (1000 times)", 40)
    assert (last["events"][0]["time"], last["events"][-1]["time"]) == (9e6, 9e6 + 999)
