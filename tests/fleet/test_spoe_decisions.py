"""What HAProxy asks and tells, and what becomes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import pytest

from launcher.fleet.loads import HostLoad, InstanceLoad
from launcher.fleet.picker import HOLD_S
from launcher.fleet.spoe import Decisions

LOCAL = ("127.0.0.1", 9)
SOON_S = 60.0


def idle(host_slots: int = 1, *, limit: int = 1) -> HostLoad:
    instances = tuple(
        InstanceLoad(
            slot=slot, generation=1, model="m", ready=True, running=0, waiting=0, concurrency_limit=limit
        )
        for slot in range(host_slots)
    )
    return HostLoad(running=0, waiting=0, instances=instances)


def message(id_: str, model: str = "m") -> dict[str, str | int | bytes]:
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "x"}], "stream": True}
    ).encode()
    return {"id": id_, "path": "/v1/chat/completions", "key": "", "body": body, "length": len(body)}


@pytest.fixture
async def decisions() -> Decisions:
    """Hosts a and b, with one instance each that runs one request at a time."""
    made = Decisions()
    made.peers = frozenset({"127.0.0.1"})
    made.picker.serve({"a": False, "b": False}, 0.0)
    for host in "ab":
        made.report(host, idle(), asyncio.get_running_loop().time())
    return made


async def ask(decisions: Decisions, id_: str, model: str = "m") -> Mapping[str, str]:
    async with asyncio.timeout(SOON_S):
        return await decisions.handle("pick", message(id_, model))


async def test_the_answer_names_host_and_slot(decisions: Decisions) -> None:
    answers = [await ask(decisions, f"r{n}") for n in range(2)]
    assert sorted(answer["host"] for answer in answers) == ["a", "b"]
    assert {answer["slot"] for answer in answers} == {"0"}


@pytest.mark.parametrize("model", ["other", "\N{SNOWMAN}"])
async def test_what_the_fleet_does_not_know_is_left_to_haproxy(decisions: Decisions, model: str) -> None:
    assert await ask(decisions, "r", model) == {}
    assert await decisions.handle("pick", {}) == {}
    assert await decisions.handle("first", {"id": None, "status": None}) == {}


async def test_an_id_that_is_asked_twice_takes_nothing_from_the_first(decisions: Decisions) -> None:
    for n in range(2):
        await ask(decisions, f"r{n}")
        await decisions.handle("first", {"id": f"r{n}", "status": 200})
    held = asyncio.create_task(ask(decisions, "late"))
    await asyncio.sleep(0.05)
    assert await ask(decisions, "late") == {}
    decisions.datagram_received(b"<134>x: end r1 200 h7 12 34 --\n", LOCAL)
    assert (await held)["slot"] == "0"


async def test_an_end_lets_a_held_request_go_there(decisions: Decisions) -> None:
    where = {f"r{n}": (await ask(decisions, f"r{n}"))["host"] for n in range(2)}
    for id_ in where:
        await decisions.handle("first", {"id": id_, "status": 200})
    held = asyncio.create_task(ask(decisions, "late"))
    await asyncio.sleep(0.05)
    assert not held.done()
    decisions.datagram_received(b"<134>x: end r1 200 h7 12 34 --\n", LOCAL)
    assert (await held)["host"] == where["r1"]


async def test_no_request_is_held_longer_than_a_second(decisions: Decisions) -> None:
    for n in range(2):
        await ask(decisions, f"r{n}")
    begun = asyncio.get_running_loop().time()
    assert (await ask(decisions, "late"))["slot"] == "0"
    assert HOLD_S - 0.1 < asyncio.get_running_loop().time() - begun < 10 * HOLD_S


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"end",
        b"end r0 200 h1 1 2",
        b"end r0 x h1 y z --",
        b"end nobody 200 h1 1 2 --",
        b"start r0",
    ],
)
async def test_lines_that_cannot_be_read_change_nothing_else(decisions: Decisions, data: bytes) -> None:
    await ask(decisions, "r0")
    decisions.datagram_received(data, LOCAL)
    assert await ask(decisions, "r1") != {}


async def test_strangers_cannot_end_requests(decisions: Decisions) -> None:
    await ask(decisions, "r0")
    decisions.datagram_received(b"end r0 200 h1 1 2 --", ("10.9.9.9", 9))
    assert sum(host["sent"] == 1 for host in decisions.picker.status().values()) == 1
    decisions.datagram_received(b"end r0 200 h1 1 2 --", LOCAL)
    assert sum(host["sent"] == 1 for host in decisions.picker.status().values()) == 0


async def test_a_question_that_haproxy_gives_up_is_not_held(decisions: Decisions) -> None:
    for n in range(2):
        await ask(decisions, f"r{n}")
    held = asyncio.create_task(ask(decisions, "late"))
    await asyncio.sleep(0.05)
    assert decisions.picker.held == 1
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)
    assert decisions.picker.held == 0
    decisions.datagram_received(b"end late 0 <NOSRV> -1 1 CQ", LOCAL)


# --- the process -----------------------------------------------------------------------------------
