"""The Server-Timing line."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from launcher.proxy.server_timing import server_timing


def test_it_says_milliseconds() -> None:
    line = server_timing(0.0123, 0.0004, 1.5)
    assert line == b"Server-Timing: queue;dur=12.3, connect;dur=0.4, first_byte;dur=1500.0\r\n"
    assert server_timing(0, None, 2) == b"Server-Timing: queue;dur=0.0, first_byte;dur=2000.0\r\n"


@given(st.floats(0, 1e6), st.none() | st.floats(0, 1e6), st.floats(0, 1e6))
def test_it_is_always_well_formed(queue: float, connect: float | None, first: float) -> None:
    line = server_timing(queue, connect, first)
    assert re.fullmatch(rb"Server-Timing: (\w+;dur=\d+\.\d, )+first_byte;dur=\d+\.\d\r\n", line)
