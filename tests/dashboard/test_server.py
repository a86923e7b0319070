"""The dashboard as browsers, pages of other origins and strangers see it."""

from __future__ import annotations

import gzip
import hmac
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec.structs import replace
from support.fake_operations import CAUSE, FakeOperations, slot_status

from launcher.base.errors import LauncherError
from launcher.control.server import ControlServer
from launcher.dashboard.api import ControlReader
from launcher.dashboard.server import Dashboard, has_token

TOKEN = "t0ken"
GRANTED = {"Authorization": f"Bearer {TOKEN}"}
DATA = ("now", "fleet", "topology", "measurements", "usage", "slots/0", "requests/a", "history?span=1h")
HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[2J</script>"


@pytest.fixture
def operations() -> FakeOperations:
    return FakeOperations()


@pytest.fixture
async def socket_path(tmp_path: Path, operations: FakeOperations) -> AsyncIterator[str]:
    server = ControlServer(str(tmp_path / "c.sock"), None, operations)
    await server.start()
    yield str(tmp_path / "c.sock")
    await server.stop()


@pytest.fixture
async def page(socket_path: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a dashboard."""
    control = ControlReader(socket_path)
    runner = web.AppRunner(Dashboard(control, TOKEN).application(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (address,) = runner.addresses
    async with aiohttp.ClientSession(f"http://127.0.0.1:{address[1]}", auto_decompress=False) as session:
        yield session
    await runner.cleanup()
    await control.close()


async def asked(page: aiohttp.ClientSession, path: str, **headers: str) -> tuple[int, Any]:
    async with page.get(
        f"/api/{path}", headers=GRANTED | {"Accept-Encoding": "identity"} | headers
    ) as response:
        assert response.content_type == "application/json"
        return response.status, json.loads(await response.read())


async def test_the_page_needs_no_token(page: aiohttp.ClientSession) -> None:
    for path in ("/", "/static/app.js", "/static/icon.svg"):
        async with page.get(path) as response:
            assert response.status == 200
            etag = response.headers["ETag"]
        async with page.get(path, headers={"If-None-Match": etag}) as response:
            assert (response.status, await response.read()) == (304, b"")


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer t0keN",
        "Basic t0ken",
        "Bearer t\u00f6ken",
        "Bearer " + "x" * 4000,
    ],
)
async def test_data_needs_the_token(page: aiohttp.ClientSession, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    for path in DATA:
        async with page.get(f"/api/{path}", headers=headers) as response:
            body = await response.json()
            assert response.status == 401, path
            assert response.headers["WWW-Authenticate"] == "Bearer", path
            assert body["error"]["remedy"] == "open the link that the dashboard printed", path


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def note(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", note)
    assert has_token("Bearer t0ken", TOKEN)
    assert not has_token("Bearer t", TOKEN)
    assert compared == [(b"t0ken", b"t0ken"), (b"t", b"t0ken")]


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8430", "127.0.0.1.evil.example", "localhost.", "", "10.0.0.1", "[::2]:1"],
)
async def test_other_host_names_are_refused(page: aiohttp.ClientSession, host: str) -> None:
    for path in ("/", "/static/app.js", "/api/now"):
        async with page.get(path, headers=GRANTED | {"Host": host}) as response:
            assert response.status == 421


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:9000", "LOCALHOST:1", "127.0.0.1", "[::1]", "[::1]:8430"]
)
async def test_this_machine_has_several_names(page: aiohttp.ClientSession, host: str) -> None:
    assert (await asked(page, "now", Host=host))[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
async def test_it_only_reads(page: aiohttp.ClientSession, method: str) -> None:
    for path in ("/", "/static/app.js", "/api/now", "/api/slots/0", "/nowhere"):
        async with page.request(method, path, headers=GRANTED) as response:
            assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD"), path


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "same-origin"}, 200), ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        # Another port of this machine, perhaps another user's.
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403), ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "http://localhost:9000", "Host": "localhost:9000"}, 200),
    ],
)  # fmt: skip
async def test_pages_of_other_origins_get_no_data(
    page: aiohttp.ClientSession, headers: dict[str, str], status: int
) -> None:
    assert (await asked(page, "now", **headers))[0] == status


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/now", "/api/slots/99", "/nowhere"])
async def test_every_response_has_the_headers(page: aiohttp.ClientSession, path: str) -> None:
    async with page.get(path, headers=GRANTED) as response:
        found = response.headers
    if path != "/static/app.js":
        policy = found["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "require-trusted-types-for 'script'" in policy
        assert "unsafe" not in policy
        assert found["X-Frame-Options"] == "DENY"
        assert (found["Referrer-Policy"], found["Cross-Origin-Resource-Policy"]) == (
            "no-referrer",
            "same-origin",
        )
    assert found["X-Content-Type-Options"] == "nosniff"
    assert found["Cache-Control"] == ("no-cache" if path in {"/", "/static/app.js"} else "no-store")
    assert not [name for name in found if name.lower().startswith("access-control-")]
    assert "Server" not in found


@pytest.mark.parametrize(
    "name",
    [
        "..%2fserver.py",
        "%2e%2e%2fserver.py",
        ".hidden.js",
        "server.py",
        "a%00.js",
        "none.js",
        "x" * 300 + ".js",
    ],
)
async def test_only_the_pages_files_are_served(page: aiohttp.ClientSession, name: str) -> None:
    async with page.get(f"/static/{name}") as response:
        assert response.status == 404


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("slots/99", 404, "no such slot"), ("slots/x", 400, "not a number"), ("slots/" + "9" * 4000, 400, "not a number"),
        ("slots/٣", 400, "not a number"),
        ("requests/" + "a" * 201, 400, "201 characters"), ("requests/" + "a" * 7000, 400, "characters"),
        ("history?span=2h", 400, "no such span"), ("history?after=-1", 400, "not milliseconds"),
        ("history?after=" + "9" * 16, 400, "not milliseconds"), ("now?events_after=x", 400, "not a number"),
        ("history?slots=all", 400, "not a number"), ("nothing", 404, "cannot find"),
        ("fleet", 404, "started without --fleet"),
    ],
)  # fmt: skip
async def test_bad_names_are_refused_with_a_remedy(
    page: aiohttp.ClientSession, path: str, status: int, words: str
) -> None:
    code, answer = await asked(page, path)
    assert code == status
    assert words in answer["error"]["message"]
    assert answer["error"]["remedy"]
    assert len(answer["error"]["message"]) < 300


async def test_hostile_texts_stay_texts(page: aiohttp.ClientSession, operations: FakeOperations) -> None:
    cause = replace(CAUSE, message=HOSTILE, evidence=(HOSTILE,))
    operations.slots[0] = slot_status(
        0, model=HOSTILE, state="failed", last_cause=cause, last_cause_generation=1
    )
    operations.lines = [HOSTILE]
    shown = "<img src=x onerror=alert(1)>\\u202e\\x1b[2J</script>"
    _, now = await asked(page, "now")
    assert now["status"]["slots"][0]["model"] == shown
    assert shown in now["verdict"]["problems"][0]["what"]
    _, slot = await asked(page, "slots/0")
    assert (
        [line["text"] for line in slot["logs"]] == [line["text"] for line in slot["why"]["lines"]] == [shown]
    )
    _, refused = await asked(page, "history?span=" + "%3Cimg%20onerror%3E")
    assert "<img onerror>" in refused["error"]["message"]


async def test_answers_are_compressed(page: aiohttp.ClientSession) -> None:
    async with page.get("/api/now", headers=GRANTED | {"Accept-Encoding": "gzip, br"}) as response:
        assert (response.headers["Content-Encoding"], response.headers["Vary"]) == ("gzip", "Accept-Encoding")
        assert json.loads(gzip.decompress(await response.read()))["answers"]
        assert response.headers["Age"] == "0"


async def test_the_page_of_one_slot(page: aiohttp.ClientSession) -> None:
    _, found = await asked(page, "slots/1")
    assert found["slot"]["slot"] == 1
    assert [line["text"] for line in found["logs"]] == ["one", "two", "<redacted>"]


@pytest.mark.parametrize(
    ("path", "rows"), [("topology", "cores"), ("measurements", "measurements"), ("history", "rows")]
)
async def test_what_the_daemon_cannot_answer_is_empty(
    page: aiohttp.ClientSession,
    operations: FakeOperations,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    rows: str,
) -> None:
    def refuse(*_: object) -> object:
        raise LauncherError(f"cannot show {path}: it is off", "set it to true")

    monkeypatch.setattr(operations, path, refuse)
    code, found = await asked(page, path)
    assert (code, found[rows], found["trouble"]) == (
        200,
        [],
        f"cannot show {path}: it is off; set it to true",
    )


async def test_without_a_ledger_usage_is_unknown(page: aiohttp.ClientSession) -> None:
    unknown = {"keys": None, "models": None, "cost": None, "budgets": [], "latest": None}
    assert await asked(page, "usage") == (200, unknown)
