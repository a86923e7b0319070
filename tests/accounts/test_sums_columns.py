"""Entries as columns: what the ledger keeps is what was entered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.sums import KEPT, Columns, Group, check

TIME = st.floats(0, 2e9)
TEXT = st.sampled_from(["", "a", "\u00e4 b\n"])
COUNT = st.integers(0, 2**40) | st.integers(0, 9)


@st.composite
def an_entry(draw: st.DrawFn) -> EndedRequest:
    return EndedRequest(
        ended_at=draw(TIME), request_id=draw(st.text(st.characters(codec="utf-8"))), key=draw(TEXT), model=draw(TEXT),
        adapter=draw(TEXT), path=draw(TEXT), status=draw(st.sampled_from([0, 200])), outcome=draw(TEXT),
        slot=draw(st.none() | st.integers(0, 3)), duration_s=draw(TIME), queued_s=draw(st.none() | TIME),
        first_byte_s=draw(st.none() | TIME), prompt_tokens=draw(COUNT), cached_tokens=draw(COUNT),
        output_tokens=draw(COUNT), exact=draw(st.booleans()), attempts=draw(st.integers(0, 3)),
        continued=draw(st.integers(0, 2)), overflow=draw(TEXT), overflow_reason=draw(TEXT),
        predicted_s=draw(st.none() | TIME), picos=draw(st.integers(0, 2**63 - 1)), streamed=draw(st.booleans()),
    )  # fmt: skip


@given(entries=st.lists(an_entry(), min_size=1, max_size=80), cut=st.integers(1, 79))
def test_entries_come_back(entries: list[EndedRequest], cut: int) -> None:
    """Also those of a part, and of so many that they are not compressed."""
    columns = Columns.of(entries)
    assert [*Columns.from_bytes(columns.to_bytes()).entries()] == entries
    part = columns.part(slice(0, cut))
    assert [*Columns.from_bytes(part.to_bytes()).entries()] == entries[:cut]


def test_every_field_is_kept() -> None:
    times = {"ended_at", "duration_s", "queued_s", "first_byte_s", "predicted_s"}
    amounts = {"prompt_tokens", "cached_tokens", "output_tokens", "picos"}
    assert set(KEPT) == {"request_id", *times, *amounts, *Group._fields}


@pytest.mark.parametrize("data", [b"", b"\x78broken", b"\x95broken", b"\xff"])
def test_bytes_that_are_no_entries(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  msgspec.s and ours
        Columns.from_bytes(data)


@pytest.mark.parametrize(
    ("entry", "usable"),
    [
        (EndedRequest(ended_at=1.0, request_id="r"), True),
        (EndedRequest(ended_at=1.0, request_id="r", method="GET", bytes_in=7, reason="it left"), True),
        (EndedRequest(ended_at=1.0, request_id="r", picos=2**63), False),
        (EndedRequest(ended_at=1.0, request_id="r", model="half a pair \ud800"), False),
        (EndedRequest(ended_at=1.0, request_id="r", key=None), False),  # type: ignore[arg-type]
    ],
)
def test_entries_that_no_file_can_take(entry: EndedRequest, usable: bool) -> None:
    assert check(entry) == usable
