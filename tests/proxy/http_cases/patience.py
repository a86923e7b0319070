"""Clients that are slow, that stop in the middle, or that end their side."""

# ruff: noqa: E501 - a case is a line

from __future__ import annotations

from proxy.http_cases.model import (
    BODY,
    GOT,
    LAST,
    PATH,
    POSTED,
    SLOW_S,
    Await,
    Case,
    HalfClose,
    Outcome,
    Pause,
    Step,
    chunk,
    chunked,
    dropped,
    get,
    in_pieces,
    post,
    refused,
    served,
)

_HEADS = {"header_timeout_s": SLOW_S}
_BODIES = {"body_timeout_s": SLOW_S}


def _slow(
    name: str, right: tuple[Outcome, ...], *sends: Step, rfc: str = "9110 15.5.9", **settings: object
) -> Case:
    return Case(f"slow: {name}", rfc, sends, right, settings=settings)


def _half(name: str, right: tuple[Outcome, ...], *sends: Step) -> Case:
    """The client ends its side after these."""
    return Case(f"half: {name}", "9112 9.6", (*sends, HalfClose()), right)


def _drip(data: bytes, seconds: float) -> tuple[Step, ...]:
    return tuple(step for byte in data for step in (bytes([byte]), Pause(seconds)))


_ANNOUNCED = post(f"Content-Length: {len(BODY)}", body=b"", length=False)

CASES: tuple[Case, ...] = (
    _slow("half a request line", (refused(408), dropped()), b"GET /ver", **_HEADS),
    _slow("a head without its end", (refused(408), dropped()), get()[:-2], **_HEADS),
    _slow("a head without its last byte", (refused(408), dropped()), get()[:-1], **_HEADS),
    _slow("a field every now and then", (refused(408), dropped()), get()[:-2], *(step for _ in range(20) for step in (b"X-A: b\r\n", Pause(0.05))), **_HEADS),
    _slow("a byte every now and then", (refused(408), dropped()), *_drip(b"GET /version HTTP/1.1\r\nX-Aaaaaaaaaaaaaaaaaaaaaaaaaaaa", 0.02), **_HEADS),
    _slow("empty lines every now and then", (refused(408, 400), dropped()), *_drip(b"\r\n" * 12, 0.04), **_HEADS),
    _slow("the second head", (refused(408, after=(GOT,)), dropped(GOT)), get() + b"GET /ver", **_HEADS),
    _slow("a body without its end", (refused(408), dropped()), _ANNOUNCED + BODY[:-1], **_BODIES),
    _slow("no byte of a body", (refused(408), dropped()), _ANNOUNCED, **_BODIES),
    _slow("a chunked body without its end", (refused(408), dropped()), chunked(chunk(BODY)), **_BODIES),
    _slow("half a chunk", (refused(408), dropped()), chunked(chunk(BODY)[:-5]), **_BODIES),
    _slow("half a size line", (refused(408), dropped()), chunked(b"1"), **_BODIES),
    _slow("trailers without an end", (refused(408), dropped()), chunked(chunk(BODY) + b"0\r\nX-T: 1\r\n"), **_BODIES),
    _slow("a body that never comes after 100", (Outcome((frozenset({408}),), True, (), True), Outcome((), True, (), True)), _ANNOUNCED.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"), **_BODIES),
    _slow("a slow body is no slow head", (served(POSTED),), _ANNOUNCED, *_drip(BODY, 0.02), **_HEADS),
    _slow("a head in time, in many pieces", (served(GOT),), *in_pieces(get(), 5, 10, 20, 30), rfc="9112 2.2"),
    _slow("the next one after a while", (served(GOT, GOT),), get(), Await(b"recorded"), Pause(2 * SLOW_S), get(), **_HEADS, rfc="9112 9.3"),
    _slow("an answer that takes longer than a head may", (served(POSTED, GOT),), post(), Await(b"recorded"), Pause(2 * SLOW_S), get(), **_HEADS, **_BODIES, rfc="9112 9.3"),
    _half("nothing", (dropped(),)),
    _half("half a line", (refused(400, 408), dropped()), b"GET /ver"),
    _half("a head without its end", (refused(400, 408), dropped()), get()[:-2]),
    _half("a whole request", (served(GOT, closes=True), dropped(GOT), Outcome((), True, (GOT,)), dropped()), get()),
    _half("a whole post", (served(POSTED, closes=True), Outcome((), True, (POSTED,)), dropped()), post()),
    _half("a whole post that closes", (served(POSTED, closes=True), Outcome((), True, (POSTED,)), dropped()), post("Connection: close")),
    _half("half a body", (refused(400, 408), dropped()), _ANNOUNCED + BODY[:-1]),
    _half("no body", (refused(400, 408), dropped()), _ANNOUNCED),
    _half("a body of which JSON would be whole", (refused(400, 408), dropped()), post(f"Content-Length: {len(BODY) + 5}", length=False)),
    _half("half a chunk", (refused(400, 408), dropped()), chunked(chunk(BODY)[:-5])),
    _half("chunks without the last", (refused(400, 408), dropped()), chunked(chunk(BODY))),
    _half("the last chunk without its end", (refused(400, 408), dropped()), chunked(chunk(BODY) + LAST[:-2])),
    _half("after an answer", (served(GOT, closes=True),), get(), Await(b"recorded"), Pause()),
    _half("half a second request", (refused(400, 408, after=(GOT,)), dropped(GOT), Outcome((), True, (GOT,)), dropped()), get() + b"GET /ver"),
    Case("half: a head that is none", "9112 9.6", (get("X : y"), HalfClose()), (refused(400), dropped())),
    Case("half: a completion in HTTP/1.0 without length", "9112 6.3", (post(length=False, body=BODY, version="HTTP/1.0", target=PATH), HalfClose()), (refused(400), dropped())),
)  # fmt: skip
