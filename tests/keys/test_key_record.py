"""Keys and the lines that prove them."""

from __future__ import annotations

import hashlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import LauncherError
from launcher.keys import key_record
from launcher.keys.key_record import KeyRecord

IDS = st.text("abcdefghijklmnopqrstuvwxyz234567", min_size=8, max_size=8)
LIMITS = st.none() | st.integers(1, 10**12)
RECORDS = st.builds(
    KeyRecord,
    id=IDS,
    name=st.text(st.sampled_from('aZ 0é漢"\\/{}'), min_size=1, max_size=64),
    hash=st.binary(min_size=32, max_size=32).map(bytes.hex),
    salt=st.binary(min_size=8, max_size=64).map(bytes.hex),
    created=st.just("2026-11-20T10:00:00Z"),
    revoked=st.none() | st.just("2026-11-21T10:00:00Z"),
    concurrency=LIMITS,
    requests_per_minute=LIMITS,
    tokens_per_minute=LIMITS,
    models=st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=9), max_size=3).map(tuple),
    local_only=st.booleans(),
)  # fmt: skip


@given(st.lists(RECORDS, max_size=5, unique_by=(lambda r: r.id, lambda r: r.name)))
def test_parse_is_the_inverse_of_to_text(records: list[KeyRecord]) -> None:
    assert key_record.parse(key_record.to_text(records), "f") == tuple(records)


@given(st.binary(min_size=5, max_size=5), st.binary(min_size=32, max_size=32), st.binary(max_size=20))
def test_a_key_proves_itself_and_nothing_else(key_id: bytes, secret: bytes, salt: bytes) -> None:
    key = key_record.compose_key(key_id, secret)
    assert re.fullmatch(r"nl-[a-z2-7]{8}-[a-z2-7]{52}", key)  # 64 signs
    assert key_record.parse(line(id=key_record.id_of(key)), "f")[0].id == key_record.id_of(key)
    expected = key_record.hash_of(key, salt)
    assert expected == hashlib.sha256(salt + key.encode()).digest()  # as the docs say: any tool can make one
    assert key_record.proves(key, salt, expected)
    assert not key_record.proves(key, salt + b"x", expected)
    changed = key[:-1] + ("a" if key[-1] != "a" else "b")
    assert not key_record.proves(changed, salt, expected)


@given(st.text(max_size=100))
def test_any_text_may_be_asked_about(text: str) -> None:
    assert not key_record.proves(text, b"salt", b"\0" * 32)
    key_record.id_of(text)


def test_a_lone_surrogate_is_accepted() -> None:
    assert not key_record.proves("\udc80", b"salt", b"\0" * 32)


def test_sizes_are_held() -> None:
    with pytest.raises(ValueError, match="5 bytes"):
        key_record.compose_key(b"1234", bytes(32))


def line(**fields: object) -> str:
    record = {
        "id": "abcdefgh", "name": "n", "hash": "00" * 32, "salt": "00" * 16, "created": "2026-11-20T10:00:00Z",
    }  # fmt: skip
    return json.dumps({**record, **fields})


def test_comments_and_empty_lines_are_skipped() -> None:
    assert [record.id for record in key_record.parse(f"# keys\n\n{line()}\n", "f")] == ["abcdefgh"]


def test_a_revoked_keys_name_may_be_used_again() -> None:
    old = line(id="aaaaaaaa", revoked="2026-11-20T10:00:00Z")
    assert len(key_record.parse(f"{old}\n{line()}\n", "f")) == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "line 1"),
        (f"{line()}\n{line(name='other')}", "line 2: duplicate id 'abcdefgh'"),
        (f"{line()}\n{line(id='aaaaaaaa')}", "line 2: duplicate name 'n'"),
        (line(hash="00"), "hash"),
        (line(hash="zz" * 32), "hash"),
        (line(salt=""), "salt"),
        (line(id="ABCDEFGH"), "id"),
        (line(name="a\nb"), "name"),
        (line(name=""), "name"),
        (line(concurrency=0), "concurrency"),
        (line(concurrency="3"), "concurrency"),
        (line(created="today"), "created"),
        (line(colour="red"), "colour"),
        (line(models="m"), "models"),
        (line(budget="much"), "'much' is no budget such as"),
        (line(overflow="often"), "overflow"),
        ("[" * 100_000, "line 1"),
    ],
)
def test_bad_lines_are_named(text: str, why: str) -> None:
    with pytest.raises(LauncherError, match=r"^cannot read API keys 'f', line") as caught:
        key_record.parse(text, "f")
    assert why in caught.value.message
