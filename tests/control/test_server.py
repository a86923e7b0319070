"""The control socket as curl and a stranger see it."""

from __future__ import annotations

import asyncio
import grp
import json
import logging
import os
import pwd
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace
from support.fake_operations import FakeOperations
from support.fakes import until

from launcher.base.errors import LauncherError
from launcher.control.connections import Peer, _groups_by_name, group_id, may_use, peer_of
from launcher.control.handlers import ControlAction
from launcher.control.messages import SUMMARY, Request, SlotCommand
from launcher.control.server import MAX_BODY_BYTES, ControlServer
from launcher.daemon.machine import Misplaced, SlotPlaces

SOON_S = 60.0


@pytest.fixture
def operations() -> FakeOperations:
    return FakeOperations()


@pytest.fixture
async def path(tmp_path: Path, operations: FakeOperations) -> AsyncIterator[str]:
    """A server's socket."""
    server = ControlServer(str(tmp_path / "run" / "c.sock"), None, operations)
    await server.start()
    yield str(tmp_path / "run" / "c.sock")
    await server.stop()
    assert not (tmp_path / "run" / "c.sock").exists()


@pytest.fixture
async def http(path: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(path)) as session:
        yield session


async def asked(http: aiohttp.ClientSession, method: str, where: str, **more: Any) -> tuple[int, Any]:
    async with http.request(method, where, **more) as response:
        return response.status, json.loads(await response.read())


async def test_status_and_plan(http: aiohttp.ClientSession) -> None:
    code, status = await asked(http, "GET", "/v1/status")
    assert (code, status["ready"], [slot["slot"] for slot in status["slots"]]) == (200, 2, [0, 1])
    assert await asked(http, "GET", "/v1/plan") == (200, {"slots": []})


async def test_the_machine_of_the_plan(http: aiohttp.ClientSession) -> None:
    code, topology = await asked(http, "GET", "/v1/topology")
    assert (code, topology["cpu_count"], topology["cores"][0]["cpus"]) == (200, 512, [0, 256])
    code, machine = await asked(http, "GET", "/v1/machine")
    assert (code, machine["busy"][:2], len(machine["busy"])) == (200, [0.9, 0.1], 512)
    assert await asked(http, "GET", "/v1/measurements") == (200, {"measurements": []})
    node = machine["nodes"][0]
    assert node["total_bytes"] == sum(node[part] for part in node if part not in {"node", "total_bytes"})


async def test_names_of_threads_are_masked_for_everybody(
    http: aiohttp.ClientSession, operations: FakeOperations
) -> None:
    """A thread names itself; "three" is a secret of the fake."""
    thread = Misplaced(thread=7, name="three", cpus="0-9", planned="0-3")
    places = SlotPlaces(slot=0, node_bytes={}, off_node_bytes=0, misplaced=(thread,), misplaced_threads=1)
    operations.load = replace(
        await operations.machine(), slots=(places,), drift=("cpus 2 are offline, three",)
    )
    code, machine = await asked(http, "GET", "/v1/machine")
    assert (code, machine["slots"][0]["misplaced"][0]["name"]) == (200, "<redacted>")
    assert machine["drift"] == ["cpus 2 are offline, <redacted>"]
    assert machine["slots"][0]["misplaced"][0]["cpus"] == "0-9"


@pytest.mark.parametrize("verb", SlotCommand)
async def test_each_verb(
    http: aiohttp.ClientSession,
    operations: FakeOperations,
    caplog: pytest.LogCaptureFixture,
    verb: SlotCommand,
) -> None:
    caplog.set_level(logging.INFO, "launcher.control")
    code, slot = await asked(http, "POST", f"/v1/slots/1/{verb}")
    assert (code, slot["slot"], operations.asked) == (200, 1, [(1, verb)])
    (line,) = [record for record in caplog.records if record.name == "launcher.control"]
    assert f"POST /v1/slots/1/{verb} by {pwd.getpwuid(os.getuid()).pw_name}" in line.getMessage()
    assert (line.__dict__["peer_pid"], line.__dict__["status"]) == (os.getpid(), 200)
    assert SUMMARY[verb]


async def test_verify(http: aiohttp.ClientSession, operations: FakeOperations) -> None:
    code, slot = await asked(http, "POST", "/v1/slots/0/verify")
    assert (code, slot["verified"]["ok"], operations.verified) == (200, True, [0])


