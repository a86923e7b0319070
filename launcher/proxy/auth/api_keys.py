"""Who calls: the API keys in force, read again when their file changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from launcher.errors import LauncherError
from launcher.proxy.auth import key_record, key_store
from launcher.proxy.auth.key_record import KeyRecord
from launcher.proxy.auth.rate_limits import KeyLimits, KeySums
from launcher.proxy.auth.watched_file import WatchedFile
from launcher.proxy.errors import HttpError

OPEN_PATHS: Final = frozenset({"/health", "/metrics"})
"""What needs no key, as in vLLM: probes and scrapers have none. They show key names, and no secret."""

_LOG = logging.getLogger(__name__)
_BEARER: Final = "bearer "


@dataclass(slots=True, eq=False)
class KeyEntry:
    """A key in force."""

    record: KeyRecord
    salt: bytes
    hash: bytes
    limits: KeyLimits
    sums: KeySums
    """What keys of this name have done; a request in flight keeps them when its key gets another name."""

    @property
    def name(self) -> str:
        """Who has it; for logs, metrics and fairness."""
        return self.record.name

    @property
    def may_overflow(self) -> bool:
        """Whether its requests may leave this host."""
        return not self.record.local_only


class ApiKeys:
    """The keys of `path`, or open house where it is None. Owned by the event loop.

    A check costs one SHA-256 and no cache: nothing remembers a key that was sent, and a revoked one is
    refused from the next look at the file on, a second later at most.
    """

    def __init__(self, path: str | None) -> None:
        """Raises LauncherError when there is a path and no good file at it."""
        self._path = path
        self._entries: dict[str, KeyEntry] = {}
        self._complaint: str | None = None
        self.unauthorized = 0
        """Requests refused with 401."""
        self.sums: dict[str, KeySums] = {}
        """By name; those of a revoked key stay, so that no counter falls."""
        # What an unknown id is compared with, so that it takes as long as a known one.
        self._nobody = (os.urandom(key_record.SALT_BYTES), os.urandom(key_record.HASH_BYTES))
        self._watched = None if path is None else WatchedFile(path)
        if self._watched is not None:
            self._watched.look()
            self._take(key_store.read(self._watched.path), 0.0)

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return self._path is not None

    def __iter__(self) -> Iterator[KeyEntry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def check(self, authorization: str | None, x_api_key: str | None, now: float) -> KeyEntry | None:
        """The key of a request's `Authorization` or, where that is missing, its `X-Api-Key` header.

        None where no key is needed. `now` is the event loop's time, seconds. Raises HttpError 401 for a key
        that is missing, unknown or revoked; which of the last two it is, it does not say.
        """
        if self._watched is None:
            return None
        if self._watched.changed(now):
            self.reload(now)
        key = _sent(authorization, x_api_key)
        entry = self._entry(key)
        if entry is None:
            self.unauthorized += 1
            raise _refusal(key)
        return entry

    def _entry(self, key: str) -> KeyEntry | None:
        entry = self._entries.get(key_record.id_of(key))
        salt, expected = self._nobody if entry is None else (entry.salt, entry.hash)
        return entry if key_record.proves(key, salt, expected) else None

    def reload(self, now: float) -> bool:
        """Read the file now (SIGHUP). A bad file leaves the keys as they are, says so in the log; False."""
        if self._path is None:
            return True
        try:
            records = key_store.read(self._path)
            # Revoked keys stay in the file: an empty one is being written, or was cut.
            if self._entries and not records:
                raise LauncherError(
                    f"cannot use API keys '{self._path}': there is none in it any more",
                    "take the last one away with `numa-launcher key revoke`",
                )
        except LauncherError as error:
            if error.message != self._complaint:
                _LOG.error(
                    "%s; the %d keys read before stay in force (%s)",
                    error.message, len(self._entries), error.remedy, extra={"reason": error.message},
                )  # fmt: skip
            self._complaint = error.message
            return False
        self._complaint = None
        before = len(self._entries)
        self._take(records, now)
        _LOG.info("API keys read from %s: %d in force, %d before", self._path, len(self._entries), before)
        return True

    def _take(self, records: tuple[KeyRecord, ...], now: float) -> None:
        """Put these in force; what a key has spent of its limits stays spent."""
        entries: dict[str, KeyEntry] = {}
        for record in records:
            if record.revoked is not None:
                continue
            known = self._entries.get(record.id)
            limits = KeyLimits(record) if known is None else known.limits
            limits.follow(record, now)
            sums = limits.sums = self.sums.setdefault(record.name, KeySums())
            entries[record.id] = KeyEntry(
                record, bytes.fromhex(record.salt), bytes.fromhex(record.hash), limits, sums
            )
        self._entries = entries


def _sent(authorization: str | None, x_api_key: str | None) -> str:
    """The key of the headers; empty when there is none."""
    if authorization is None:
        return (x_api_key or "").strip()
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip()
    return ""


def _refusal(key: str) -> HttpError:
    """401 as OpenAI gives it; RFC 6750 3.1: no error code where no credentials came. The key is not quoted."""
    if not key:
        return HttpError(
            401,
            "you did not provide an API key: send it as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": 'Bearer realm="numa-launcher"'},
        )
    return HttpError(
        401,
        "incorrect API key provided",
        code="invalid_api_key",
        headers={"WWW-Authenticate": 'Bearer realm="numa-launcher", error="invalid_token"'},
    )
