"""Hourly sums of batches against sums made one by one."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ledger_file import counts_of

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.latency import merged
from launcher.accounts.ledger_file import LEDGER
from launcher.accounts.request_rows import MOST_KINDS, Kinds, rows_of
from launcher.accounts.sums import DIMENSIONS, HISTOGRAMS, INTEGERS, OUTCOMES, SECONDS, Sums
from launcher.base.database import migrate

BEGIN = 1_700_000_000 // 3600 * 3600
COLUMNS = ("dimension", "hour", "name", *INTEGERS, *SECONDS, *HISTOGRAMS)
COUNT = st.integers(0, 10**6)
TIME = st.none() | st.floats(0, 100)


@st.composite
def an_entry(draw: st.DrawFn) -> EndedRequest:
    return EndedRequest(
        ended_at=BEGIN + draw(st.floats(0, 4 * 3600 - 1)), request_id="r", key=draw(st.sampled_from(["", "a", "b"])),
        model=draw(st.sampled_from(["m", "n"])), outcome=draw(st.sampled_from([*OUTCOMES, "refused"])),
        slot=draw(st.none() | st.integers(0, 2)), duration_s=draw(st.floats(0, 1000)), queued_s=draw(TIME),
        first_byte_s=draw(TIME), prompt_tokens=draw(COUNT), cached_tokens=draw(COUNT), output_tokens=draw(COUNT),
        exact=draw(st.booleans()), continued=draw(st.integers(0, 3)), overflow=draw(st.sampled_from(["", "api"])),
        picos=draw(st.integers(0, 10**16)), streamed=draw(st.booleans()),
    )  # fmt: skip


def names(entry: EndedRequest) -> dict[str, str]:
    slot = "" if entry.slot is None else str(entry.slot)
    return {"all": "", "key": entry.key, "model": entry.model, "slot": slot, "overflow": entry.overflow}


def one_by_one(entries: Sequence[EndedRequest]) -> dict[tuple[str, int, str], dict[str, Any]]:
    parts: dict[tuple[str, int, str], list[EndedRequest]] = {}
    for entry in entries:
        for dimension, name in names(entry).items():
            parts.setdefault((dimension, int(entry.ended_at // 3600 * 3600), name), []).append(entry)
    return {key: of(part) for key, part in parts.items()}


def is_split(entry: EndedRequest) -> bool:
    return entry.outcome != "refused" and (entry.streamed or not entry.output_tokens)


def of(part: list[EndedRequest]) -> dict[str, Any]:
    def total(amounts: Any) -> int:
        return sum(map(int, amounts))

    return {
        "requests": len(part), **{outcome: total(e.outcome == outcome for e in part) for outcome in OUTCOMES},
        "continued": total(e.continued > 0 for e in part), "overflowed": total(e.overflow != "" for e in part),
        "inexact": total(not e.exact for e in part),
        "prompt_tokens": total(e.prompt_tokens for e in part), "cached_tokens": total(e.cached_tokens for e in part),
        "output_tokens": total(e.output_tokens for e in part), "picos": total(e.picos for e in part),
        "overflow_picos": total(e.picos for e in part if e.overflow),
        "decode_s": sum(e.duration_s - e.first_byte_s for e in part if e.first_byte_s is not None and is_split(e)),
        "prefill_s": sum(
            (e.duration_s if e.first_byte_s is None else e.first_byte_s) - e.queued_s
            for e in part if e.queued_s is not None and is_split(e)
        ),
        "first_byte": counts_of(
            [e.first_byte_s for e in part
             if e.first_byte_s is not None and e.outcome in ("completed", "client_aborted")]
        ).tolist(),
        "duration": counts_of([e.duration_s for e in part if e.outcome == "completed"]).tolist(),
    }  # fmt: skip


@cache
def made() -> sqlite3.Connection:
    """A ledger of its own; it keeps the kinds of all examples."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(LEDGER, connection, Path(":memory:"))
    return connection


class Rows:
    """The table `hourly`, in a dict."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int, str], Sequence[Any]] = {}

    def put(self, rows: Sequence[Sequence[Any]]) -> None:
        self.found.update({(row[0], row[1], row[2]): row for row in rows})

    def stored(self, dimension: str, hour: int) -> Sequence[Any]:
        return [row for key, row in self.found.items() if key[:2] == (dimension, hour)]

    def read(self) -> dict[tuple[str, int, str], dict[str, Any]]:
        return {
            key: {
                name: merged([value]).tolist() if isinstance(value, bytes) else value
                for name, value in zip(COLUMNS, row, strict=True)
                if name not in ("dimension", "hour", "name")
            }
            for key, row in self.found.items()
        }


@settings(max_examples=30)
@given(
    batches=st.lists(st.lists(an_entry(), min_size=1, max_size=12), max_size=4), restart=st.booleans(),
    most=st.sampled_from([2, MOST_KINDS]),
)  # fmt: skip
def test_batches_sum_up_as_one_by_one(batches: list[list[EndedRequest]], restart: bool, most: int) -> None:
    """Also where a daemon that starts finds rows of the hour, where entries of an earlier hour come late, and where there
    are too many kinds to know them all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launcher.accounts.sums.MOST_KINDS", most)
        check_batches(batches, restart=restart)


def check_batches(batches: list[list[EndedRequest]], *, restart: bool) -> None:
    rows = Rows()
    kinds = Kinds(made())
    sums = Sums(lambda at: int(at // 3600 * 3600), rows.stored)
    for batch in batches:
        rows.put(sums.add(rows_of(batch, 1, kinds), kinds.by_id))
        if restart:
            sums = Sums(lambda at: int(at // 3600 * 3600), rows.stored)
    found, wanted = rows.read(), one_by_one([entry for batch in batches for entry in batch])
    assert found.keys() == wanted.keys()
    for key, row in wanted.items():
        for column, amount in row.items():
            exact = column not in SECONDS
            assert found[key][column] == (amount if exact else pytest.approx(amount, abs=1e-6)), (key, column)
    for dimension in DIMENSIONS:
        requests = sum(row["requests"] for key, row in found.items() if key[0] == dimension)
        assert requests == sum(map(len, batches)), dimension
