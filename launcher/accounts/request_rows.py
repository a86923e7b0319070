"""Single requests as rows of the usage ledger: how they are entered, listed, found by their id, and checked.

`request` has a row for each ended request, in the order in which they were entered; `request_kind` has the fields that are
the same for many of them, once. Kinds are kept when their requests are deleted, as the sums of their keys and models are.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, get_args, get_type_hints

import msgspec

from launcher.accounts.ended_request import EndedRequest
from launcher.base.database import Tables


class Kind(NamedTuple):
    """Values that many requests have in common; the names are EndedRequest's."""

    key: str
    model: str
    adapter: str
    path: str
    status: int
    outcome: str
    slot: int | None
    exact: bool
    attempts: int
    continued: int
    overflow: str
    overflow_reason: str
    streamed: bool


class Row(NamedTuple):
    """A row of `request`; names are EndedRequest's. `kind`: id of its kind."""

    id: int
    ended_at: float
    request_id: str
    kind: int
    duration_s: float
    queued_s: float | None
    first_byte_s: float | None
    predicted_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    picos: int


MOST_KINDS: Final = 20_000
"""Kinds of requests that are kept in memory, some 10 MB, by the file and by its sums; others are looked up."""
# Larger times and durations are none, and would not be in any hour or histogram.
_MOST_S: Final = 1e12
_TYPES: Final = {str: "TEXT", int: "INTEGER", bool: "INTEGER", float: "REAL"}


def _column(hint: object) -> str:
    return _TYPES[(get_args(hint) or (hint,))[0]]


def _check_of(name: str, hint: object) -> str:
    """The condition of a column's values. SQLite refuses others, which could not be summed up."""
    found = f"typeof({name}) = '{_column(hint).lower()}'"
    if _column(hint) == "REAL":
        found += f" AND abs({name}) < {_MOST_S}"
    return f"({name} IS NULL OR {found})" if get_args(hint) else f"({found})"


def _columns(kind: type[Kind | Row]) -> str:
    return ", ".join(
        "id INTEGER PRIMARY KEY" if name == "id" else f"{name} {_column(hint)} CHECK {_check_of(name, hint)}"
        for name, hint in get_type_hints(kind).items()
    )


# The index of ids has a part for each 1,024 requests, of the ids' last characters, which differ most. A batch changes the
# pages of one part, where an index of all ids would write a page for each request. To find an id all parts are asked.
_TABLES: Final = f"""
CREATE TABLE request_kind (
    id INTEGER PRIMARY KEY, {_columns(Kind)}
);
CREATE INDEX request_kind_by_key ON request_kind (key, model, slot, outcome);
CREATE TABLE request (
    {_columns(Row)}
);
CREATE INDEX request_by_time ON request (ended_at, kind);
CREATE INDEX request_by_id ON request (id >> 10, substr(request_id, -8));
"""
INSERT: Final = "INSERT INTO request VALUES"

KEPT: Final = EndedRequest.__struct_fields__[: EndedRequest.__struct_fields__.index("streamed") + 1]
"""The fields of a request that the ledger has."""

_BOOLS: Final = (KEPT.index("exact"), KEPT.index("streamed"))

# --- entered -----------------------------------------------------------------------------------------

_FIND_KIND: Final = (
    f"SELECT id FROM request_kind WHERE {' AND '.join(f'{name} IS ?' for name in Kind._fields)}"  # noqa: S608
)
_ADD_KIND: Final = (
    f"INSERT INTO request_kind ({', '.join(Kind._fields)}) VALUES ({', '.join('?' * len(Kind._fields))})"  # noqa: S608
)


class Kinds(dict[tuple[Any, ...], int]):
    """Ids of kinds by their values; a kind that the file lacks is added. `by_id` has those that were asked for."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__()
        self._connection = connection
        self.by_id: dict[int, Kind] = {}

    def __missing__(self, values: tuple[Any, ...]) -> int:
        found = self._connection.execute(_FIND_KIND, values).fetchone()
        number = int(found[0] if found else self._connection.execute(_ADD_KIND, values).lastrowid or 0)
        self.learn(number, values)
        return number

    def learn(self, number: int, values: tuple[Any, ...]) -> None:
        self[values] = number
        self.by_id[number] = Kind(*values)

    def clear(self) -> None:
        super().clear()
        self.by_id.clear()


def rows_of(batch: Sequence[EndedRequest], first: int, kinds: Kinds) -> list[tuple[Any, ...]]:
    """Rows of `request` in the order of Row's fields; the first gets the id `first`."""
    return [
        (
            number, e.ended_at, e.request_id,
            kinds[
                e.key, e.model, e.adapter, e.path, e.status, e.outcome, e.slot, e.exact, e.attempts, e.continued,
                e.overflow, e.overflow_reason, e.streamed,
            ],
            e.duration_s, e.queued_s, e.first_byte_s, e.predicted_s, e.prompt_tokens, e.cached_tokens, e.output_tokens,
            e.picos,
        )
        for number, e in enumerate(batch, first)
    ]  # fmt: skip


