"""What is said to this hop: Connection and what it nominates, Expect, Upgrade, and requests in a row."""

# ruff: noqa: E501 - a case is a line

from __future__ import annotations

from proxy.http_cases.model import (
    BODY,
    GOT,
    LAST,
    PATH,
    POSTED,
    SMUGGLED,
    Await,
    Case,
    Outcome,
    Pause,
    Request,
    Step,
    chunk,
    chunked,
    get,
    head,
    in_pieces,
    post,
    refused,
    served,
)

_OK = (served(GOT),)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def _hop(
    name: str,
    *fields: str,
    lacks: tuple[str, ...],
    has: tuple[tuple[str, str], ...] = (),
    rfc: str = "9110 7.6.1",
    closes: bool | None = False,
) -> Case:
    """These fields are for this hop: the others pass, these don't."""
    return Case(
        f"hop: {name}",
        rfc,
        (post(*fields),),
        (served(Request("POST", PATH, BODY, has, lacks), closes=closes),),
    )


def _row(
    name: str,
    right: tuple[Outcome, ...],
    *sends: Step,
    rfc: str = "9112 9.3.2",
    methods: tuple[str, ...] = (),
) -> Case:
    return Case(f"row: {name}", rfc, sends, right, methods)


def _expect(name: str, right: tuple[Outcome, ...], *sends: Step, rfc: str = "9110 10.1.1") -> Case:
    return Case(f"expect: {name}", rfc, sends, right)


def _early(name: str, right: Outcome, sent: bytes, method: str = "POST") -> Case:
    """Answered by its head alone: the body that follows is no request."""
    asked = sent.replace(b"\r\n\r\n", b"\r\nContent-Length: %d\r\n\r\n" % len(SMUGGLED), 1)
    settings = {"cors_origins": ("https://chat.example",)}
    return Case(f"early: {name}", "9112 9.3", (asked, Pause(), SMUGGLED), (right,), (method,), settings)


_PREFLIGHT = ("Origin: https://chat.example", "Access-Control-Request-Method: POST")
_ASKED = head(*_PREFLIGHT, method="OPTIONS", target=PATH)
_ALLOWED = Outcome((frozenset({204}),), True)


def _second(*fields: str) -> Request:
    return Request("GET", "/version?2", *fields)  # type: ignore[arg-type]


_TWO = get(target="/version?2")