async def test_a_slot_that_a_reload_removes_while_it_is_verified(
    http: aiohttp.ClientSession, operations: FakeOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verification may take minutes; its slot may be gone then."""

    async def gone(_slot: int) -> None:
        status = operations.status()
        monkeypatch.setattr(operations, "status", lambda: replace(status, slots=status.slots[1:]))

    monkeypatch.setattr(operations, "verify", gone)
    code, body = await asked(http, "POST", "/v1/slots/0/verify")
    assert (code, body["error"]["message"]) == (
        404,
        "cannot show slot '0': a reload has removed it meanwhile",
    )


@pytest.mark.parametrize(
    ("method", "where", "code", "message"),
    [
        ("POST", "/v1/slots/9/stop", 404, "cannot use slot '9': no such slot"),
        ("POST", "/v1/slots/-1/stop", 400, "cannot use slot '-1': not a number"),
        ("POST", "/v1/slots/x/verify", 400, "cannot use slot 'x': not a number"),
        ("POST", "/v1/slots/99999999999/stop", 400, "cannot use slot '99999999999': not a number"),
        ("POST", "/v1/slots/0/explode", 404, "cannot 'explode' a slot: no such command"),
        ("POST", "/v1/slots/9/verify", 404, "cannot use slot '9': no such slot"),
        ("GET", "/v1/slots/9/logs", 404, "cannot use slot '9': no such slot"),
        ("GET", "/v1/slots/9/logs?follow=1", 404, "cannot use slot '9': no such slot"),
        ("GET", "/v1/slots/0/logs?tail=many", 400, "cannot use tail='many': not a whole number of at most 100000"),
        ("GET", "/v1/slots/0/logs?tail=100001", 400, "cannot use tail='100001': not a whole number of at most 100000"),
        ("GET", "/v1/slots/0/logs?tail=" + "9" * 5000, 400, "cannot use tail='9999"),
        ("GET", "/v1/history?span=2h", 400, "cannot show the history of '2h': no such span"),
        ("GET", "/v1/history?slots=x", 400, "cannot show the history of slots 'x'"),
        ("GET", "/v1/history?after=-1", 400, "cannot use after='-1': not a whole number of at most "),
        ("GET", "/v1/slots/0/stop", 405, "cannot answer GET /v1/slots/0/stop: Method Not Allowed"),
        ("GET", "/nowhere", 404, "cannot answer GET /nowhere: Not Found"),
    ],
)  # fmt: skip
async def test_mistakes(  # noqa: PLR0917
    http: aiohttp.ClientSession, operations: FakeOperations, method: str, where: str, code: int, message: str
) -> None:
    found, body = await asked(http, method, where)
    assert found == code
    assert body["error"]["message"].startswith(message)
    assert body["error"]["remedy"]
    assert operations.asked == []


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_oversized_body_is_refused(
    http: aiohttp.ClientSession, operations: FakeOperations, chunked: bool
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"x" * (MAX_BODY_BYTES + 1)

    code, body = await asked(
        http, "POST", "/v1/slots/0/stop", data=chunks() if chunked else b"x" * (MAX_BODY_BYTES + 1)
    )
    assert (code, operations.asked) == (413, [])
    assert body["error"]["message"].startswith("cannot answer POST /v1/slots/0/stop")
    assert (await asked(http, "POST", "/v1/slots/0/stop", data=b"{}"))[0] == 200


async def test_logs(http: aiohttp.ClientSession) -> None:
    code, body = await asked(http, "GET", "/v1/slots/0/logs?tail=2")
    assert (code, [line["text"] for line in body["lines"]]) == (200, ["two", "three"])
    assert (await asked(http, "GET", "/v1/slots/0/logs?tail=0"))[1] == {"lines": []}


async def test_logs_follow(http: aiohttp.ClientSession, operations: FakeOperations) -> None:
    async with http.get("/v1/slots/0/logs?tail=1&follow=1") as response, asyncio.timeout(SOON_S):
        assert json.loads(await response.content.readline())["text"] == "three"
        operations.more.put_nowait("four")
        assert json.loads(await response.content.readline())["text"] == "four"
    # A follower that leaves is forgotten, though no line comes any more.
    await until(lambda: not operations.following)


async def test_curl(path: str, operations: FakeOperations) -> None:
    curl = await asyncio.create_subprocess_exec(
        "curl", "--silent", "--unix-socket", path, "-X", "POST", "http://localhost/v1/slots/0/drain",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await curl.communicate()
    assert json.loads(out)["slot"] == 0
    assert operations.asked == [(0, SlotCommand.DRAIN)]


async def test_mode(path: str) -> None:
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o660  # noqa: PTH116
    assert stat.S_ISSOCK(os.stat(path).st_mode)  # noqa: PTH116


async def test_a_group_owns_the_socket(tmp_path: Path, operations: FakeOperations) -> None:
    mine = grp.getgrgid(os.getegid())
    server = ControlServer(str(tmp_path / "c.sock"), mine.gr_name, operations)
    await server.start()
    assert (tmp_path / "c.sock").stat().st_gid == mine.gr_gid
    await server.stop()


async def test_systemds_socket_stays_when_the_daemon_ends(tmp_path: Path, operations: FakeOperations) -> None:
    """One daemon after the other serves on it; what connects between them waits in the kernel."""
    path = tmp_path / "c.sock"
    with socket.socket(socket.AF_UNIX) as systemds:
        systemds.bind(str(path))
        systemds.listen()
        for _ in range(2):
            server = ControlServer(str(tmp_path / "another.sock"), None, operations)
            waiting = socket.socket(socket.AF_UNIX)
            waiting.connect(str(path))
            waiting.setblocking(False)
            await server.start([systemds.dup()])
            reader, writer = await asyncio.open_unix_connection(sock=waiting)
            writer.write(b"GET /v1/plan HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(SOON_S):
                assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            writer.close()
            await server.stop()
            assert path.is_socket()
    assert not (tmp_path / "another.sock").exists()


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


async def test_the_next_daemons_socket_stays_when_the_last_one_ends(
    tmp_path: Path, operations: FakeOperations
) -> None:
    """Somebody follows a log, so that the last one takes a second to end; the next is started meanwhile."""
    path = tmp_path / "c.sock"
    last, following = (ControlServer(str(path), None, operations) for _ in range(2))
    await last.start()
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http,
        http.get("http://localhost/v1/slots/0/logs?follow=1") as answer,
    ):
        assert answer.status == 200
        ending = asyncio.create_task(last.stop())
        await until(lambda: not answers(path))
        assert not ending.done()
        await following.start()
        await ending
    assert path.is_socket()
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http:
        assert (await asked(http, "GET", "http://localhost/v1/plan"))[0] == 200
    await following.stop()
    assert not path.exists()


async def test_a_replaced_socket_is_not_removed(tmp_path: Path, operations: FakeOperations) -> None:
    path = tmp_path / "c.sock"
    server = ControlServer(str(path), None, operations)
    await server.start()
    path.unlink()
    with socket.socket(socket.AF_UNIX) as another:
        another.bind(str(path))
        await server.stop()
        assert path.is_socket()


async def test_a_second_daemon_is_refused_and_the_first_goes_on(
    path: str, http: aiohttp.ClientSession
) -> None:
    second = ControlServer(path, None, FakeOperations())
    with pytest.raises(LauncherError, match="another numa-launcher answers there"):
        await second.start()
    await second.stop()
    assert (await asked(http, "GET", "/v1/plan"))[0] == 200


async def test_a_stale_socket_makes_way(tmp_path: Path, operations: FakeOperations) -> None:
    path = tmp_path / "c.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    server = ControlServer(str(path), None, operations)
    await server.start()
    await server.stop()


async def test_a_file_that_is_no_socket_stays(tmp_path: Path, operations: FakeOperations) -> None:
    path = tmp_path / "c.sock"
    path.write_text("precious")
    server = ControlServer(str(path), None, operations)
    with pytest.raises(LauncherError, match="cannot open the control socket"):
        await server.start()
    await server.stop()
    assert path.read_text() == "precious"


async def test_paths_that_can_not_be(tmp_path: Path, operations: FakeOperations) -> None:
    (tmp_path / "file").write_text("")
    for path, why in (
        (tmp_path / "file" / "c.sock", "exists|not a directory"),
        (tmp_path / ("x" * 120), "too long"),
    ):
        with pytest.raises(LauncherError, match=why) as caught:
            await ControlServer(str(path), None, operations).start()
        assert "control.socket" in caught.value.remedy


def test_unknown_group() -> None:
    assert group_id(None) is None
    with pytest.raises(LauncherError, match=r"cannot use control.group = 'no-such-group'") as caught:
        group_id("no-such-group")
    assert caught.value.remedy == "run: groupadd --system no-such-group"


def test_who_may_use_it() -> None:
    stranger, group = 4_000_001, 4_000_002
    assert may_use(Peer(1, 0, 0), owner=500, group=group), "root"
    assert may_use(Peer(1, 500, 9), owner=500, group=group), "the daemon's user"
    assert may_use(Peer(1, stranger, group), owner=500, group=group), "its primary group"
    assert may_use(Peer(1, stranger, 9, frozenset({7, group})), owner=500, group=group), "one of its others"
    assert not may_use(Peer(1, stranger, 9, frozenset({7})), owner=500, group=group)


def test_groups_by_name_where_the_kernel_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.control.connections.SO_PEERGROUPS", 9999)
    here, there = socket.socketpair()
    with here, there:

        class Transport(asyncio.BaseTransport):
            def get_extra_info(self, name: str, default: Any = None) -> Any:
                return here

        peer = peer_of(Transport())
    me = pwd.getpwuid(os.geteuid())
    assert peer is not None
    assert peer.groups == frozenset(os.getgrouplist(me.pw_name, os.getegid()))
    assert _groups_by_name(4_000_001, 7) == frozenset()


def test_peer_names() -> None:
    assert Peer(1, 0, 0).user == "root"
    assert Peer(1, 4_000_001, 0).user == "4000001"


async def test_the_peer_is_who_the_kernel_says() -> None:
    here, there = socket.socketpair()
    with here, there:
        _, writer = await asyncio.open_unix_connection(sock=here)
        assert peer_of(writer.transport) == Peer(
            os.getpid(), os.geteuid(), os.getegid(), frozenset(os.getgroups())
        )
        writer.close()
        await writer.wait_closed()
    assert peer_of(None) is None


async def test_another_user_is_refused(
    tmp_path: Path, operations: FakeOperations, caplog: pytest.LogCaptureFixture
) -> None:
    """The file's mode refuses first; this is the second lock, for a mode that somebody has changed."""
    path = str(tmp_path / "c.sock")
    server = ControlServer(path, None, operations, peer_of=lambda _: Peer(7, 4_000_001, 4_000_001))
    await server.start()
    async with aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(path)) as http:
        code, body = await asked(http, "POST", "/v1/slots/0/stop")
    await server.stop()
    assert (code, operations.asked) == (403, [])
    assert "not in its group" in body["error"]["message"]
    assert "refused POST /v1/slots/0/stop of Peer(" in caplog.text


