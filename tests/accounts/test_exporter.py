"""The exporter against receivers that work, refuse, hang and are gone."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

import pytest
from support.otlp_receiver import receiving
from support.ports import free_port

from launcher.accounts import exporter as module
from launcher.accounts.ended_request import EndedRequest, Trace
from launcher.accounts.exporter import Dropped, Exporter
from launcher.base import writer as base
from launcher.base.errors import LauncherError
from launcher.base.writer import Writer

MAX_WAITING = 200
STOP_S = 20.0


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EVERY_S", "MAX_RETRY_S"):
        monkeypatch.setattr(module, name, 0.02)
    monkeypatch.setattr(base, "RETRY_S", 0.02)
    monkeypatch.setattr(module, "MAX_WAITING", MAX_WAITING)
    monkeypatch.setattr(module, "BATCH", 64)


def started(exporter: Exporter) -> Writer:
    writer = Writer("traces", exporter)
    writer.start()
    return writer


def problem(exporter: Exporter) -> str:
    found = exporter.problem
    return "" if found is None else found.text


def trace(number: int = 1) -> EndedRequest:
    return EndedRequest(
        ended_at=1000.0, request_id=f"r{number}", model="m", path="/v1/completions", outcome="completed", status=200,
        slot=0, duration_s=1.0, queued_s=0.1, first_byte_s=0.2, attempts=1,
        generation=1, admitted_s=0.0, trace=Trace(f"{number:032x}", number << 16),
    )  # fmt: skip


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_traces_arrive() -> None:
    with receiving() as receiver:
        exporter = Exporter(
            receiver.url, "1.2", {"OTEL_SERVICE_NAME": "front", "OTEL_EXPORTER_OTLP_HEADERS": "X-Key=a%20b"}
        )
        writer = started(exporter)
        for number in range(1, 201):
            exporter.put(trace(number))
        spans = receiver.wait(600)
        writer.stop(STOP_S)
    assert {span.trace_id for span in spans} == {f"{number:032x}" for number in range(1, 201)}
    assert {span.service for span in spans} == {"front"}
    assert set(receiver.paths) == {"/v1/traces"}
    assert {headers["X-Key"] for headers in receiver.headers} == {"a b"}
    assert (exporter.exported, exporter.lost, exporter.waiting, exporter.problem) == (200, 0, 0, None)


def test_traces_that_come_one_by_one_share_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.3)
    with receiving() as receiver:
        exporter = Exporter(receiver.url, "1", {})
        writer = started(exporter)
        for number in range(1, 201):
            exporter.put(trace(number))
            time.sleep(0.003)
        writer.stop(STOP_S)
    assert exporter.exported == 200
    # At least one each 0.3 s, and two that fill up at the end.
    assert len(receiver.texts) < 40


def test_a_path_that_is_given_stays() -> None:
    with receiving() as receiver:
        for path in ("/otlp", "/otlp/v1/traces"):
            exporter = Exporter(receiver.url + path, "1", {})
            writer = started(exporter)
            exporter.put(trace())
            writer.stop(STOP_S)
    assert receiver.paths == ["/otlp/v1/traces"] * 2


def test_what_waits_is_sent_at_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 60.0)
    with receiving() as receiver:
        exporter = Exporter(receiver.url, "1", {})
        writer = started(exporter)
        for number in range(1, 150):
            exporter.put(trace(number))
        writer.stop(STOP_S)
        assert len(receiver.spans) == 3 * 149
    assert (exporter.exported, exporter.lost) == (149, 0)


def test_a_dead_collector_is_said_once_and_traces_arrive_when_it_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = free_port()
    exporter = Exporter(f"http://127.0.0.1:{port}", "1", {})
    writer = started(exporter)
    with caplog.at_level(logging.INFO, "launcher.tracing"):
        for number in range(1, MAX_WAITING + 101):
            exporter.put(trace(number))
        until(lambda: "connection refused" in problem(exporter))
        time.sleep(0.2)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert f"cannot send traces to 'http://127.0.0.1:{port}': connection refused" in caplog.text
        lost = exporter.dropped[Dropped.QUEUE_FULL]
        assert 0 < lost <= 100
        with receiving(port) as receiver:
            receiver.wait(3 * (MAX_WAITING + 100 - lost))
            until(lambda: exporter.problem is None)
            writer.stop(STOP_S)
    assert "are sent again" in caplog.text
    assert (exporter.exported, exporter.waiting) == (MAX_WAITING + 100 - lost, 0)


def test_a_collector_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.3)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        exporter = Exporter(f"http://127.0.0.1:{sock.getsockname()[1]}", "1", {})
        writer = started(exporter)
        begin = time.monotonic()
        for number in range(1, 10 * MAX_WAITING):
            exporter.put(trace(number))
        until(lambda: "no answer within" in problem(exporter))
        writer.stop(0.6)
        assert time.monotonic() - begin < 8
    assert exporter.exported == 0
    assert exporter.lost == 10 * MAX_WAITING - 1
    assert exporter.dropped[Dropped.STOPPED] <= MAX_WAITING + module.BATCH


@pytest.mark.parametrize("status", [400, 401, 404, 301])
def test_what_is_refused_is_dropped_and_counted(status: int, caplog: pytest.LogCaptureFixture) -> None:
    with receiving() as receiver:
        receiver.answers = [(status, b'{"message":"no\x1b[2J"}')]
        exporter = Exporter(receiver.url, "1", {})
        exporter.put(trace(1))
        writer = started(exporter)
        until(lambda: f"it answered {status}: " in caplog.text)  # it is counted first
        assert exporter.dropped[Dropped.REFUSED] == 1
        assert "\x1b" not in caplog.text
        exporter.put(trace(2))
        receiver.wait(3)
        writer.stop(STOP_S)
    assert exporter.exported == 1


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_what_may_be_taken_later_is_sent_again(status: int) -> None:
    with receiving() as receiver:
        receiver.answers = [(status, b"")] * 2
        exporter = Exporter(receiver.url, "1", {})
        exporter.put(trace())
        writer = started(exporter)
        receiver.wait(3)
        writer.stop(STOP_S)
        assert len(receiver.texts) == 3
    assert (exporter.exported, exporter.lost) == (1, 0)


def test_a_trace_that_comes_while_a_message_waits_is_in_the_next_one() -> None:
    with receiving() as receiver:
        receiver.answers = [(503, b"")]
        exporter = Exporter(receiver.url, "1", {})
        exporter.put(trace(1))
        writer = started(exporter)
        until(lambda: exporter.problem is not None or exporter.exported == 1)
        exporter.put(trace(2))
        receiver.wait(6)
        writer.stop(STOP_S)
        assert len({span.trace_id for span in receiver.spans}) == 2
    assert (exporter.exported, exporter.lost, exporter.waiting) == (2, 0, 0)


def test_spans_that_are_rejected_are_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with receiving() as receiver:
        receiver.answers = [(200, b'{"partialSuccess":{"rejectedSpans":"1","errorMessage":"too old"}}')]
        exporter = Exporter(receiver.url, "1", {})
        exporter.put(trace())
        writer = started(exporter)
        until(lambda: exporter.dropped[Dropped.REFUSED] == 1)
        assert exporter.flush(60) is False  # nothing was sent since
        exporter.put(trace(2))
        until(lambda: exporter.problem is None)
        writer.stop(STOP_S)
    assert "it rejected 1 spans: too old" in caplog.text


def test_headers_that_cannot_be_sent() -> None:
    with pytest.raises(LauncherError, match="OTEL_EXPORTER_OTLP_HEADERS is not a list of headers"):
        Exporter("http://127.0.0.1:1", "1", {"OTEL_EXPORTER_OTLP_HEADERS": "a=b%0d%0ac"})


def test_without_start_nothing_is_sent() -> None:
    before = threading.active_count()
    exporter = Exporter("http://127.0.0.1:1", "1", {})
    exporter.put(trace())
    Writer("traces", exporter).stop(STOP_S)
    assert threading.active_count() == before
