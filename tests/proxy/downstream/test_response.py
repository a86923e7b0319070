"""Server-Timing: what is said of the time that a request took."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from support.requests import request_of

from launcher.proxy.downstream.response import timing


def line(queued_s: float, first_byte_s: float) -> bytes:
    request = request_of()
    request.bound = queued_s
    return timing(request, queued_s + first_byte_s)


def test_it_says_milliseconds() -> None:
    assert line(0.0123, 1.5) == b"Server-Timing: queue;dur=12.3, first_byte;dur=1500.0\r\n"


def test_nothing_is_said_of_what_no_instance_was_asked() -> None:
    assert timing(request_of(), 1.0) == b""


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_it_is_always_well_formed(queue: float, first: float) -> None:
    assert re.fullmatch(rb"Server-Timing: queue;dur=\d+\.\d, first_byte;dur=\d+\.\d\r\n", line(queue, first))