# --- options, refusals, events, roles ---------------------------------------------------------------


async def test_options_of_a_verb(http: aiohttp.ClientSession, operations: FakeOperations) -> None:
    await asked(http, "POST", "/v1/slots/0/drain?deadline=12.5")
    await asked(http, "POST", "/v1/slots/1/stop?force=1")
    assert operations.requests == [
        Request(SlotCommand.DRAIN, deadline_s=12.5),
        Request(SlotCommand.STOP, force=True),
    ]


@pytest.mark.parametrize(
    "where",
    [
        "drain?deadline=soon",
        "drain?deadline=-1",
        "drain?deadline=nan",
        "drain?deadline=1e9",
        "stop?deadline=1",
    ],
)
async def test_bad_deadlines(http: aiohttp.ClientSession, operations: FakeOperations, where: str) -> None:
    code, body = await asked(http, "POST", f"/v1/slots/0/{where}")
    assert (code, operations.asked) == (400, [])
    assert "deadline" in body["error"]["message"]


async def test_a_refused_change_is_409_and_audited(
    http: aiohttp.ClientSession, operations: FakeOperations, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "launcher.control")
    operations.refused = True
    code, body = await asked(http, "POST", "/v1/slots/0/hold")
    assert (code, operations.asked) == (409, [])
    assert body["error"]["remedy"] == "add --force"
    (line,) = [record.__dict__ for record in caplog.records if record.name == "launcher.control"]
    assert (line["audit"], line["verb"], line["slot"], line["status"]) == ("refused", "hold", 0, 409)
    assert line["user"] == line["peer_user"] == pwd.getpwuid(os.getuid()).pw_name
    assert (line["peer_uid"], line["peer_pid"]) == (os.getuid(), os.getpid())
    assert "too few are left" in line["message"]
    assert (await asked(http, "POST", "/v1/slots/0/hold?force=1"))[0] == 200


