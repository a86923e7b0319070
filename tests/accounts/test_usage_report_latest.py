"""The latest single requests of a ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.ledger_file import LedgerFile, unix

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.report_values import Question, UsageRequests
from launcher.accounts.usage_report import find_request, latest_requests
from launcher.base.errors import LauncherError
from launcher.base.money import picos

NOW = unix("2026-11-23T01:30")
OVERFLOWED = EndedRequest(
    ended_at=NOW - 9, request_id="r9", key="alice", model="m", adapter="a", path="/v1/chat/completions", status=200,
    outcome="completed", slot=None, duration_s=2.5, first_byte_s=0.31, prompt_tokens=12, cached_tokens=4, output_tokens=7,
    exact=False, attempts=1, overflow="cloud", overflow_reason="predicted", predicted_s=4.25, picos=picos("0.0003"),
)  # fmt: skip


def entry(age_s: int, **more: Any) -> EndedRequest:
    return EndedRequest(ended_at=NOW - age_s, request_id=f"r{age_s}", **more)


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerFile:
    ledger = LedgerFile(tmp_path / "usage.db")
    ledger.batch([entry(7200), entry(3601), entry(3600)])
    ledger.batch([entry(20, key="bob"), entry(12, model="m"), entry(11)])
    ledger.batch([OVERFLOWED, entry(0)])
    return ledger


def asked(ledger: LedgerFile, limit: int = 50, **question: Any) -> UsageRequests:
    return latest_requests(ledger.path, Question(**{"since": "1h"} | question), limit, NOW + 0.5, "EUR")


def ids(found: UsageRequests) -> list[str]:
    return [request.request_id for request in found.requests]


def test_the_latest_is_last(ledger: LedgerFile) -> None:
    found = asked(ledger)
    assert ids(found) == ["r20", "r12", "r11", "r9", "r0"]
    assert (found.left_out, found.zone, found.currency) == (None, "UTC", "EUR")
    assert (found.since, found.until) == (NOW - 3599.5, NOW + 0.5)
    assert ids(asked(ledger, since="2026-11-23", until="2026-11-23T01:00")) == ["r3601", "r3600"]


def test_a_request_has_what_was_decided_for_it(ledger: LedgerFile) -> None:
    (request,) = asked(ledger, key="alice").requests
    assert (request.overflow, request.overflow_reason, request.predicted_s) == ("cloud", "predicted", 4.25)
    assert (request.estimated, request.charged, request.slot) == (True, "0.0003", None)
    assert (request.prompt_tokens, request.cached_tokens, request.output_tokens) == (12, 4, 7)
    assert (request.first_byte_s, request.queued_s, request.duration_s) == (0.31, None, 2.5)


def test_of_a_key_and_of_a_model(ledger: LedgerFile) -> None:
    assert ids(asked(ledger, key="bob")) == ["r20"]
    assert ids(asked(ledger, model="m")) == ["r12", "r9"]
    assert ids(asked(ledger, model="m", key="alice")) == ["r9"]
    assert ids(asked(ledger, key="nobody")) == []


@pytest.mark.parametrize(("limit", "found"), [(1, ["r0"]), (2, ["r9", "r0"]), (3, ["r11", "r9", "r0"])])
def test_a_limit_leaves_out_the_earlier_ones(ledger: LedgerFile, limit: int, found: list[str]) -> None:
    assert ids(asked(ledger, limit)) == found
    assert asked(ledger, limit).left_out == "limit"


@pytest.mark.parametrize("limit", [0, -1, 10_001])
def test_limits_that_are_refused(ledger: LedgerFile, limit: int) -> None:
    with pytest.raises(LauncherError, match=f"cannot list {limit:,} requests"):
        asked(ledger, limit)


def test_a_ledger_without_entries(tmp_path: Path) -> None:
    assert asked(LedgerFile(tmp_path / "usage.db")).requests == ()


def test_a_broken_batch(ledger: LedgerFile) -> None:
    with ledger.changed() as file:
        file.execute("UPDATE request SET duration_s = x'00'")
    with pytest.raises(LauncherError, match="cannot read the usage ledger"):
        asked(ledger)


def test_one_request_is_found_by_its_id(ledger: LedgerFile) -> None:
    assert find_request(ledger.path, "r9") == OVERFLOWED
    assert find_request(ledger.path, "r7200") == entry(7200)
    assert find_request(ledger.path, "never") is None
