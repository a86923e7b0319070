"""API keys in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.keys import key_file, key_record
from launcher.keys.key_record import KeyRecord


def make(name: str, **fields: object) -> tuple[str, KeyRecord]:
    """A key and its record; the same for the same name."""
    seed = name.encode()
    key = key_record.compose_key(seed.ljust(5, b"-")[:5], seed.ljust(32, b"-")[:32])
    plain = {
        "id": key_record.id_of(key), "name": name, "hash": key_record.hash_of(key, seed * 8).hex(), "salt": (seed * 8).hex(),
        "created": "2026-11-20T10:00:00Z",
    }  # fmt: skip
    return key, KeyRecord(**{**plain, **fields})  # type: ignore[arg-type]


def put(path: Path, *records: KeyRecord) -> None:
    key_file.update(str(path), lambda _: records)


class Fields:
    """The fields of a request's head."""

    def __init__(self, *fields: tuple[str, str]) -> None:
        self._fields = fields

    def get(self, name: bytes) -> str | None:
        found = self.all(name)
        return found[0] if found else None

    def all(self, name: bytes) -> list[str]:
        return [value for field, value in self._fields if field == name.decode()]


def head_with(authorization: str | None, x_api_key: str | None = None) -> Fields:
    sent = (("authorization", authorization), ("x-api-key", x_api_key))
    return Fields(*((name, value) for name, value in sent if value is not None))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def new_key(path: Path, name: str, **fields: object) -> str:
    """Put a key into the file; the key."""
    seed = name.encode()
    key = key_record.compose_key(seed.ljust(5, b"-")[:5], seed.ljust(32, b"-")[:32])
    salt = seed.ljust(16, b"-")
    known = {
        "id": key_record.id_of(key),
        "name": name,
        "hash": key_record.hash_of(key, salt).hex(),
        "salt": salt.hex(),
    }
    record = key_record.make({**known, "created": "2026-11-20T10:00:00Z", **fields})
    key_file.update(str(path), lambda old: (*old, record))
    return key
