"""Stored results can be read again: what one version writes, it reads."""

from __future__ import annotations

import msgspec
from support.bench_results import RESULT

from launcher.measure.bench.result import BenchResult


def test_a_result_is_read_as_it_was_written() -> None:
    assert msgspec.json.decode(msgspec.json.encode(RESULT), type=BenchResult) == RESULT
