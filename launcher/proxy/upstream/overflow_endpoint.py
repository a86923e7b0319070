"""One overflow endpoint: an external API that gets requests which the queue would reject, its connections and its sums.

The client's key, cookies and other fields stay here; `model` is replaced by the endpoint's name for it, and the rest of
the body passes as it is. Responses pass byte for byte, marked `X-Served-By: overflow`.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import ssl
from collections import Counter
from email.utils import parsedate_to_datetime
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import SplitResult, quote, urlsplit

import msgspec

from launcher.balancing.upstreams import Ending
from launcher.base.address import TcpAddress
from launcher.base.api_errors import TOO_MANY, HttpError, blames_request, blames_server
from launcher.base.clock import Moment
from launcher.base.errors import LauncherError, reason
from launcher.base.foreign_json import UNREADABLE
from launcher.base.money import TokenPrices, to_text, token_prices
from launcher.base.money_limits import DailyCap
from launcher.base.watched_file import WatchedFile
from launcher.config import schema
from launcher.config.schema import Overflow
from launcher.proxy.http1.fields import lines_of
from launcher.proxy.http1.requests import RequestHead, selected_head
from launcher.proxy.http1.responses import ResponseHead
from launcher.proxy.observability.timelines import FIELDS
from launcher.proxy.openai.body import MAX_TOKENS, without_mark
from launcher.proxy.openai.prompts import SaidUsage, TokenBounds
from launcher.proxy.request.actions import Outcome
from launcher.proxy.upstream.pool import ConnectionPool, Endpoint

_LOG = logging.getLogger(__name__)

# --- What requests at one overflow endpoint cost: reserved before they are sent, settled by what the endpoint says.

_NO_OUTPUT: Final = frozenset({"/v1/embeddings"})


def has_output(path: str) -> bool:
    """Whether responses of a route have output tokens."""
    return path not in _NO_OUTPUT


def prices_of(settings: Overflow) -> TokenPrices | None:
    if settings.input is None or settings.output is None:
        return None
    return token_prices(settings.input, settings.output, settings.cached)


class OverflowCost:
    """Prices and daily cap of one endpoint. Amounts in picos."""

    def __init__(self, settings: Overflow, cap: DailyCap | None) -> None:
        """`cap`: None where `max_per_day` is not set. An endpoint with `max_per_day` but without a cap is never used."""
        self._name = settings.endpoint
        self.prices = prices_of(settings)
        self.cap = cap
        self._closed = cap is None and settings.max_per_day is not None
        self.most_output = settings.max_output_tokens
        self.spent = 0
        """Of the requests that ended."""
        self.refused = 0
        """Requests that the cap kept here."""
        self.odd = 0
        """Responses whose usage is missing or impossible: they cost what was reserved."""
        self.exceeded = 0
        """Responses that cost more than was reserved."""

    def bound(self, path: str, tokens: TokenBounds) -> int:
        """The most that a request may cost."""
        prices = self.prices
        if prices is None:
            return 0
        each = self.most_output if tokens.output is None else tokens.output
        output = min(tokens.choices * each, MAX_TOKENS) if has_output(path) else 0
        return tokens.prompt * max(prices.prompt, prices.cached) + output * prices.output

    def admits(self, amount: int) -> bool:
        """Whether the cap leaves so much. A refusal is counted, the day's first one is said."""
        cap = self.cap
        if cap is None and not self._closed:
            return True
        if cap is not None and cap.admits(amount):
            return True
        self.refused += 1
        if cap is not None and cap.refuse():
            self._say_reached(cap)
        return False

    def reserve(self, amount: int) -> None:
        if self.cap is not None:
            self.cap.reserve(amount)

    def settle(self, reserved: int, amount: int) -> None:
        self.spent += amount
        if self.cap is not None:
            self.cap.settle(reserved, amount)

    def of(self, path: str, tokens: TokenBounds, reserved: int, said: SaidUsage | None) -> int | None:
        """What a response cost by its usage; None where that is missing, or more than the request allowed."""
        prices = self.prices
        if prices is None:
            return 0
        if said is None or said.prompt > tokens.prompt:
            return None
        if tokens.output is not None and has_output(path) and said.output > tokens.output * tokens.choices:
            return None
        amount = prices.amount(said.prompt, said.cached, said.output)
        if amount > reserved:
            self._note_exceeded()
        return amount

    def note_odd(self) -> None:
        self.odd += 1
        if self.odd == 1:
            _LOG.warning(
                "overflow endpoint %s: a response says no usage, or more than its request allowed; such responses count at "
                "the most that they may cost",
                self._name, extra={"endpoint": self._name},
            )  # fmt: skip

    def _note_exceeded(self) -> None:
        self.exceeded += 1
        if self.exceeded == 1:
            _LOG.warning(
                "overflow endpoint %s: a response cost more than was reserved; raise its max_output_tokens, which is %d",
                self._name, self.most_output, extra={"endpoint": self._name},
            )  # fmt: skip

    def tick(self, now: Moment) -> None:
        """Begin the next day at midnight."""
        cap = self.cap
        if cap is None:
            return
        stopped = cap.reached or not cap.known
        if cap.next_day(now) and stopped:
            _LOG.info(
                "overflow endpoint %s: available again, a new day began", self._name,
                extra={"endpoint": self._name},
            )  # fmt: skip

    def _say_reached(self, cap: DailyCap) -> None:
        until = dt.datetime.fromtimestamp(cap.ends, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        settled, reserved, most = (
            to_text(amount, cap.currency) for amount in (cap.settled, cap.reserved, cap.cap)
        )
        why = (
            f"its max_per_day is spent or reserved ({settled} spent, {reserved} reserved, of {most})"
            if cap.known
            else "what it cost today is not known, because the usage ledger cannot be read"
        )
        _LOG.warning(
            "overflow endpoint %s: %s; its requests stay here until %s", self._name, why, until,
            extra={"endpoint": self._name},
        )  # fmt: skip


MAX_REASON: Final = 500  # characters of an error: some quote what the other side sent
REFUSED: Final = frozenset({401, 402, 403, 407, *range(300, 400)})
"""Statuses that say more of our credentials, or of the way there, than of the client's request."""
_UNTRACED_FIELDS: Final = frozenset({b"accept"})
_REQUEST_FIELDS: Final = _UNTRACED_FIELDS | {*FIELDS}
_RESPONSE_FIELDS: Final = frozenset({b"content-type", b"retry-after"})
# An endpoint that failed and did not say when it may be asked again; and the longest time that one may say.
AVOID_S: Final = 5.0
MAX_RETRY_AFTER_S: Final = 3600.0
_REDIRECT: Final = 300  # this status and higher ones: no work that an API charges for
_LINES: Final = (
    b"Content-Type: application/json\r\nAccept-Encoding: identity\r\nUser-Agent: numa-launcher\r\n"
)


_OUTCOMES: Final = {
    Ending.WHOLE: Outcome.COMPLETED,  # all of the endpoint's response, its 5xx too
    Ending.REFUSED: Outcome.REFUSED,
    Ending.LEFT: Outcome.CLIENT_ABORTED,
    Ending.BROKEN: Outcome.FAILED,
}


def _outcome_of(left: Left) -> Outcome:
    status = left.status
    refused = status is not None and blames_request(status)
    return Outcome.REFUSED if refused and left.ending is Ending.WHOLE else _OUTCOMES[left.ending]


class Health(Enum):
    """What the last responses of an endpoint say of it."""

    GOOD = auto()
    FAILED = auto()  # a moment ago: another endpoint is better
    REFUSES = auto()  # it said when it may be asked again


class OverflowCall(NamedTuple):
    """A request at an endpoint."""

    endpoint: OverflowEndpoint
    model: str
    path: str
    tokens: TokenBounds
    reserved: int
    """Picos that it may cost at most."""


class Left(NamedTuple):
    """How a request left its endpoint."""

    ending: Ending
    status: int | None
    """Of the response; None: none came."""
    reached: bool
    """The endpoint may have got it."""
    retry_after: str | None
    usage: SaidUsage | None


class OverflowEndpoint:
    def __init__(
        self, settings: schema.Overflow, connect_timeout_s: float, cost: OverflowCost, *, named: bool = False
    ) -> None:
        """`named`: clients are told its name. Raises LauncherError when the key's file can't be read or the URL has no
        port or host."""
        self._settings = settings
        self.files = watched_key(settings)
        """Of its API key, where it has one."""
        url = urlsplit(settings.url)
        self._authority, endpoint = _endpoint(url)
        self._base_path = quote(url.path.rstrip("/"), safe="/%!$&'()*+,;=:@~").encode()
        self.name = settings.endpoint
        self.label = f" {self.name}" if named else ""
        """For log lines, where there is more than one."""
        self._served_by = f"X-Served-By: overflow{'/' if named else ''}{self.label[1:]}\r\n".encode()
        self.cost = cost
        self.pool = ConnectionPool(endpoint, connect_timeout_s)
        self.in_flight = 0
        self.sent: Counter[str] = Counter()
        """Requests by model."""
        self.ended: Counter[tuple[str, Outcome]] = Counter()
        """The same by model and outcome; REJECTED: over max_requests, never sent."""
        self._health = Health.GOOD
        self._until = 0.0
        """Loop time until which `_health` counts."""

    @property
    def models(self) -> tuple[str, ...]:
        """Own names of the models that may go there."""
        return tuple(self._settings.models)

    @property
    def full(self) -> bool:
        return self.in_flight >= self._settings.max_requests

    def health(self, now: float) -> Health:
        return self._health if now < self._until else Health.GOOD

    @property
    def capped(self) -> bool:
        return self._settings.max_per_day is not None

    def affords(self, path: str, tokens: TokenBounds) -> bool:
        """Whether its daily cap admits a request; one that it does not is counted."""
        return self.cost.admits(self.cost.bound(path, tokens))

    def body(self, body: bytes | bytearray, model: str) -> bytes:
        """The body with the endpoint's name for `model`. Raises HttpError."""
        try:
            fields = msgspec.json.decode(without_mark(body), type=dict[str, msgspec.Raw])
        except UNREADABLE as error:
            raise HttpError(400, f"cannot read the request: {error}", code="invalid_json") from None
        fields["model"] = msgspec.Raw(msgspec.json.encode(self._settings.models[model]))
        return msgspec.json.encode(fields)

    def head(
        self, head: RequestHead, request_id: str, path: str, length: int, trace: bytes | None = None
    ) -> bytes:
        """The head of a request for `path` with a body of `length` bytes. `trace`: field lines in the place of the client's
        trace context."""
        lines = _LINES if trace is None else _LINES + trace
        for file in self.files:
            key = file.latest(asyncio.get_running_loop().time())
            lines = b"%bAuthorization: Bearer %b\r\n" % (lines, key.encode())
        target = self._base_path + path.removeprefix("/v1").encode()
        return selected_head(
            head,
            request_id,
            length,
            target=target,
            host=self._authority,
            names=_REQUEST_FIELDS if trace is None else _UNTRACED_FIELDS,
            extra=lines,
        )

    def begin(self, model: str, path: str, tokens: TokenBounds) -> OverflowCall:
        """A request goes there: its cost is reserved."""
        reserved = self.cost.bound(path, tokens)
        self.cost.reserve(reserved)
        self.in_flight += 1
        self.sent[model] += 1
        return OverflowCall(self, model, path, tokens, reserved)

    def end(self, call: OverflowCall, left: Left, now: float, wall: float) -> tuple[int, bool]:
        """A request has left: picos that it cost, and whether they are by the usage that the endpoint says."""
        self.in_flight -= 1
        self.ended[call.model, _outcome_of(left)] += 1
        self._judge(left, now, wall)
        amount, exact = self._amount(call, left)
        self.cost.settle(call.reserved, amount)
        return amount, exact

    def _amount(self, call: OverflowCall, left: Left) -> tuple[int, bool]:
        if not left.reached or (left.status is not None and left.status >= _REDIRECT):
            return 0, True
        said = None
        if left.ending is Ending.WHOLE:
            said = self.cost.of(call.path, call.tokens, call.reserved, left.usage)
            if said is None:
                self.cost.note_odd()
        return (call.reserved, False) if said is None else (said, True)

    def _judge(self, left: Left, now: float, wall: float) -> None:
        status = left.status
        if status is not None and (status == TOO_MANY or blames_server(status)):
            said_s = _seconds(left.retry_after, wall)
            self._health = Health.FAILED if said_s is None else Health.REFUSES
            self._until = now + (AVOID_S if said_s is None else min(said_s, MAX_RETRY_AFTER_S))
        elif left.ending is Ending.BROKEN:
            self._health, self._until = Health.FAILED, now + AVOID_S
        elif left.ending is Ending.WHOLE:
            self._health = Health.GOOD

    def passing(self, head: ResponseHead) -> ResponseHead:
        """The head that the client gets."""
        kept = b"".join(head.lines[start:end] for start, end in lines_of(head.lowered, _RESPONSE_FIELDS))
        return head.with_lines(b"%b\r\n%b" % (kept, self._served_by))


def unusable(head: ResponseHead) -> str | None:
    """Why the client can't have this response; None: it can."""
    if head.status in REFUSED:
        return f"it answered {head.status}"
    coding = head.get(b"content-encoding")
    if coding is not None and coding.lower() != "identity":  # not asked for; the client may not read it
        return f"it answered with Content-Encoding {coding}"
    return None


def _seconds(retry_after: str | None, wall: float) -> float | None:
    """Retry-After: a number of seconds, or a date (RFC 9110 section 10.2.3)."""
    if not retry_after:
        return None
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - wall)
    except (ValueError, OverflowError):
        return None


