"""The audit trail's lines, each with the hash of the one before, and its file names. Pure.

A line is one JSON object. Its first fields are `kind`, `n` (its number in the trail, from 1), `prev` (the `hash` of line
n - 1) and `time`; its last is `hash`: SHA-256, in hexadecimal digits, of all bytes of the line before `,"hash":`.
Field order is that of the classes below. A field is never removed or renamed while FORMAT stays.
"""

from __future__ import annotations

import datetime as dt
import re
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final, NamedTuple, Self

import msgspec
from msgspec import Struct

from launcher.accounts.ended_request import EndedRequest
from launcher.base.text import quoted

FORMAT: Final = 1
# Texts of clients and operators are bounded, so a line is shorter than this many bytes.
MAX_LINE_BYTES: Final = 64 * 1024

_TIME: Final = dt.datetime.fromtimestamp
_SEPARATOR: Final = b',"hash":"'
_TAIL_BYTES: Final = len(_SEPARATOR) + 64 + len(b'"}')
_NAME: Final = re.compile(r"audit-(\d{4}-\d\d-\d\d)-(\d{6,})\.jsonl")
_HASH: Final = re.compile("[0-9a-f]{64}")
_ANCHOR: Final = re.compile("(?:([0-9]{1,18}):)?([0-9a-f]{64})")


class Link(NamedTuple):
    """A line, as the next one refers to it."""

    n: int
    hash: str


GENESIS: Final = Link(0, "0" * 64)
"""What the first line of a trail follows."""


class Line(Struct, frozen=True, gc=False, tag_field="kind"):
    n: int
    prev: str
    time: dt.datetime


class FileBegan(Line, frozen=True, gc=False, tag="file"):
    """The first line of each file."""

    format: int
    day: str  # UTC
    number: int  # of the file in the trail, from 1


class Started(Line, frozen=True, gc=False, tag="start"):
    version: str
    pid: int
    head: str  # "found", or "missing" where the trail had lines


class Stopped(Line, frozen=True, gc=False, tag="stop"):
    """The daemon ended in order: nothing waited to be written."""


class RequestEnded(Line, frozen=True, gc=False, tag="request"):
    """`time`: when it ended. Texts are "" where there is none."""

    request_id: str
    key: str
    model: str
    adapter: str
    path: str
    status: int
    outcome: str
    slot: int | None
    attempts: int
    continued: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    exact: bool
    duration_s: float
    left_host: bool
    overflow: str
    overflow_reason: str


class ControlEntry(Struct, frozen=True, gc=False, kw_only=True):
    """A control action, and who asked for it; ids are None for a signal."""

    at: float  # Unix time, seconds
    verb: str
    arguments: str = ""
    slot: str = ""
    user: str = ""
    uid: int | None = None
    gid: int | None = None
    pid: int | None = None
    status: int | None = None  # of the control socket's response
    result: str = "done"  # or "refused"
    reason: str = ""


class Controlled(Line, frozen=True, gc=False, tag="control"):
    verb: str
    arguments: str
    slot: str
    user: str
    uid: int | None
    gid: int | None
    pid: int | None
    status: int | None
    result: str
    reason: str


class Lost(Line, frozen=True, gc=False, tag="lost"):
    """Entries that could not be written and did not fit into memory."""

    lost: int
    since: dt.datetime
    reason: str


class Pruned(Line, frozen=True, gc=False, tag="pruned"):
    """Files up to `through_number` were removed, as keep_days says; the last line in them."""

    through_number: int
    through_n: int
    through_hash: str


class Torn(Line, frozen=True, gc=False, tag="torn"):
    """The bytes between this line and line n - 1 are an incomplete write of a process or machine that was stopped."""

    torn_bytes: int  # without the line end before this line
    torn_sha256: str


AnyLine = FileBegan | Started | Stopped | RequestEnded | Controlled | Lost | Pruned | Torn


class Head(Struct, frozen=True, tag_field="kind", tag="head"):
    """The file `audit.head`: the last line that is known to be on the disk."""

    n: int
    last: str  # its hash
    time: dt.datetime
    file: str
    end: int  # bytes of the file up to its end

    @property
    def link(self) -> Link:
        return Link(self.n, self.last)


class ChainError(Exception):
    """A line is not what it must be. `before`: the line before it is the wrong one; `gap`: lines are missing."""

    def __init__(self, what: str, *, before: bool = False, gap: bool = False) -> None:
        super().__init__(what)
        self.what = what
        self.before = before
        self.gap = gap


class FileName(NamedTuple):
    number: int
    day: str

    @classmethod
    def parse(cls, name: str) -> Self | None:
        found = _NAME.fullmatch(name)
        return None if found is None else cls(int(found[2]), found[1])

    def __str__(self) -> str:
        return f"audit-{self.day}-{self.number:06}.jsonl"


