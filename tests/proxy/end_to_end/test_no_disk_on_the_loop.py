"""The event loop makes no file system call for a request, whatever is kept of it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon_logs import FakeJournal
from support.deployments import CLOUD
from support.deployments import made as deployment
from support.keys import new_key
from support.ledger_file import entries
from support.otlp_receiver import receiving
from support.proxy_under_test import Build, until

from launcher.accounts.audit_verify import verify
from launcher.accounts.budgets import Budgets
from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger_file import open_reader
from launcher.base import log_lines, watched_file
from launcher.base.money import PICOS
from launcher.base.writer import Sink
from launcher.daemon.accounts import Accounts

REQUESTS = 40
# Functions of os that reach a file system or a device; what else opens or lists files raises an event of the interpreter.
CALLS = (
    "access", "fdatasync", "fsync", "fstat", "ftruncate", "lstat", "pread", "pwrite", "read", "stat", "statvfs", "sync",
    "write", "writev",
)  # fmt: skip
EVENTS = ("open", "os.", "shutil.", "sqlite3.", "subprocess.", "fcntl.")


class Watch:
    """Calls of one thread, while it is on."""

    def __init__(self) -> None:
        self.thread = 0
        self.calls: list[str] = []

    def hook(self, event: str, arguments: Any) -> None:
        if self.thread and event.startswith(EVENTS) and threading.get_ident() == self.thread:
            self.calls.append(f"{event}{arguments}")

    def wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any, **more: Any) -> Any:
            if threading.get_ident() == self.thread:
                self.calls.append(f"os.{name}{given}")
            return call(*given, **more)

        return watched


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    found = Watch()
    sys.addaudithook(found.hook)  # it stays, and costs nothing while it is off
    for name in CALLS:
        monkeypatch.setattr(os, name, found.wrapped(name, getattr(os, name)))
    yield found
    found.thread = 0


Logged = Callable[[], list[str]]
"""The access lines that were written."""


@pytest.fixture(params=["text", "journal"])
def logged(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Logged]:
    """Access lines go to a file or to the journal, as set_up does it."""
    access = logging.getLogger(log_lines.ACCESS)
    before = access.handlers[:], access.propagate, access.level
    with contextlib.ExitStack() as stack:
        handler: log_lines.QueuedHandler
        if request.param == "journal":
            journal = stack.enter_context(contextlib.closing(FakeJournal()))
            handler = journal.handler
            found = lambda: [entry["MESSAGE"] for entry in journal.entries]  # noqa: E731
        else:
            path = tmp_path / "log"
            handler = log_lines.LineHandler(stack.enter_context(path.open("w")))
            stack.callback(handler.close)
            stack.callback(handler.flush)
            found = lambda: path.read_text().splitlines()  # noqa: E731
        access.handlers[:], access.propagate = [handler], False
        access.setLevel(logging.INFO)
        try:
            yield found
        finally:
            access.handlers[:], access.propagate = before[:2]
            access.setLevel(before[2])


class Records:
    """Records of ended requests, when they are made and when they are taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[EndedRequest] = []
        self.taken: dict[str, list[EndedRequest]] = {}
        monkeypatch.setattr("launcher.proxy.ended.EndedRequest", self._make)
        for owner, name in ((Sink, "put"), (Budgets, "spend")):
            monkeypatch.setattr(owner, name, self._taking(getattr(owner, name)))

    def _make(self, *values: Any) -> EndedRequest:
        self.made.append(EndedRequest(*values))
        return self.made[-1]

    def _taking(self, take: Callable[..., None]) -> Callable[..., None]:
        def taking(taker: Any, entry: Any) -> None:
            if isinstance(entry, EndedRequest):
                self.taken.setdefault(type(taker).__name__, []).append(entry)
            take(taker, entry)

        return taking


async def test_a_request_makes_no_file_system_call(
    build: Build, tmp_path: Path, watch: Watch, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = Records(monkeypatch)
    monkeypatch.setattr(watched_file, "LOOK_EVERY_S", 0.0)  # each request looks for a change of the keys
    folder, trail = tmp_path / "state", tmp_path / "trail"
    key = new_key(tmp_path / "keys", "ann", budget="1M-tokens/day")
    with receiving() as receiver:
        config = deployment(
            usage={"path": str(folder / "usage.db")}, audit={"path": str(trail), "strict": True},
            telemetry={"otlp_endpoint": receiver.url, "otlp_sampling": 1.0}, proxy={"overflow": (CLOUD,)},
        ).config  # fmt: skip
        accounts = Accounts(config)
        await accounts.start(dict)
        proxy = await build(
            api_keys_file=str(tmp_path / "keys"), accounting=accounts.accounting, access_log="all"
        )
        await proxy.engine(0)
        cap = accounts.accounting.caps["cloud"]

        async def ask(number: int) -> None:
            body = {"model": "m", "messages": [], "max_tokens": 5, "stream": bool(number % 2)}
            head = {"Authorization": f"Bearer {key}"}
            cap.reserve(PICOS)
            async with proxy.client.post(
                "/v1/chat/completions", data=json.dumps(body), headers=head
            ) as answer:
                assert answer.status == 200
                await answer.read()
            cap.settle(PICOS, PICOS // 1000)

        for number in range(4):
            await ask(number)
        watch.thread = threading.get_ident()
        for number in range(REQUESTS):
            await ask(number)
        watch.thread = 0
        taken = records.taken | {"Timelines": list(proxy.server.requests._timelines._recent)}
        await proxy.stack.aclose()
        await accounts.stop()
        await until(lambda: len(logged()) == REQUESTS + 4)
        assert len({span.trace_id for span in receiver.spans}) == REQUESTS + 4
    assert watch.calls == []
    made = [*map(id, records.made)]
    assert len(made) == REQUESTS + 4  # one for each request, which all get
    assert {taker: [*map(id, entries)] for taker, entries in taken.items()} == dict.fromkeys(
        ("Ledger", "Budgets", "AuditTrail", "Exporter", "Timelines"), made
    )
    reader = open_reader(folder / "usage.db")
    assert len(list(entries(reader, 0, 1e12))) == REQUESTS + 4
    reader.close()
    assert verify(trail).kinds["request"] == REQUESTS + 4


def test_the_watch_sees_calls(watch: Watch, tmp_path: Path) -> None:
    watch.thread = threading.get_ident()
    (tmp_path / "x").write_text("x")
    os.stat(tmp_path)  # noqa: PTH116
    watch.thread = 0
    assert any(call.startswith("open") for call in watch.calls)
    assert any(call.startswith("os.stat") for call in watch.calls)
