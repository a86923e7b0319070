"""API keys in writing: the key that a client sends, and the line of the file that proves it.

A key is `nl-ID-SECRET`, 64 characters: ID has 8, SECRET 52 of base32 in lower case, which are 256 bits from
the kernel. The file has one JSON object per line and never the key itself: `hash` is
SHA-256(salt + key), hex.

Why not scrypt or Argon2: they slow down guessing of secrets that people choose. 256 random bits can't be guessed, and
a check on each request can't take milliseconds. The salt makes precomputed tables useless; the ID names the line, so
that one hash is computed per request however many keys there are.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from launcher.base.errors import LauncherError
from launcher.base.money import parse_budget

ID_BYTES: Final = 5
SECRET_BYTES: Final = 32
SALT_BYTES: Final = 16
HASH_BYTES: Final = hashlib.sha256().digest_size

FLEET_HEAD: Final = re.compile(r"# fleet (\d{1,15})\n")
"""The first line of a file that the hosts of a fleet share, with its version."""
_PREFIX: Final = "nl-"
_ID_END: Final = len(_PREFIX) + 8

Limit = Annotated[int, Meta(ge=1, le=10**12)]
Hex = Annotated[str, Meta(pattern="^(?:[0-9a-f]{2})+$")]
When = Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]


class KeyRecord(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One line of the file. A limit that is None does not apply."""

    id: Annotated[str, Meta(pattern="^[a-z2-7]{8}$")]
    """Names the line; part of the key, no secret."""
    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f\x7f]*$")]
    """The key's owner; in logs and metrics."""
    hash: Annotated[Hex, Meta(min_length=2 * HASH_BYTES, max_length=2 * HASH_BYTES)]
    salt: Annotated[Hex, Meta(min_length=16, max_length=128)]
    created: When  # UTC
    revoked: When | None = None  # UTC; the key is refused from then on. The line stays as a record
    concurrency: Limit | None = None  # concurrent requests, queued ones included
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None  # prompt and response together
    models: tuple[str, ...] = ()  # models that it may use, by name or alias; empty: all
    local_only: bool = False  # its requests never go to [proxy.overflow]
    overflow: Literal["never", "full", "predicted"] | None = (
        None  # when they go there; None: as its `when` says
    )
    budget: str | None = None  # the most of a period, as launcher.base.money writes it


def compose_key(key_id: bytes, secret: bytes) -> str:
    """The key of ID_BYTES and SECRET_BYTES random bytes."""
    if len(key_id) != ID_BYTES or len(secret) != SECRET_BYTES:
        raise ValueError("an id has 5 bytes and a secret 32")
    return f"{_PREFIX}{_base32(key_id)}-{_base32(secret)}"


def _base32(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=").lower()


def id_of(key: str) -> str:
    """The id within a key; meaningless for other text."""
    return key[len(_PREFIX) : _ID_END]


def hash_of(key: str, salt: bytes) -> bytes:
    """The hash that the file keeps; defined for any text."""
    return hashlib.sha256(salt + key.encode("utf-8", "surrogatepass")).digest()


def proves(key: str, salt: bytes, expected: bytes) -> bool:
    """Whether the key has this salt and hash; in constant time."""
    return hmac.compare_digest(hash_of(key, salt), expected)


def make(fields: Mapping[str, object]) -> KeyRecord:
    """A record of these fields. Raises LauncherError for invalid ones."""
    try:
        record = msgspec.convert(fields, KeyRecord)
        _check_budget(record)
    except ValueError as error:  # msgspec's, too
        raise LauncherError(
            f"cannot make key '{fields.get('name')}': {error}",
            "give it a name of 1 to 64 characters on one line, and limits above 0",
        ) from None
    return record


def parse(text: str, origin: str) -> tuple[KeyRecord, ...]:
    """The file's records, in its order. Empty lines and lines that begin with # are skipped.

    Raises LauncherError that names file and line: invalid JSON, an unknown or invalid field, a duplicate id, a duplicate
    name among the keys that are not revoked.
    """
    records: dict[str, KeyRecord] = {}
    names: set[str] = set()
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            record = msgspec.json.decode(line, type=KeyRecord)
            _check_budget(record)
        except (ValueError, RecursionError) as error:  # those of msgspec and of UTF-8 are ValueErrors
            raise _bad(origin, number, str(error)) from None
        if record.id in records:
            raise _bad(origin, number, f"duplicate id '{record.id}'")
        if record.revoked is None:
            if record.name in names:
                raise _bad(origin, number, f"duplicate name '{record.name}'")
            names.add(record.name)
        records[record.id] = record
    return tuple(records.values())


def _check_budget(record: KeyRecord) -> None:
    """Raises ValueError."""
    if record.budget is not None:
        parse_budget(record.budget)


def to_text(records: Iterable[KeyRecord]) -> str:
    """The file; the inverse of `parse`. Comments of an earlier file are not kept."""
    return "".join(f"{msgspec.json.encode(record).decode()}\n" for record in records)


def _bad(origin: str, number: int, why: str) -> LauncherError:
    return LauncherError(
        f"cannot read API keys '{origin}', line {number}: {why}",
        "correct or remove the line; `numa-launcher key add` writes good ones",
    )
