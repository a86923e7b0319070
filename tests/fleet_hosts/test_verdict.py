"""What a row of the failure table lets pass, and what it does not."""

from __future__ import annotations

import pytest
from chaos.clients import Result

from fleet_hosts.load import End, Outcome, end_of
from fleet_hosts.verdict import Row, line

INGRESS = "10.77.0.1:8000"


def outcome(end: End, *, begun: float = 10.5, ended: float = 11.0, host: str = "host4") -> Outcome:
    return Outcome(begun, ended, end, INGRESS, host, "c1-1", None)


def row(*victims: str, fails_until: float | None = None) -> Row:
    return Row("power", 10.0, 20.0, frozenset(victims), fails_until)


def broken(of: Row, *outcomes: Outcome) -> list[object]:
    found = of.judge(outcomes)["broken"]
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("end", [End.WHOLE, End.LEFT])
def test_a_planned_action_lets_whole_answers_and_clients_that_left_pass(end: End) -> None:
    assert not broken(row(), outcome(end))


@pytest.mark.parametrize("end", [End.CUT, End.TOLD, End.FAILED, End.DISHONEST])
def test_a_planned_action_may_fail_none(end: End) -> None:
    assert broken(row(), outcome(end))


@pytest.mark.parametrize("end", [End.CUT, End.TOLD, End.FAILED])
def test_a_death_may_cost_the_requests_of_that_host_honestly(end: End) -> None:
    assert not broken(row("host4"), outcome(end))
    assert broken(row("host4"), outcome(end, host="host3"))


def test_a_death_excuses_no_dishonest_answer() -> None:
    assert broken(row("host4"), outcome(End.DISHONEST))


def test_a_request_without_a_byte_may_have_been_on_the_host_that_died() -> None:
    assert not broken(row("host4", fails_until=11.0), outcome(End.FAILED, host=""))


def test_no_request_fails_once_the_death_is_known() -> None:
    assert broken(row("host4", fails_until=11.0), outcome(End.FAILED, begun=11.1, ended=12.0, host=""))


def test_a_stream_is_cut_within_five_seconds() -> None:
    assert not broken(row("host4"), outcome(End.CUT, ended=14.9))
    assert broken(row("host4"), outcome(End.CUT, ended=15.1))


def test_a_row_without_requests_proves_nothing() -> None:
    assert broken(row("host4"), outcome(End.WHOLE, ended=21.0)) == ["no request ended in its time"]


@pytest.mark.parametrize(
    ("verdict", "detail", "end"),
    [
        ("exact", "", End.WHOLE),
        ("aborted", "", End.LEFT),
        ("told", "an error event", End.TOLD),
        ("dropped", "5 bytes of the body are missing", End.CUT),
        ("silent", "0 bytes read on a total of 2 expected bytes after 4 events", End.CUT),
        ("silent", "no [DONE] after 4 events", End.DISHONEST),  # HTTP says that it is whole
        ("wrong", "text 'a' where 'b' is right", End.DISHONEST),
        ("unframed", "a chunk's size is b'x'", End.DISHONEST),
        ("lost", "no end within 60 s", End.DISHONEST),
        ("failed", "503", End.FAILED),
        ("refused", "429", End.FAILED),
    ],
)
def test_the_verdicts_of_chaos(verdict: str, detail: str, end: End) -> None:
    assert end_of(Result("c1-1", "chat", True, True, 0.0, outcome=verdict, detail=detail)) is end


def test_the_line_says_what_failed() -> None:
    text = line(row("host4").judge([outcome(End.CUT), outcome(End.CUT, host="host3")]))
    assert "2 cut, 0 dishonest" in text
    assert "BROKEN: cut: c1-1" in text
