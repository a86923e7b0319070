"""A peer of the control socket writes no line of the log but its own, and nothing that a terminal obeys."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support.daemon_logs import Logs, collected
from support.fake_operations import FakeOperations

from launcher.control.server import ControlServer

FORGED = "\n01:02:03 INFO    POST /v1/slots/0/stop by root (uid 0, pid 1): 200"
CODES = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202etxt\u2066\u2028\r\x7f"


@pytest.fixture
def logs() -> Iterator[Logs]:
    with collected(logging.INFO) as made:
        yield made


@pytest.fixture
async def path(tmp_path: Path) -> AsyncIterator[str]:
    server = ControlServer(str(tmp_path / "c.sock"), None, FakeOperations())
    await server.start()
    yield str(tmp_path / "c.sock")
    await server.stop()


async def ask(path: str, method: str, target: str) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    found: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return found


@pytest.mark.parametrize("words", [FORGED, CODES, FORGED * 20])
@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", "/v1/slots/0{}/stop"),
        ("POST", "/v1/slots/0/stop{}"),
        ("POST", "/v1/{}"),
        ("POST", "/v1/reload?set={}"),
        ("POST", "/v1/slots/0/drain?deadline={}"),
        ("POST", "/v1/slots/0/drain?{}=1"),
        ("POST", "/v1/slots/0/stop?force={}"),
        ("GET", "/v1/slots/0{}/logs"),
        ("GET", "/v1/slots/0/logs?tail={}"),
    ],
)
async def test_a_request_is_one_line(path: str, logs: Logs, method: str, target: str, words: str) -> None:
    reply = await ask(path, method, target.format(quote(words)))
    wanted = 1 if method == "POST" else 0
    lines = logs.text.getvalue().splitlines()
    assert len(lines) == wanted
    assert not [line for line in lines if not line.isprintable()]
    assert len(logs.entries) == wanted
    for entry in logs.entries:
        assert all(str(value).isprintable() for value in entry.values()), entry
    for event in logs.ring.last(10):
        assert event["message"].isprintable()
        assert all(str(value).isprintable() for value in event["fields"].values())
    if "error" in reply:
        assert reply["error"]["message"].isprintable()
        assert len(reply["error"]["message"]) < 1024


async def test_quoted_text_is_escaped_by_every_logger(logs: Logs) -> None:
    """A name of a process, a word of a library: no call has to think of it."""
    log = logging.getLogger("launcher.instances")
    try:
        raise ValueError(f"it said {CODES}{FORGED}")
    except ValueError:
        log.exception(
            "slot %d: %s%s", 0, CODES, FORGED, extra={"slot": 0, "name_of_it": CODES, "many": (FORGED,)}
        )
    text = logs.text.getvalue()
    assert not [sign for sign in text if not sign.isprintable() and sign != "\n"]
    assert text.splitlines()[0].endswith("(uid 0, pid 1): 200")
    (entry,) = logs.entries
    assert entry["NUMA_LAUNCHER_NAME_OF_IT"].isprintable()
    assert entry["NUMA_LAUNCHER_MANY"].isprintable()
    assert not [sign for sign in entry["MESSAGE"] if not sign.isprintable() and sign != "\n"]


async def test_a_long_field_is_cut_by_every_logger(logs: Logs) -> None:
    logging.getLogger("launcher.x").info("%s", "A" * 10_000_000, extra={"said": "A" * 10_000_000})
    assert len(logs.text.getvalue()) < 10_000
    assert len(str(logs.entries)) < 20_000
    assert len(json.dumps(logs.ring.last(1))) < 20_000