@pytest.mark.parametrize(
    ("method", "where", "message"),
    [
        ("POST", "slots/0/drain?dedline=3", "cannot use option 'dedline' of POST /v1/slots/0/drain"),
        ("POST", "slots/0/start?force=1", "cannot use option 'force' of POST /v1/slots/0/start"),
        ("GET", "status?verbose=1", "cannot use option 'verbose' of GET /v1/status"),
        ("POST", "slots/0/stop?force=yes", "cannot use force='yes': it is a switch"),
        ("GET", "slots/0/logs?follow=on", "cannot use follow='on': it is a switch"),
        ("POST", "slots/٣/stop", "cannot use slot '٣': not a number"),
    ],
)
async def test_misspelt_options_change_nothing(
    http: aiohttp.ClientSession, operations: FakeOperations, method: str, where: str, message: str
) -> None:
    code, body = await asked(http, method, f"/v1/{where}")
    assert (code, operations.asked) == (400, [])
    assert body["error"]["message"].startswith(message)


async def test_config_and_metrics(http: aiohttp.ClientSession) -> None:
    assert await asked(http, "GET", "/v1/config") == (200, {"engine": {"env": {"X_TOKEN": "<redacted>"}}})
    async with http.get("/v1/metrics") as response:
        assert (response.status, response.content_type) == (200, "text/plain")
        assert (await response.text()).endswith("a_total 1\n")