class Anchor(NamedTuple):
    """A line that was in the trail, noted elsewhere. `n` is None where only its hash was noted."""

    n: int | None
    hash: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError."""
        found = _ANCHOR.fullmatch(text)
        if found is None:
            raise ValueError(text)
        return cls(None if found[1] is None else int(found[1]), found[2])

    def __str__(self) -> str:
        return self.hash if self.n is None else f"{self.n}:{self.hash}"


_encode: Final = msgspec.json.Encoder().encode
_line: Final = msgspec.json.Decoder(AnyLine)
_head: Final = msgspec.json.Decoder(Head)


def moment(unix: float) -> dt.datetime:
    return _TIME(unix, dt.UTC)


def seal(buffer: bytearray, line: Struct) -> str:
    """Append a line with its end; its hash."""
    body = _encode(line)[:-1]
    digest = sha256(body).hexdigest()
    buffer += body
    buffer += _SEPARATOR
    buffer += digest.encode()
    buffer += b'"}\n'
    return digest


def sealed(line: Struct) -> bytes:
    """A line's bytes with their end."""
    buffer = bytearray()
    seal(buffer, line)
    return bytes(buffer)


@lru_cache(maxsize=1024)
def _short(text: str) -> str:
    """Names, which recur."""
    return quoted(text)


def of_request(n: int, prev: str, entry: EndedRequest) -> RequestEnded:
    return RequestEnded(
        n,
        prev,
        _TIME(entry.ended_at, dt.UTC),
        quoted(entry.request_id),
        _short(entry.key),
        _short(entry.model),
        _short(entry.adapter),
        _short(entry.path),
        entry.status,
        entry.outcome,
        entry.slot,
        entry.attempts,
        entry.continued,
        entry.prompt_tokens,
        entry.cached_tokens,
        entry.output_tokens,
        entry.exact,
        entry.duration_s,
        entry.overflow != "",
        entry.overflow,
        entry.overflow_reason,
    )


def of_control(n: int, prev: str, entry: ControlEntry) -> Controlled:
    verb, arguments, slot, user, reason = (
        quoted(text, most)
        for text, most in (
            (entry.verb, 200), (entry.arguments, 2000), (entry.slot, 200), (entry.user, 200), (entry.reason, 2000),
        )
    )  # fmt: skip
    return Controlled(
        n, prev, moment(entry.at), verb, arguments, slot, user, entry.uid, entry.gid, entry.pid,
        entry.status, entry.result, reason,
    )  # fmt: skip


def parsed(raw: bytes) -> tuple[AnyLine, str]:
    """A line without its end, and its hash. Raises ChainError."""
    body, digest = _opened(raw)
    try:
        return _line.decode(raw), digest
    except msgspec.DecodeError:
        kind = _kind(body)
        raise ChainError(
            f"is of a kind that this version does not know: {kind}"
            if kind
            else "is not a line of an audit trail"
        ) from None


def parsed_head(raw: bytes) -> Head | None:
    """The content of `audit.head`; None where it is none."""
    raw = raw.rstrip(b" \n\0")
    try:
        _opened(raw)
        head = _head.decode(raw)
    except (ChainError, msgspec.DecodeError):
        return None
    return head if _HASH.fullmatch(head.last) and FileName.parse(head.file) else None


def _opened(raw: bytes) -> tuple[bytes, str]:
    body, tail = raw[:-_TAIL_BYTES], raw[-_TAIL_BYTES:]
    if not tail.startswith(_SEPARATOR) or not tail.endswith(b'"}') or raw[:1] != b"{":
        raise ChainError("changed or incomplete: it is not a line of an audit trail")
    digest = sha256(body).hexdigest()
    if tail[len(_SEPARATOR) : -2] != digest.encode():
        raise ChainError("changed: its hash is not that of its bytes")
    return body, digest


def _kind(body: bytes) -> str:
    try:
        found: Any = msgspec.json.decode(body + b"}")
    except msgspec.DecodeError:
        return ""
    return quoted(str(found.get("kind", ""))) if isinstance(found, dict) else ""


class Chain:
    """Follows a trail from line to line."""

    def __init__(self, last: Link) -> None:
        self.last = last

    def follow(self, line: Line, digest: str) -> None:
        """The next line, and its hash. Raises ChainError; `last` stays then."""
        want = self.last.n + 1
        if line.n > want:
            missing = f"line {want}" if line.n == want + 1 else f"lines {want} to {line.n - 1}"
            raise ChainError(f"is line {line.n} of the trail: {missing} must stand before it", gap=True)
        if line.n < want:
            raise ChainError(f"is line {line.n} of the trail, where line {want} must stand")
        if line.prev != self.last.hash:
            raise ChainError("replaced: the next line follows another one", before=True)
        self.last = Link(line.n, digest)