def _endpoint(url: SplitResult) -> tuple[bytes, Endpoint]:
    """`Host`, and where to connect."""
    tls = None
    if url.scheme.lower() == "https":
        tls = ssl.create_default_context()
        tls.set_alpn_protocols(["http/1.1"])
    try:
        port = url.port or (80 if tls is None else 443)
        host = (url.hostname or "").encode("idna").decode()
        return url.netloc.encode("idna"), Endpoint(TcpAddress(host, port), external=True, tls=tls)
    except ValueError as error:
        why = f"cannot use [[proxy.overflow]] url '{url.geturl()}': {error}"
        raise LauncherError(why, 'write "https://host/v1"') from None


def watched_key(settings: schema.Overflow) -> tuple[WatchedFile[str], ...]:
    """The file of its API key, if the endpoint has one. Raises LauncherError when its file cannot be used."""
    if (path := settings.api_key_file) is None:
        return ()
    what = f"key of the overflow endpoint {settings.endpoint}"
    return (WatchedFile(what, partial(_read_key, path), path),)


def _read_key(path: str) -> str:
    remedy = "put the key, and nothing else, into the file of [[proxy.overflow]] api_key_file"
    try:
        key = Path(path).read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise LauncherError(f"cannot read the overflow endpoint's key '{path}': {why}", remedy) from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        why = "it is empty, more than one word or not ASCII"
        raise LauncherError(f"cannot use the overflow endpoint's key '{path}': {why}", remedy)
    return key
