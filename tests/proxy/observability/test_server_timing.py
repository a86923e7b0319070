"""The Server-Timing line."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from launcher.proxy.observability.server_timing import server_timing


def test_durations_are_in_milliseconds() -> None:
    line = server_timing(0.0123, 1.5)
    assert line == b"Server-Timing: queue;dur=12.3, first_byte;dur=1500.0\r\n"


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_the_header_is_well_formed(queue: float, first: float) -> None:
    line = server_timing(queue, first)
    assert re.fullmatch(rb"Server-Timing: queue;dur=\d+\.\d, first_byte;dur=\d+\.\d\r\n", line)
