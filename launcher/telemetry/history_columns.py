"""The columns of the history, its rows, and what becomes of each column when rows of 2 s are thinned. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec
from msgspec import Struct

from launcher.telemetry.quantiles import joined, quantile


class Thin(StrEnum):
    """The value of a longer step from those of its rows of 2 s; a row whose value is unknown does not count."""

    MEAN = "mean"
    MAXIMUM = "maximum"
    MINIMUM = "minimum"
    QUANTILE = "quantile"
    """Of all streams whose first token came in the step."""


KEPT: Final[Mapping[str, Thin]] = {
    "requests_per_s": Thin.MEAN,
    "failed_per_s": Thin.MEAN,
    "prompt_tokens_per_s": Thin.MEAN,
    "output_tokens_per_s": Thin.MEAN,
    "first_token_p50_s": Thin.QUANTILE,
    "first_token_p99_s": Thin.QUANTILE,
    # A queue that was full for ten seconds is what explains the rejected requests of its ten minutes.
    "queued": Thin.MAXIMUM,
    "oldest_queued_s": Thin.MAXIMUM,
    "in_flight": Thin.MEAN,
    # 3.9 of 4 ready instances are shown as 4; the least shows the restart.
    "ready": Thin.MINIMUM,
    "kv_usage": Thin.MAXIMUM,
    # Tokens looked up in the prefix caches, and found: a mean of ratios would weigh a quiet second like a busy one.
    "prefix_queries_per_s": Thin.MEAN,
    "prefix_hits_per_s": Thin.MEAN,
    "cpu_busy": Thin.MEAN,
    "memory_free_bytes": Thin.MINIMUM,
    "overflow_per_s": Thin.MEAN,
    "queue_rejected_per_s": Thin.MEAN,
    "cost_per_hour": Thin.MEAN,
}
"""The host's values of a row, in the order of the file: append only. Rows of before have fewer."""

HIT_RATE: Final = "prefix_hit_rate"
HOST: Final = tuple(
    HIT_RATE if name == "prefix_queries_per_s" else name for name in KEPT if name != "prefix_hits_per_s"
)
"""The host's columns of an answer."""

SLOT: Final[Mapping[str, Thin | None]] = {
    "tokens_per_s": Thin.MEAN,
    "in_flight": Thin.MEAN,
    "kv_usage": Thin.MAXIMUM,
    "cpu_busy": Thin.MEAN,
    # The state of the step that comes last in STATES.
    "state": None,
}

STATES: Final = ("ready", "draining", "held", "stopped", "stopping", "starting", "backoff", "failed")
"""From good to bad."""


class SlotValues(Struct, frozen=True, array_like=True, gc=False):
    """One slot in one row. Append only, with defaults."""

    slot: int
    state: str | None = None
    tokens_per_s: float | None = None
    in_flight: float | None = None
    kv_usage: float | None = None
    cpu_busy: float | None = None


class Row(Struct, frozen=True, array_like=True, gc=False):
    """What happened in the step that ended at `ms` (milliseconds since the epoch)."""

    ms: int
    seconds: int
    """Of the step, those that were recorded."""
    host: tuple[float | None, ...]
    """In the order of KEPT; None: unknown."""
    first_tokens: dict[int, int] = {}
    """Streams whose first token came, by bucket (quantiles.py); rows of 2 s only."""
    slots: tuple[SlotValues, ...] = ()


class _HostsPart(Struct, frozen=True, array_like=True, gc=False):
    """What of a row comes before its slots."""

    ms: int
    seconds: int
    host: tuple[float | None, ...]
    first_tokens: dict[int, int]


_ROW: Final = msgspec.json.Decoder(Row)
_HOSTS_PART: Final = msgspec.json.Decoder(_HostsPart)


def text_of(row: Row) -> bytes:
    """A row as it is kept: JSON."""
    return msgspec.json.encode(row)


def row_of(text: bytes, *, slots: bool = True) -> Row:
    """With or without its slots. Raises msgspec.MsgspecError, for a text that is no row."""
    if slots:
        row = _ROW.decode(text)
    else:
        part = _HOSTS_PART.decode(text)
        row = Row(part.ms, part.seconds, part.host, part.first_tokens)
    if len(row.host) == len(KEPT):
        return row
    # Of a version with fewer columns, or with more.
    return msgspec.structs.replace(row, host=(*row.host, *(None,) * len(KEPT))[: len(KEPT)])


def rounded(value: float | None) -> float | None:
    """Five digits: what a person reads, and half the size."""
    return None if value is None else float(f"{value:.5g}")


# --- Rows of 2 s become one row of a longer step. ---

_PERCENT: Final = {"first_token_p50_s": 50, "first_token_p99_s": 99}
_BADNESS: Final = {state: position for position, state in enumerate(STATES)}


def thin(rows: Sequence[Row], ms: int) -> Row:
    """The row of the step that ends at `ms`. `rows`: all that there are of it, at least one; each counts for its seconds.

    A step that was recorded in part has the values of that part: an hour's gap does not make its rates smaller."""
    streams = joined(row.first_tokens for row in rows)
    host = []
    for position, (name, how) in enumerate(KEPT.items()):
        if how is Thin.QUANTILE:
            host.append(quantile(streams, _PERCENT[name]))
        else:
            host.append(_one(how, [(row.host[position], row.seconds) for row in rows]))
    return Row(ms, sum(row.seconds for row in rows), tuple(map(rounded, host)), slots=tuple(_slots(rows)))


def _slots(rows: Iterable[Row]) -> Iterator[SlotValues]:
    by_slot: dict[int, list[tuple[SlotValues, int]]] = {}
    for row in rows:
        for values in row.slots:
            by_slot.setdefault(values.slot, []).append((values, row.seconds))
    for slot, found in sorted(by_slot.items()):
        yield SlotValues(
            slot,
            _worst(values.state for values, _ in found),
            rounded(_one(Thin.MEAN, [(values.tokens_per_s, seconds) for values, seconds in found])),
            rounded(_one(Thin.MEAN, [(values.in_flight, seconds) for values, seconds in found])),
            rounded(_one(Thin.MAXIMUM, [(values.kv_usage, seconds) for values, seconds in found])),
            rounded(_one(Thin.MEAN, [(values.cpu_busy, seconds) for values, seconds in found])),
        )


def _worst(states: Iterable[str | None]) -> str | None:
    return max((state for state in states if state in _BADNESS), key=_BADNESS.__getitem__, default=None)


def _one(how: Thin, values: Iterable[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None]
    if not known:
        return None
    if how is Thin.MAXIMUM:
        return max(value for value, _ in known)
    if how is Thin.MINIMUM:
        return min(value for value, _ in known)
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known)