async def test_the_history_is_passed_on_and_never_masked(
    http: aiohttp.ClientSession, operations: FakeOperations
) -> None:
    code, body = await asked(http, "GET", "/v1/history?span=1d&after=1795409836000&slots=02&redact=1")
    assert (code, body["span"], body["rows"]) == (200, "1d", [])
    assert (await asked(http, "GET", "/v1/history"))[1]["rows"] == [[2000, 1.5]]
    assert operations.histories == [("1d", 1_795_409_836_000, "2"), ("1h", 0, "all")]


async def test_redacted(http: aiohttp.ClientSession) -> None:
    """What the daemon knows as a secret is masked in any answer that is asked for so."""
    _, body = await asked(http, "GET", "/v1/slots/0/logs?redact=1")
    assert [line["text"] for line in body["lines"]] == ["one", "two", "<redacted>"]
    _, body = await asked(http, "GET", "/v1/slots/0/logs")
    assert body["lines"][-1]["text"] == "three"


async def test_the_audit_tells_no_secrets(
    http: aiohttp.ClientSession, operations: FakeOperations, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "launcher.control")
    await asked(http, "POST", "/v1/reload?set=engine.env.MY_TOKEN%3Dhush-hush-hush&set=layout.use_smt%3Dtrue")
    assert operations.reloads[-1][0][0] == "engine.env.MY_TOKEN=hush-hush-hush"
    (line,) = [record.__dict__ for record in caplog.records if record.name == "launcher.control"]
    assert "hush" not in str(line)
    assert "engine.env.MY_TOKEN=<redacted>" in line["path"]
    assert "layout.use_smt=true" in line["message"]