CASES: tuple[Case, ...] = (
    _hop("Keep-Alive", "Connection: keep-alive", "Keep-Alive: timeout=5", lacks=("keep-alive",)),
    _hop("TE", "Connection: TE", "TE: trailers, gzip;q=0.5", lacks=("te",), rfc="9110 10.1.4"),
    _hop("TE that nobody nominates", "TE: trailers", lacks=("te",), rfc="9110 10.1.4"),
    _hop("TE: chunked", "TE: chunked", lacks=("te",), rfc="9110 10.1.4"),
    _hop("Trailer", "Trailer: X-Checksum", lacks=("trailer",), rfc="9110 6.6.2"),
    _hop("Proxy-Connection", "Proxy-Connection: keep-alive", lacks=("proxy-connection",), rfc="9112 C.2.2"),
    _hop("Proxy-Authorization", "Proxy-Authorization: Basic dTpw", lacks=("proxy-authorization",), rfc="9110 11.7.2"),
    _hop("Proxy-Authenticate", "Proxy-Authenticate: Basic", lacks=("proxy-authenticate",), rfc="9110 11.7.1"),
    _hop("Upgrade", "Connection: Upgrade", "Upgrade: websocket", lacks=("upgrade",), rfc="9110 7.8"),
    _hop("Upgrade that nobody nominates", "Upgrade: websocket", lacks=("upgrade",), rfc="9110 7.8"),
    _hop("Upgrade to h2c", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__", lacks=("upgrade", "http2-settings"), rfc="7540 3.2"),
    _hop("Upgrade to h2c with one nomination", "Connection: Upgrade", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__", lacks=("upgrade", "http2-settings"), rfc="7540 3.2"),
    _hop("Upgrade to TLS", "Connection: Upgrade", "Upgrade: TLS/1.0", lacks=("upgrade",), rfc="2817 3"),
    _hop("nominated", "Connection: X-Secret", "X-Secret: 1", "X-Other: 2", lacks=("x-secret",), has=(("x-other", "2"),)),
    _hop("nominated in odd case", "cOnNeCtIoN: x-SECRET", "X-secret: 1", lacks=("x-secret",)),
    _hop("nominated after what it names", "X-Secret: 1", "X-Secret: 2", "Connection: X-Secret", lacks=("x-secret",)),
    _hop("nominated in a list", "Connection: keep-alive,X-A , X-B", "X-A: 1", "X-B: 2", "X-C: 3", lacks=("x-a", "x-b"), has=(("x-c", "3"),)),
    _hop("nominated in two lines", "Connection: X-A", "Connection: X-B", "X-A: 1", "X-B: 2", lacks=("x-a", "x-b")),
    _hop("nominated with empty elements", "Connection: ,, X-A,,", "X-A: 1", lacks=("x-a",), rfc="9110 5.6.1.2"),
    _hop("nominated and not there", "Connection: X-A", "X-AB: 1", lacks=(), has=(("x-ab", "1"),)),
    _hop("nominated with close", "Connection: close, X-A", "X-A: 1", lacks=("x-a",), closes=True),
    _hop("no token is nominated", "Connection: X-A: 1", "X-A: 1: 2", lacks=(), closes=None),
    _hop("a thousand nominations", "Connection: " + ", ".join(f"x-{n}" for n in range(900)), "X-7: 1", "Y: 2", lacks=("x-7",), has=(("y", "2"),)),
    Case("hop: nominates Content-Length", "9110 7.6.1", (post("Connection: Content-Length") + get(),), (served(POSTED, GOT),)),
    Case("hop: nominates Host", "9110 7.6.1", (post("Connection: Host"),), (served(POSTED),)),
    Case("hop: nominates Authorization", "9110 7.6.1", (post("Connection: Authorization", "Authorization: Bearer k"),), (served(POSTED), refused(400, 401, closes=None))),
    Case("hop: nominates Content-Type", "9110 7.6.1", (post("Connection: Content-Type"),), (served(POSTED), refused(400, closes=None))),
    Case("hop: nominates X-Request-Id", "9110 7.6.1", (post("Connection: X-Request-Id", "X-Request-Id: abc"),), (served(POSTED),)),
    Case("hop: nominates Transfer-Encoding", "9112 6.1", (chunked(chunk(BODY) + LAST, "Connection: Transfer-Encoding") + get(),), (served(POSTED, GOT), refused(400))),
    Case("hop: nominates Connection", "9110 7.6.1", (post("Connection: Connection"),), (served(POSTED),)),
    Case("hop: X-Request-Id is kept", "-", (post("X-Request-Id: abc-1"),), (served(Request("POST", PATH, BODY, (("x-request-id", "abc-1"),))),)),
    Case("hop: two X-Request-Id become one of ours", "-", (post("X-Request-Id: a", "X-Request-Id: b"),), (served(POSTED),)),
    Case("hop: an odd X-Request-Id becomes one of ours", "-", (post("X-Request-Id: a b"),), (served(POSTED),)),
    Case("hop: traceparent passes", "-", (post("traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),), (served(Request("POST", PATH, BODY, (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),))),)),
    # --- Expect ---
    _expect("the body after 100", (served(POSTED, interim=True),), post("Expect: 100-continue", body=b"", length=False).replace(b"\r\n\r\n", b"\r\nContent-Length: %d\r\n\r\n" % len(BODY)), Await(_CONTINUE), BODY),
    _expect("a chunked body after 100", (served(POSTED, interim=True),), post("Expect: 100-continue", "Transfer-Encoding: chunked", body=b"", length=False), Await(_CONTINUE), chunk(BODY) + LAST),
    _expect("any case", (served(POSTED, interim=True),), post("eXPECT: 100-CONTINUE", f"Content-Length: {len(BODY)}", body=b"", length=False), Await(_CONTINUE), BODY),
    _expect("the body with the head", (served(POSTED, interim=None),), post("Expect: 100-continue")),
    _expect("no body to come", (served(GOT, interim=None),), get("Expect: 100-continue")),
    _expect("HTTP/1.0 gets no 100", (served(POSTED, closes=True), refused(417)), post("Expect: 100-continue", version="HTTP/1.0")),
    _expect("a request after it", (served(POSTED, GOT, interim=None),), post("Expect: 100-continue") + get()),
    _expect("no 100 for a path that is not there", (refused(404, closes=None),), post("Expect: 100-continue", "Content-Length: 9", body=b"", length=False, target="/nowhere")),
    _expect("no 100 for a method that is not there", (refused(405, closes=None),), post("Expect: 100-continue", "Content-Length: 9", body=b"", length=False, target="/version")),
    _expect("no 100 for a body too large", (refused(413),), post("Expect: 100-continue", "Content-Length: 99999999999", body=b"", length=False)),
    _expect("no 100 for bad framing", (refused(400),), post("Expect: 100-continue", "Content-Length: 5", "Content-Length: 6", body=b"", length=False)),
    _expect("no 100 for a coded body", (refused(415),), post("Expect: 100-continue", "Content-Encoding: gzip", "Content-Length: 5", body=b"", length=False)),
    _expect("another", (refused(417),), post("Expect: magic") + SMUGGLED),
    _expect("two", (refused(417, 400),), post("Expect: 100-continue, magic") + SMUGGLED),
    _expect("in two lines", (refused(417, 400), served(POSTED, interim=None)), post("Expect: 100-continue", "Expect: 100-continue")),
    _expect("with a value", (refused(417, 400),), post("Expect: 100-continue=yes")),
    _expect("empty", (refused(417, 400), served(POSTED, interim=None)), post("Expect:")),
    _expect("almost", (refused(417, 400),), post("Expect: 100-continued")),
    # --- answers that come before the body ---
    _early("a preflight", _ALLOWED, _ASKED),
    _early("a preflight of a path that is not there", _ALLOWED, head(*_PREFLIGHT, method="OPTIONS", target="/nowhere")),
    Case("early: a chunked preflight", "9112 9.3", (head(*_PREFLIGHT, "Transfer-Encoding: chunked", method="OPTIONS", target=PATH), Pause(), chunk(SMUGGLED) + LAST + SMUGGLED), (_ALLOWED,), settings={"cors_origins": ("*",)}),
    Case("early: a preflight with its body", "9112 9.3", (_ASKED.replace(b"\r\n\r\n", b"\r\nContent-Length: %d\r\n\r\n" % len(SMUGGLED)) + SMUGGLED + get(),), (Outcome((frozenset({204}), frozenset({200})), False, (GOT,)), _ALLOWED), settings={"cors_origins": ("*",)}),
    _early("OPTIONS that is no preflight", refused(405), head(method="OPTIONS", target=PATH)),
    _early("404", refused(404), head(method="POST", target="/nowhere")),
    _early("404 to GET", refused(404), head(target="/nowhere"), "GET"),
    _early("404 to HEAD", refused(404), head(method="HEAD", target="/nowhere"), "HEAD"),
    _early("405", refused(405), head(method="POST")),
    _early("415", refused(415), head("Content-Encoding: gzip", method="POST", target=PATH)),
    _early("417", refused(417), head("Expect: magic", method="POST", target=PATH)),
    _early("501", refused(501), head(target="/v1/realtime"), "GET"),
    _early("GET of what is there", refused(400), get(), "GET"),
    _early("HEAD of what is there", refused(400), head(method="HEAD"), "HEAD"),
    Case("early: 413", "9112 9.3", (head(f"Content-Length: {len(SMUGGLED)}", method="POST", target=PATH), Pause(), SMUGGLED), (refused(413),), settings={"max_body_bytes": 9}),
    # --- requests in a row ---
    _row("two", (served(GOT, _second()),), get() + _TWO),
    _row("three", (served(GOT, _second(), POSTED),), get() + _TWO + post()),
    _row("twenty", (served(*[GOT] * 20),), get() * 20),
    _row("two posts", (served(POSTED, POSTED),), post() * 2),
    _row("two chunked posts", (served(POSTED, POSTED),), chunked(chunk(BODY) + LAST) * 2),
    _row("chunked, then length, then none", (served(POSTED, POSTED, GOT),), chunked(chunk(BODY) + LAST) + post() + get()),
    _row("one after the other's answer", (served(GOT, _second()),), get(), Await(b"recorded"), Pause(), _TWO),
    _row("cut inside the second head", (served(POSTED, _second()),), *in_pieces(post() + _TWO, len(post()) + 10)),
    _row("cut inside the first body", (served(POSTED, _second()),), *in_pieces(post() + _TWO, len(post()) - 5)),
    _row("the second's body comes later", (served(GOT, POSTED),), *in_pieces(get() + post(), len(get()) + len(post()) - len(BODY))),
    _row("an own page between", (Outcome((frozenset({200}),) * 3, False, (GOT, _second())),), get() + get(target="/health") + _TWO),
    _row("the first is not there", (Outcome((frozenset({404}), frozenset({200})), False, (_second(),)), refused(404)), get(target="/nowhere") + _TWO),
    _row("the first's JSON is none", (Outcome((frozenset({400}), frozenset({200})), False, (_second(),)), refused(400)), post(body=b"{") + _TWO),
    _row("good, then bad", (refused(400, after=(GOT,)),), get() + get("X : y") + SMUGGLED),
    _row("good, then bad framing", (refused(400, after=(POSTED,)),), post() + post("Content-Length: 5") + SMUGGLED),
    _row("good, then bad chunks", (refused(400, after=(POSTED,)),), post() + chunked(b"zz\r\n") + SMUGGLED),
    _row("good, then nonsense", (refused(400, after=(GOT,)),), get() + b"nonsense\r\n\r\n" + SMUGGLED),
    _row("good, then another version", (refused(400, 505, after=(GOT,)),), get() + get(version="HTTP/2.0") + SMUGGLED),
    _row("good, then too large", (refused(400, 431, after=(GOT,)),), get() + get("X: " + "y" * 70_000)),
    _row("good, then a coded body", (refused(415, after=(POSTED,)),), post() + post("Content-Encoding: gzip") + SMUGGLED),
    _row("bad, then good", (refused(400),), get("X : y") + SMUGGLED),
    _row("nothing after close", (served(GOT, closes=True),), get("Connection: close") + SMUGGLED, rfc="9112 9.6"),
    _row("nothing after close in odd case", (served(GOT, closes=True),), get("connection: X, CLOSE") + SMUGGLED, rfc="9112 9.6"),
    _row("nothing after close and keep-alive", (served(GOT, closes=True),), get("Connection: keep-alive, close") + SMUGGLED, rfc="9112 9.3"),
    _row("nothing after close of a post", (served(POSTED, closes=True),), post("Connection: close") + SMUGGLED, rfc="9112 9.6"),
    _row("nothing after HTTP/1.0", (served(GOT, closes=True),), get(version="HTTP/1.0") + SMUGGLED, rfc="9112 9.3"),
    _row("nothing after 413", (refused(413),), post("Content-Length: 99999999999", length=False, body=b"") + SMUGGLED, rfc="9110 15.5.14"),
    _row("nothing after 417", (refused(417),), post("Expect: x", body=SMUGGLED), rfc="9110 10.1.1"),
    _row("nothing after 415", (refused(415),), post("Content-Encoding: gzip", body=SMUGGLED), rfc="9110 8.4"),
    _row("junk after a good one", (refused(400, after=(GOT,)),), get() + b"\x00\x01\x02\r\n\r\n"),
    _row("HEAD between", (served(GOT, GOT, _second()), served(GOT, Request("HEAD", "/version"), _second())), get() + head(method="HEAD") + _TWO, methods=("GET", "HEAD", "GET")),
    _row("Connection is unknown", _OK, get("Connection: foo")),
    _row("Connection is empty", _OK, get("Connection:")),
)  # fmt: skip
