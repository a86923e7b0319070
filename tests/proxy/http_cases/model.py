"""What a case of the strict-HTTP table is, and short ways to write one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BODY = b'{"model":"m","prompt":"hello"}'
SMUGGLED = b"GET /version?smuggled HTTP/1.1\r\nHost: h\r\n\r\n"  # must never arrive behind
SLOW_S = 0.3  # time limit of the cases that run into one
PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing is sent for a while."""

    seconds: float = 0.03


@dataclass(frozen=True, slots=True)
class Await:
    """Nothing is sent until these bytes have come back."""

    mark: bytes


@dataclass(frozen=True, slots=True)
class HalfClose:
    """The client ends its side."""


Step = bytes | Pause | Await | HalfClose


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the engine must have received it: its body byte for byte."""

    method: str
    target: str
    body: bytes = b""
    has: tuple[tuple[str, str], ...] = ()  # fields that passed; names in lower case
    lacks: tuple[str, ...] = ()  # fields that must not have passed


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is right: the answers to the client, what then becomes of its connection, what went behind."""

    answers: tuple[frozenset[int], ...]
    closes: bool | None  # None: either is right
    behind: tuple[Request, ...] = ()
    interim: bool | None = False  # whether 100 Continue came; None: either is right


@dataclass(frozen=True, slots=True)
class Case:
    """One row: what is sent, and every outcome that is right."""

    name: str
    rfc: str  # where it is written; "-" for what no RFC speaks of
    sends: tuple[Step, ...]
    right: tuple[Outcome, ...]
    methods: tuple[str, ...] = ()  # of the requests in a row, where an answer to HEAD is to be read
    settings: Mapping[str, object] = field(default_factory=dict)


GOT = Request("GET", "/version")
POSTED = Request("POST", PATH, BODY)


def served(*behind: Request, closes: bool | None = False, interim: bool | None = False) -> Outcome:
    """Each of these went to the engine and was answered with 200."""
    return Outcome((frozenset({200}),) * len(behind), closes, behind, interim)


def refused(*statuses: int, closes: bool | None = True, after: tuple[Request, ...] = ()) -> Outcome:
    """One of these statuses, nothing behind but the good requests before it."""
    good = (frozenset({200}),) * len(after)
    return Outcome((*good, frozenset(statuses)), closes, after)


def dropped(*after: Request) -> Outcome:
    """Closed without an answer (but those to the good requests before)."""
    return Outcome((frozenset({200}),) * len(after), True, after)


def head(
    *fields: str | bytes,
    method: str = "GET",
    target: str | bytes = "/version",
    version: str = "HTTP/1.1",
    host: str | bytes | None = "Host: h",
) -> bytes:
    """A head of these field lines, as they are."""
    line = b" ".join((method.encode(), _bytes(target), version.encode()))
    lines = (line, *([] if host is None else [host]), *fields, b"")
    return b"".join(_bytes(each) + b"\r\n" for each in lines)


def get(*fields: str | bytes, **more: str | bytes | None) -> bytes:
    """GET /version, which any engine answers."""
    return head(*fields, **more)  # type: ignore[arg-type]


def post(*fields: str | bytes, body: bytes = BODY, length: bool = True, **more: str | bytes | None) -> bytes:
    """A completion; Content-Length is that of the body, unless `length` is False."""
    sizes = (f"Content-Length: {len(body)}",) if length else ()
    more.setdefault("target", PATH)
    return head("Content-Type: application/json", *fields, *sizes, method="POST", **more) + body  # type: ignore[arg-type]


def chunked(body: bytes, *fields: str | bytes, **more: str | bytes | None) -> bytes:
    """A completion whose body comes coded, as these very bytes."""
    return post("Transfer-Encoding: chunked", *fields, body=body, length=False, **more)


def chunk(data: bytes, size: bytes = b"", extension: bytes = b"") -> bytes:
    """One chunk; `size` instead of the true one."""
    return (size or b"%x" % len(data)) + extension + b"\r\n" + data + b"\r\n"


LAST = b"0\r\n\r\n"


def in_pieces(data: bytes, *cuts: int) -> tuple[Step, ...]:
    """The bytes in several writes, with pauses."""
    steps: list[Step] = []
    for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
        steps += [data[start:end], Pause()]
    return tuple(steps[:-1])


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()