async def test_each_change_is_handed_to_the_audit_trail(
    tmp_path: Path, operations: FakeOperations, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the level of the log."""
    caplog.set_level(logging.ERROR, "launcher.control")
    actions: list[ControlAction] = []
    path = str(tmp_path / "c.sock")
    server = ControlServer(path, None, operations, record=actions.append)
    await server.start()
    async with aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(path)) as http:
        await asked(http, "GET", "/v1/status")
        await asked(http, "POST", "/v1/slots/1/drain?deadline=30")
        await asked(http, "POST", "/v1/reload?set=engine.env.MY_TOKEN%3Dhush-hush-hush")
        operations.refused = True
        await asked(http, "POST", "/v1/slots/0/hold")
    await server.stop()
    drain, reload, hold = actions
    assert (drain.verb, drain.arguments, drain.slot) == ("drain", "/v1/slots/1/drain?deadline=30", "1")
    assert (drain.status, drain.result, drain.reason) == (200, "done", "")
    assert (drain.peer.uid, drain.peer.pid) == (os.getuid(), os.getpid())
    assert (reload.verb, "hush" in str(reload)) == ("reload", False)
    assert (hold.status, hold.result, "too few are left" in hold.reason) == (409, "refused", True)


async def test_a_report_of_every_few_seconds_fills_neither_log_nor_audit_trail(
    tmp_path: Path, operations: FakeOperations, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "launcher.control")
    actions: list[ControlAction] = []
    path = str(tmp_path / "c.sock")
    server = ControlServer(path, None, operations, record=actions.append)
    await server.start()
    said = [
        {"key": f"k{number}", "budget": "1-tokens/day", "begins": "B", "amount": 5} for number in range(5000)
    ]
    async with aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(path)) as http:
        async with http.post("/v1/budgets/elsewhere", json={"spent": said}) as answer:
            assert (answer.status, await answer.json()) == (200, {"taken": 5000, "ignored": []})
        assert not actions
        assert not caplog.records
        async with http.post("/v1/budgets/elsewhere", data=b"x") as answer:
            assert answer.status == 400
    await server.stop()
    assert len(operations.told) == 1
    assert [(action.verb, action.result) for action in actions] == [("elsewhere", "refused")]


async def test_events(http: aiohttp.ClientSession) -> None:
    code, body = await asked(http, "GET", "/v1/events?tail=2&after=7")
    assert (code, [event["number"] for event in body["events"]]) == (200, [8, 9])
    assert (await asked(http, "GET", "/v1/events?tail=x"))[0] == 400
    assert (await asked(http, "GET", "/v1/events?after=" + "9" * 16))[0] == 400


async def test_a_request_that_takes_too_long_is_answered(
    http: aiohttp.ClientSession, operations: FakeOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never() -> str:
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr(operations, "metrics", never)
    monkeypatch.setattr("launcher.control.server.REQUEST_S", 0.01)
    code, body = await asked(http, "GET", "/v1/metrics")
    assert code == 503
    assert "it took more than 0.01 s" in body["error"]["message"]


async def test_a_verification_may_take_longer(
    http: aiohttp.ClientSession, operations: FakeOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel walks every page of them, on a busy machine for minutes."""
    verified = operations.verify

    async def slow(slot: int) -> None:
        await asyncio.sleep(0.2)
        await verified(slot)

    monkeypatch.setattr(operations, "verify", slow)
    monkeypatch.setattr("launcher.control.server.REQUEST_S", 0.01)
    code, body = await asked(http, "POST", "/v1/slots/0/verify")
    assert (code, body["verified"]["ok"]) == (200, True)


async def test_members_of_the_read_group_may_only_read(tmp_path: Path, operations: FakeOperations) -> None:
    readers = grp.getgrgid(os.getegid())
    gid = readers.gr_gid
    server = ControlServer(
        str(tmp_path / "c.sock"),
        None,
        operations,
        read_group=readers.gr_name,
        peer_of=lambda _: Peer(7, 4_000_001, gid),
    )
    await server.start()
    assert stat.S_IMODE((tmp_path / "c.sock").stat().st_mode) == 0o666
    server._allowed_group = 4_000_009  # a group that nobody here is in
    connector = aiohttp.UnixConnector(str(tmp_path / "c.sock"))
    async with aiohttp.ClientSession("http://localhost", connector=connector) as http:
        assert (await asked(http, "GET", "/v1/status"))[0] == 200
        code, body = await asked(http, "POST", "/v1/slots/0/stop")
        assert (code, operations.asked) == (403, [])
        assert body["error"]["message"] == "cannot change anything here: user '4000001' may only read"
        assert "control.group" in body["error"]["remedy"]
        gid = 4_000_001
        code, body = await asked(http, "GET", "/v1/status")
        assert code == 403
        assert "user '4000001' is not in its group" in body["error"]["message"]
    await server.stop()


async def test_reload(http: aiohttp.ClientSession, operations: FakeOperations) -> None:
    assert await asked(http, "GET", "/v1/reload") == (200, {"stage": "none"})
    code, body = await asked(http, "POST", "/v1/reload?dry_run=1&set=layout.use_smt%3Dtrue&set=a.b=1")
    assert (code, body["stage"]) == (200, "dry run")
    assert operations.reloads == [(["layout.use_smt=true", "a.b=1"], True, False)]
    code, body = await asked(http, "POST", "/v1/reload?" + "set=a&" * 65)
    assert (code, body["error"]["remedy"]) == (400, "put them into the configuration file (at most 64)")
    operations.refused = True
    assert (await asked(http, "POST", "/v1/reload"))[0] == 409
