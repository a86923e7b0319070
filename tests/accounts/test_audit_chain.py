"""The lines of an audit trail: their form, their hashes, and what a wrong one is called."""

from __future__ import annotations

import json
from hashlib import sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from support.audit_trails import an_entry

from launcher.accounts.audit_chain import (
    GENESIS,
    MAX_LINE_BYTES,
    Anchor,
    Chain,
    ChainError,
    ControlEntry,
    FileName,
    Head,
    Link,
    moment,
    of_control,
    of_request,
    parsed,
    parsed_head,
    seal,
    sealed,
)
from launcher.accounts.ended_request import EndedRequest

FIELDS = [
    "kind", "n", "prev", "time", "request_id", "key", "model", "adapter", "path", "status", "outcome", "slot", "attempts",
    "continued", "prompt_tokens", "cached_tokens", "output_tokens", "exact", "duration_s", "left_host", "overflow",
    "overflow_reason", "hash",
]  # fmt: skip


def hashed(line: Struct) -> tuple[bytes, str]:
    buffer = bytearray()
    digest = seal(buffer, line)
    return bytes(buffer), digest


def test_the_fields_of_a_request_and_their_order() -> None:
    raw = sealed(of_request(1, GENESIS.hash, an_entry(7)))
    line = json.loads(raw)
    assert list(line) == FIELDS
    assert line["kind"] == "request"
    assert line["n"] == 1
    assert line["prev"] == "0" * 64
    assert line["time"] == "2026-09-21T14:13:20Z"
    assert line["output_tokens"] == 7
    assert line["left_host"] is False


def test_the_hash_is_that_of_the_bytes_before_it() -> None:
    raw, digest = hashed(of_request(1, GENESIS.hash, an_entry(1)))
    body, _, rest = raw.partition(b',"hash":"')
    assert sha256(body).hexdigest() == digest == rest.removesuffix(b'"}\n').decode()


def test_the_next_line_holds_the_hash_of_the_one_before() -> None:
    _, digest = hashed(of_request(1, GENESIS.hash, an_entry(1)))
    raw = sealed(of_request(2, digest, an_entry(2)))
    assert json.loads(raw)["prev"] == digest


def test_a_request_that_left_the_host() -> None:
    entry = msgspec.structs.replace(an_entry(1), slot=None, overflow="api.example", overflow_reason="full")
    line = json.loads(sealed(of_request(1, GENESIS.hash, entry)))
    assert line["left_host"] is True
    assert line["overflow"] == "api.example"
    assert line["slot"] is None


@given(st.lists(st.text(st.characters(exclude_categories=()), max_size=3000), min_size=6, max_size=6))
def test_texts_of_clients_stay_in_one_bounded_line(texts: list[str]) -> None:
    request_id, key, model, adapter, path, reason = texts
    entry = EndedRequest(
        ended_at=1.0, request_id=request_id, key=key, model=model, adapter=adapter, path=path
    )
    control = ControlEntry(at=1.0, verb=key, arguments=model, slot=adapter, user=path, reason=reason)
    for line in (of_request(1, GENESIS.hash, entry), of_control(1, GENESIS.hash, control)):
        raw, digest = hashed(line)
        assert raw.count(b"\n") == 1
        assert len(raw) < MAX_LINE_BYTES
        assert parsed(raw[:-1]) == (line, digest)


def test_a_changed_byte_is_found_at_every_place() -> None:
    raw = sealed(of_request(1, GENESIS.hash, an_entry(1)))[:-1]
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] ^= 1
        with pytest.raises(ChainError):
            parsed(bytes(changed))


def test_a_line_of_a_later_version_is_named() -> None:
    later = msgspec.defstruct("Later", [("n", int)], tag_field="kind", tag="newer")
    with pytest.raises(ChainError, match="does not know: newer"):
        parsed(sealed(later(1))[:-1])


def test_what_does_not_follow() -> None:
    first, digest = hashed(of_request(1, GENESIS.hash, an_entry(1)))

    def next_to(link: Link) -> Chain:
        chain = Chain(GENESIS)
        chain.follow(*parsed(first[:-1]))
        chain.follow(*parsed(sealed(of_request(link.n + 1, link.hash, an_entry(2)))[:-1]))
        return chain

    assert next_to(Link(1, digest)).last.n == 2
    with pytest.raises(ChainError, match="line 2 must stand before it"):
        next_to(Link(2, digest))
    with pytest.raises(ChainError, match="where line 2 must stand"):
        next_to(GENESIS)
    with pytest.raises(ChainError, match="replaced") as found:
        next_to(Link(1, "f" * 64))
    assert found.value.before


def test_names_of_files() -> None:
    assert str(FileName(7, "2026-11-23")) == "audit-2026-11-23-000007.jsonl"
    assert FileName.parse("audit-2026-11-23-000007.jsonl") == FileName(7, "2026-11-23")
    assert FileName.parse("audit-2026-11-23-1234567.jsonl") == FileName(1234567, "2026-11-23")
    assert FileName.parse("audit-2026-11-23-000007.jsonl.bak") is None


@pytest.mark.parametrize("text", ["", "12:", "x:" + "0" * 64, "0" * 63, "0" * 64 + "\n", "G" * 64])
def test_what_is_no_anchor(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        Anchor.parse(text)


@pytest.mark.parametrize("text", ["a" * 64, "17:" + "0" * 64])
def test_anchors_are_printed_as_they_are_read(text: str) -> None:
    assert str(Anchor.parse(text)) == text


def test_a_head_is_read_padded_and_refused_damaged() -> None:
    head = Head(5, "a" * 64, moment(1.5), "audit-2026-11-23-000001.jsonl", 1234)
    raw = sealed(head)
    assert parsed_head(raw.ljust(511) + b"\n") == head
    for at in range(len(raw) - 1):
        assert parsed_head(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]) is None
    assert parsed_head(b"") is None