def usable(entry: EndedRequest) -> bool:
    """Whether an entry can be written, summed up and read again: types, whole numbers of 64 bits, texts of Unicode."""
    kept = {name: getattr(entry, name) for name in KEPT}
    try:
        msgspec.convert(kept, EndedRequest)
        return all(map(_fits, kept.values()))
    except (msgspec.ValidationError, UnicodeEncodeError):
        return False


def _fits(value: str | float | None) -> bool:
    match value:
        case str():
            return bool(value.encode()) or not value
        case int():
            return -(1 << 63) <= value < 1 << 63
        case float():
            return abs(value) < _MOST_S
        case None:
            return True


# --- read --------------------------------------------------------------------------------------------

_FIELDS: Final = ", ".join(f"{'k' if name in Kind._fields else 'r'}.{name}" for name in KEPT)
_JOINED: Final = "CROSS JOIN request_kind AS k ON k.id = r.kind"
_ENTRIES: Final = f"SELECT {_FIELDS} FROM request AS r {_JOINED} WHERE r.ended_at >= ? AND r.ended_at < ?"  # noqa: S608
# +: SQLite would put the id into the expression of the index, and no longer use that.
_FIND: Final = f"""
WITH RECURSIVE part(number) AS (
    SELECT max(id) >> 10 FROM request
    UNION ALL
    SELECT (SELECT max(id >> 10) FROM request WHERE id >> 10 < part.number) FROM part WHERE part.number IS NOT NULL
)
SELECT {_FIELDS} FROM part
CROSS JOIN request AS r INDEXED BY request_by_id ON r.id >> 10 = part.number AND substr(r.request_id, -8) = substr(?1, -8)
{_JOINED}
WHERE +r.request_id = ?1 ORDER BY r.ended_at DESC, r.id DESC LIMIT 1
"""  # noqa: S608


def latest(
    reader: sqlite3.Connection, since: float, until: float, limit: int, only: Mapping[str, str]
) -> list[EndedRequest]:
    """The last `limit` requests that ended in [since, until), the latest first. `only`: values of fields of a Kind."""
    which, values = "", list(only.values())
    if only:
        where = " AND ".join(f"{name} = ?" for name in only)
        kinds = [row[0] for row in reader.execute(f"SELECT id FROM request_kind WHERE {where}", values)]  # noqa: S608
        if not kinds:
            return []
        which = f" AND r.kind IN (SELECT id FROM request_kind WHERE {where})"  # noqa: S608
    rows = reader.execute(
        f"{_ENTRIES}{which} ORDER BY r.ended_at DESC, r.id DESC LIMIT ?", (since, until, *values, limit)
    )
    return list(map(_entry_of, rows))


def find(reader: sqlite3.Connection, request_id: str) -> EndedRequest | None:
    """The request with that id; of several the one that ended last."""
    row = reader.execute(_FIND, (request_id,)).fetchone()
    return None if row is None else _entry_of(row)


def rows_after(reader: sqlite3.Connection, number: int) -> tuple[list[tuple[Any, ...]], dict[int, Kind]]:
    """The rows with greater ids, and their kinds by id."""
    rows = reader.execute("SELECT * FROM request WHERE id > ? ORDER BY id", (number,)).fetchall()
    kinds = reader.execute(
        "SELECT * FROM request_kind WHERE id IN (SELECT kind FROM request WHERE id > ?)", (number,)
    )
    return rows, {kind: Kind(*values) for kind, *values in kinds}


def _entry_of(row: tuple[Any, ...]) -> EndedRequest:
    values = list(row)
    for place in _BOOLS:
        values[place] = bool(values[place])
    return EndedRequest(*values)


# --- checked -----------------------------------------------------------------------------------------


def _check(reader: sqlite3.Connection) -> str:
    # SQLite's own check leaves these conditions out where it may not write.
    for table, kind, more in (
        ("request_kind", Kind, "true"),
        ("request", Row, "kind IN (SELECT id FROM request_kind)"),
    ):
        whole = " AND ".join([more, *(_check_of(name, hint) for name, hint in get_type_hints(kind).items())])
        [wrong] = reader.execute(f"SELECT count(*) FROM {table} WHERE NOT ({whole})").fetchone()  # noqa: S608
        if wrong:
            return f"{wrong} rows of requests are damaged"
    # Python finds texts that are no UTF-8: those of a part are one text.
    texts = "SELECT group_concat(request_id) FROM request INDEXED BY request_by_id GROUP BY id >> 10"
    for _ in chain(reader.execute("SELECT * FROM request_kind"), reader.execute(texts)):
        pass
    return ""


REQUESTS: Final = Tables((_TABLES,), _check)
