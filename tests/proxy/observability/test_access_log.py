"""The access log: which requests get a line, when lines are written, and how."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.requests import request_of

from launcher.accounts.ended_request import EndedRequest
from launcher.proxy.observability.access_log import ACCESS, MOST_LINES, AccessLog
from launcher.proxy.request.actions import Outcome
from launcher.proxy.request.record import Request


def ended(number: int = 0, status: int = 200, path: str = "/v1/models", **more: object) -> Request:
    made = request_of()
    values = {
        "request_id": f"r{number}",
        "method": "GET",
        "path": path,
        "status": status,
        "duration_s": 1.0,
        "outcome": Outcome.COMPLETED if status < 500 else Outcome.FAILED,
        **more,
    }
    made.ended = EndedRequest(1.0, **values)  # type: ignore[arg-type]
    return made


class Writer(logging.Handler):
    def __init__(self, *, takes_fields: bool) -> None:
        super().__init__()
        self.takes_fields = takes_fields
        self.writes: list[list[tuple[int, str, Mapping[str, object]]]] = []

    def write_lines(self, logger: str, lines: Sequence[tuple[int, str, Mapping[str, object]]]) -> None:
        assert logger == "launcher.access"
        self.writes.append(list(lines))

    def emit(self, record: logging.LogRecord) -> None:
        raise AssertionError("lines are written many at once")


@pytest.fixture
def attach() -> Iterator[Callable[[Writer], None]]:
    """Make a handler the access log's only one."""
    level = ACCESS.level

    def attach(writer: Writer) -> None:
        ACCESS.handlers[:], ACCESS.propagate = [writer], False
        ACCESS.setLevel(logging.DEBUG)

    yield attach
    ACCESS.handlers[:], ACCESS.propagate = [], True
    ACCESS.setLevel(level)


def test_a_record_has_no_field_for_a_prompt() -> None:
    assert not {"body", "prompt", "messages", "text"} & set(EndedRequest.__struct_fields__)


def test_lines_wait_for_the_next_turn_of_the_event_loop(attach: Callable[[Writer], None]) -> None:
    attach(writer := Writer(takes_fields=False))
    soon: list[Callable[[], None]] = []
    log = AccessLog("all", soon.append)
    log.add(ended(1, duration_s=0.25), None, 0.0)
    log.add(ended(2, path="/health", duration_s=0.5), None, 0.0)
    log.add(ended(3, 502, "/a\nb", slot=3, reason="it\ndied", duration_s=0.5), None, 0.0)
    assert not writer.writes
    (flush,) = soon
    flush()
    flush()
    assert writer.writes == [
        [
            (logging.INFO, "GET /v1/models 200 slot=- 250.0 ms completed r1", {}),
            (logging.DEBUG, "GET /health 200 slot=- 500.0 ms completed r2", {}),
            (logging.INFO, "GET /a\\nb 502 slot=3 500.0 ms failed r3: it\\ndied", {}),
        ]
    ]
    log.add(ended(4), None, 0.0)
    assert len(soon) == 2


@given(st.lists(st.booleans(), max_size=300))
def test_no_line_is_lost_or_written_twice(turns: list[bool]) -> None:
    writer = Writer(takes_fields=True)
    ACCESS.handlers[:], ACCESS.propagate = [writer], False
    ACCESS.setLevel(logging.INFO)
    soon: list[Callable[[], None]] = []
    log = AccessLog("all", soon.append)
    for number, turn in enumerate(turns):
        log.add(ended(number), None, 0.0)
        if turn:
            while soon:
                soon.pop()()
    log.flush()
    ACCESS.handlers[:], ACCESS.propagate = [], True
    ACCESS.setLevel(logging.NOTSET)
    written = [fields["request_id"] for lines in writer.writes for _, _, fields in lines]
    assert written == [f"r{number}" for number in range(len(turns))]
    assert all(len(lines) <= MOST_LINES for lines in writer.writes)


@pytest.mark.parametrize(("wanted", "seen"), [("all", ["r1", "r2"]), ("errors", ["r2"]), ("off", [])])
def test_only_wanted_requests_get_a_line(
    wanted: str, seen: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "launcher.access")
    log = AccessLog(wanted, lambda _flush: None)
    log.add(ended(1), None, 0.0)
    log.add(ended(2, 404), None, 0.0)
    log.add(ended(3, path="/load"), None, 0.0)
    log.flush()
    assert [record.__dict__["request_id"] for record in caplog.records] == seen


def test_other_handlers_get_records_with_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "launcher.access")
    log = AccessLog("all", lambda _flush: None)
    log.add(ended(1, slot=2), None, 0.0)
    log.flush()
    (record,) = caplog.records
    assert record.getMessage() == "GET /v1/models 200 slot=2 1000.0 ms completed r1"
    assert (record.levelname, record.__dict__["slot"], record.__dict__["duration_s"]) == ("INFO", 2, 1.0)
    assert logging.Formatter("%(asctime)s %(levelname)s %(message)s").format(record).endswith("completed r1")
