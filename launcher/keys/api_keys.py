"""The API keys in force, read again when their file changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import partial
from typing import Final, Protocol

from msgspec import Struct

from launcher.accounts.budgets import Budgets
from launcher.base.api_errors import HttpError
from launcher.base.errors import LauncherError
from launcher.base.watched_file import WatchedFile
from launcher.keys import key_file, key_record
from launcher.keys.key_record import KeyRecord
from launcher.keys.rate_limits import KeyLimits, KeySums

OPEN_PATHS: Final = frozenset({"/health", "/metrics", "/metrics/host", "/load"})
"""Paths without authentication, as in vLLM, for probes, scrapers and gateways. They show key names, but no secrets."""

KEY_FIELDS: Final = (b"authorization", b"x-api-key", b"api-key")
"""Header fields of an API key, in lower case: OpenAI's clients, Anthropic's, and those of Azure OpenAI."""

_LOG = logging.getLogger(__name__)
_BEARER: Final = "bearer "


class Head(Protocol):
    """A request's head."""

    def get(self, name: bytes) -> str | None:
        """The first value of a field; `name` in lower case."""

    def all(self, name: bytes) -> list[str]:
        """Every value of it, in order."""


class KeyEntry(Struct, eq=False):
    record: KeyRecord
    salt: bytes
    hash: bytes
    limits: KeyLimits
    sums: KeySums  # of keys of this name; a request in flight keeps them when its key gets another name


class ApiKeys:
    """The keys of the file `path`; None: no key is needed. Owned by the event loop.

    A check costs one SHA-256; results are not cached, so a revoked key is refused within a second.
    """

    def __init__(self, path: str | None, budgets: Budgets | None = None) -> None:
        """`budgets` is told of the keys' budgets. Raises LauncherError for a file that is missing or invalid."""
        self._budgets = budgets
        self._entries: dict[str, KeyEntry] = {}
        self.unauthorized = 0  # requests that were refused with 401
        self.sums: dict[str, KeySums] = {}
        """By name; those of a revoked key stay, so that no counter decreases."""
        # Unknown ids are compared with this, so that they take as long as known ones.
        self._nobody = (os.urandom(key_record.SALT_BYTES), os.urandom(key_record.HASH_BYTES))
        self._records: tuple[KeyRecord, ...] = ()
        self._file: WatchedFile[tuple[KeyRecord, ...]] | None = None
        if path is not None:
            self._file = WatchedFile("API keys", partial(self._read, path), path)
            self._follow(self._file.value, 0.0)

    @property
    def required(self) -> bool:
        return self._file is not None

    @property
    def files(self) -> tuple[WatchedFile[tuple[KeyRecord, ...]], ...]:
        """The file, where one is needed."""
        return () if self._file is None else (self._file,)

    def __iter__(self) -> Iterator[KeyEntry]:
        return iter(self._entries.values())

    def check(self, head: Head, now: float) -> KeyEntry | None:
        """The key of a request: the first in KEY_FIELDS that is in force.

        An Authorization of another scheme than Bearer (RFC 7617, 7616, 4559: a gateway's or a browser's) is none. Requests
        may carry credentials of several servers: those of others are ignored.

        None where no key is needed. `now` is the event loop's time, seconds. Raises HttpError 401 for a key that is
        missing, unknown or revoked; the last two get the same answer.
        """
        if self._file is None:
            return None
        self.look(now)
        entry = self._known(_bearer(head.get(KEY_FIELDS[0]) or ""))  # nearly always
        if entry is not None:
            return entry
        sent = _sent(head)
        for key in sent:
            if (entry := self._known(key)) is not None:
                return entry
        self.unauthorized += 1
        raise _refusal(any(sent), head.get(KEY_FIELDS[0]))

    def _known(self, key: str) -> KeyEntry | None:
        entry = self._entries.get(key_record.id_of(key))
        salt, expected = self._nobody if entry is None else (entry.salt, entry.hash)
        return entry if key_record.proves(key, salt, expected) else None

    def look(self, now: float) -> None:
        """Apply a change of the file that was read, and look for the next."""
        if self._file is not None and (records := self._file.latest(now)) is not self._records:
            self._follow(records, now)

    def _read(self, path: str) -> tuple[KeyRecord, ...]:
        records = key_file.read(path)
        # Revoked keys stay in the file: an empty one is being written, or was cut.
        if self._entries and not records:
            remedy = "revoke the last key with `numa-launcher key revoke`"
            raise LauncherError(f"cannot use API keys '{path}': the file is empty", remedy)
        for record in records:
            self._check_budget(record, path)
        return records

    def _check_budget(self, record: KeyRecord, path: str) -> None:
        if self._budgets is None or record.budget is None or record.revoked is not None:
            return
        try:
            self._budgets.rules.check(record.budget)
        except LauncherError as error:
            raise LauncherError(
                f"cannot use API keys '{path}': key '{record.name}': {error.message}", error.remedy
            ) from None

    def _follow(self, records: tuple[KeyRecord, ...], now: float) -> None:
        """Replace the keys; what a key has spent of its limits stays spent."""
        if self._budgets is not None:
            self._budgets.follow(
                {
                    each.name: each.budget
                    for each in records
                    if each.budget is not None and each.revoked is None
                }
            )
        entries: dict[str, KeyEntry] = {}
        for record in records:
            if record.revoked is not None:
                continue
            known = self._entries.get(record.id)
            sums = self.sums.setdefault(record.name, KeySums())
            limits = KeyLimits(record, sums) if known is None else known.limits
            limits.follow(record, sums, now)
            salt, hash_ = bytes.fromhex(record.salt), bytes.fromhex(record.hash)
            entries[record.id] = KeyEntry(record, salt, hash_, limits, sums)
        _LOG.info("API keys: %d in force, %d before", len(entries), len(self._entries))
        self._records, self._entries = records, entries


def _bearer(authorization: str) -> str:
    """The key in it; an empty one in another scheme."""
    if authorization[: len(_BEARER)].lower() != _BEARER:
        return ""
    return authorization[len(_BEARER) :].strip()


def _sent(head: Head) -> list[str]:
    """All keys of a request."""
    authorization, *others = KEY_FIELDS
    keys = [_bearer(value) for value in head.all(authorization)]
    return keys + [value.strip() for name in others for value in head.all(name)]


def _refusal(sent: bool, authorization: str | None) -> HttpError:
    """401 as OpenAI's; without credentials no error code (RFC 6750 section 3.1). Nothing that was sent is quoted."""
    message, challenge = "incorrect API key provided", 'Bearer realm="numa-launcher", error="invalid_token"'
    if not sent:
        message = "you did not provide an API key: send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`"
        if authorization:
            message += "; the Authorization that came has no Bearer key"
        challenge = 'Bearer realm="numa-launcher"'
    return HttpError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": challenge})
