"""A sink with a writer's thread of its own, while a test uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from launcher.base.writer import Sink, Writer

S = TypeVar("S", bound=Sink[Any])
STOP_S = 20.0


@contextmanager
def written(sink: S, stop_s: float = STOP_S, *, by_flush: bool = False) -> Iterator[S]:
    """Started; at the end what waits is written, within `stop_s`. `by_flush`: before that only when the test flushes, or
    after a failure."""
    if by_flush:
        sink.every_s = 3600.0
    writer = Writer("test", sink)
    writer.start()
    try:
        yield sink
    finally:
        writer.stop(stop_s)
