"""The latest single requests of the usage ledger, with what was decided for each. It blocks, as launcher.usage.report."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from launcher.errors import LauncherError
from launcher.money import to_decimal
from launcher.usage.entry import Entry
from launcher.usage.figures import UsageRequest, UsageRequests
from launcher.usage.question import Question, Times
from launcher.usage.read import unpacked
from launcher.usage.report import reading

MAX_LIMIT: Final = 10_000
# Entries searched for one report: two seconds of CPU time, longer beside a busy event loop.
MAX_SEARCHED: Final = 1_000_000
SEARCH_S: Final = 20.0
# The same for one request, and how far a clock that was set back may lag behind an entry.
FIND_S: Final = 3.0
LATER_S: Final = 86_400


def latest_requests(
    path: Path, question: Question, limit: int, now: float, currency: str, *, within_s: float = SEARCH_S
) -> UsageRequests:
    """The last `limit` requests of a time, a key and a model; `question.by` is not used. Raises LauncherError."""
    if not 0 < limit <= MAX_LIMIT:
        raise LauncherError(
            f"cannot list {limit:,} requests: not a number from 1 to {MAX_LIMIT:,}",
            "give limit=50, and search for more with an earlier `until`",
        )
    deadline = time.monotonic() + within_s
    with reading(path) as (reader, zone, _):
        times = Times.of(question.since, question.until, now, zone)
        found: list[Entry] = []
        searched, left_out = 0, None
        for batch in _backwards(reader, times):
            if len(found) >= limit:
                left_out = "limit"
                break
            if searched >= MAX_SEARCHED or time.monotonic() > deadline:
                left_out = "search"
                break
            found += (entry for entry in batch if _is_wanted(entry, question, times))
            searched += len(batch)
    found.sort(key=lambda entry: entry.ended_at)
    return UsageRequests(
        since=times.since,
        until=times.until,
        zone=zone.key,
        currency=currency,
        left_out="limit" if len(found) > limit else left_out,
        requests=tuple(map(_shown, found[-limit:])),
    )


def find_request(
    path: Path, request_id: str, now: float, *, within_s: float = FIND_S
) -> tuple[Entry | None, float | None]:
    """The latest entry of a request, and the Unix time back to which entries were searched (None: all were). Raises
    LauncherError."""
    deadline = time.monotonic() + within_s
    with reading(path) as (reader, _, _):
        for batch in _backwards(reader, Times(0, int(now) + LATER_S)):
            found = [entry for entry in batch if entry.request_id == request_id]
            if found:
                return max(found, key=lambda entry: entry.ended_at), None
            if time.monotonic() > deadline:
                return None, min(entry.ended_at for entry in batch)
    return None, None


def _backwards(reader: sqlite3.Connection, times: Times) -> Iterator[list[Entry]]:
    """Entries of each batch that may have some of a time, the latest batch first."""
    rows = reader.execute(
        "SELECT data FROM entries WHERE last_at >= ? AND first_at < ? ORDER BY last_at DESC, id DESC", times
    )
    return (unpacked(data) for (data,) in rows)


def _is_wanted(entry: Entry, question: Question, times: Times) -> bool:
    return (
        times.since <= entry.ended_at < times.until
        and question.key in {None, entry.key}
        and question.model in {None, entry.model}
    )


def _shown(entry: Entry) -> UsageRequest:
    return UsageRequest(
        time=round(entry.ended_at, 3),
        request_id=entry.request_id,
        key=entry.key,
        model=entry.model,
        adapter=entry.adapter,
        path=entry.path,
        status=entry.status,
        outcome=entry.outcome,
        slot=entry.slot,
        prompt_tokens=entry.prompt_tokens,
        cached_tokens=entry.cached_tokens,
        output_tokens=entry.output_tokens,
        estimated=not entry.exact,
        queued_s=_rounded(entry.queued_s),
        first_byte_s=_rounded(entry.first_byte_s),
        duration_s=round(entry.duration_s, 4),
        attempts=entry.attempts,
        continued=entry.continued,
        overflow=entry.overflow,
        overflow_reason=entry.overflow_reason,
        predicted_s=_rounded(entry.predicted_s),
        charged=f"{to_decimal(entry.picos):f}",
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
