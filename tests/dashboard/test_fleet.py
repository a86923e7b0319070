"""The ingress' status, read once for all pages; an ingress that is gone, hangs, or is of another version."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from browser.planted_fleet import planted
from support.fakes import FakeClock

from launcher.base.errors import LauncherError
from launcher.control.client import UnreachableError
from launcher.dashboard import fleet as module
from launcher.dashboard.fleet import Fleet, FleetAt, read_status
from launcher.dashboard.poll import POLL_S, Packed


@dataclass
class FakeIngress:
    text: bytes = field(default_factory=lambda: json.dumps(planted(3)).encode())
    error: LauncherError | None = None
    asked: int = 0

    async def read(self, _path: str) -> bytes:
        self.asked += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return self.text


def said(packed: Packed) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(packed.body)
    return found


def made(ingress: FakeIngress, clock: FakeClock) -> Fleet:
    return Fleet(FleetAt(status="/s"), read=ingress.read, clock=clock, monotonic=clock)


async def test_twenty_pages_ask_once() -> None:
    ingress, clock = FakeIngress(), FakeClock()
    fleet = made(ingress, clock)
    frames = await asyncio.gather(*(fleet.frame() for _ in range(20)))
    assert len({id(frame) for frame in frames}) == 1
    clock.now += POLL_S / 2
    await fleet.frame()
    assert ingress.asked == 1
    clock.now += POLL_S / 2
    await fleet.frame()
    assert ingress.asked == 2


@pytest.mark.parametrize("gone", [True, False])
async def test_hosts_stay_on_the_page_while_the_ingress_is_gone(*, gone: bool) -> None:
    ingress, clock = FakeIngress(), FakeClock()
    fleet = made(ingress, clock)
    assert said(await fleet.frame())["verdict"]["line"].startswith("OK 3/3 hosts serving")
    if gone:
        ingress.error = UnreachableError("cannot reach the ingress on '/s': refused", "start it")
    else:
        ingress.text = b"{"
    clock.now += 61
    for _ in range(2):  # asked as seldom as before
        found = said(await fleet.frame())
    assert (ingress.asked, found["answers"], found["age_s"], len(found["hosts"])) == (2, False, 61.0, 3)
    assert found["verdict"]["level"] == "unknown"
    assert found["verdict"]["line"].startswith("NO ANSWER for 1m01s: cannot rea")
    ingress.error, ingress.text = None, FakeIngress().text
    clock.now += POLL_S
    assert said(await fleet.frame())["answers"]


async def test_a_certificate_that_has_expired_is_on_the_page() -> None:
    file = {"what": "certificate of the ingress", "path": "/c.pem", "state": "expired", "since": 0.0}
    told = planted(3) | {
        "addresses": ["10.0.0.1"],
        "files": [file | {"why": "it expired", "remedy": "renew it"}],
        "troubles": ["x"],
    }
    found = said(await made(FakeIngress(text=json.dumps(told).encode()), FakeClock()).frame())["verdict"]
    assert found["line"].startswith("DEGRADED 3/3 hosts serving; ingress 10.0.0.1: it expired (for ")
    assert [(one["level"], one["remedy"]) for one in found["problems"]] == [
        ("bad", "renew it"),
        ("warn", "journalctl -u numa-launcher-ingress"),
    ]


async def test_an_ingress_that_never_answered(tmp_path: Path) -> None:
    path = tmp_path / "ingress.sock"
    found = said(await Fleet(FleetAt(status=str(path))).frame())
    assert (found["age_s"], found["hosts"], found["ingress"]) == (None, [], None)
    assert found["verdict"]["line"] == (
        f"NO ANSWER: cannot reach the ingress on '{path}': no such file or directory"
    )
    assert "numa-launcher-ingress" in found["verdict"]["problems"][0]["remedy"]


async def test_an_ingress_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.05)
    over = asyncio.Event()

    async def hang(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    async with await asyncio.start_unix_server(hang, tmp_path / "s"):
        with pytest.raises(UnreachableError, match=r"no answer within 0\.05 s"):
            await read_status(str(tmp_path / "s"))
        over.set()


async def test_a_socket_of_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_path: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(asyncio, "open_unix_connection", refuse)
    with pytest.raises(UnreachableError, match="permission denied") as caught:
        await read_status("/s")
    assert "read_group" in caught.value.remedy
