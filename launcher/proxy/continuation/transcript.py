"""What a client has been told so far: the text of one plain stream, followed at almost no cost.

An engine's stream is one event per token, alike but for the text (vLLM 0.32,
entrypoints/openai/chat_completion/serving.py and completion/serving.py)::

    data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,
    "delta":{"content":"` Hello`"},"logprobs":null,"finish_reason":null}]}

The bytes before and after the text are learned from the first such event; after that an event costs two
comparisons and a copy of its text, which stays JSON-escaped. Whatever is not of that shape is parsed: the
role event, the last one (`finish_reason`), the usage, and what makes a stream impossible to go on with.

Where the instance was asked for token ids (token_ids.py), `feed` and the hot path take them out of each event.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from launcher.proxy.continuation.quick_ids import Frame, Kept, Quick, quick_with_ids
from launcher.proxy.continuation.token_ids import TokenIds, Tokens, around_ids, numbers, without_meaning
from launcher.proxy.sse.chunk_sizes import CHUNK_SIZES, LINE_BYTES, NEVER, SIZE_LINES, SIZES
from launcher.proxy.sse.tracker import EVENT_END

TEXT_BYTES = 256 * 1024
"""Text that one stream may keep, in bytes: about 60,000 tokens, more than the context of most models."""

UNREADABLE = (
    msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, ValueError, AttributeError, LookupError,
)  # fmt: skip
"""What reading JSON of an unknown shape may raise."""

_PIECE = re.compile(rb'((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPED = re.compile(rb'(?:[^"\\]|\\.)*', re.DOTALL)
_TEXT_KEY = re.compile(rb'"(?:content|text)":"')
_CHOICE_KEYS = frozenset({"index", "delta", "text", "finish_reason", "stop_reason"})
_DELTA_KEYS = frozenset({"role", "content"})


class Pattern:
    """The constant bytes around the text of one stream's content events."""

    __slots__ = ("prefix", "suffix")

    def __init__(self) -> None:
        self.prefix = NEVER
        self.suffix = NEVER

    @property
    def known(self) -> bool:
        """An ordinary event has been seen."""
        return self.prefix is not NEVER

    def learn(self, event: bytes) -> bytes | None:
        """Take the bytes around the text of an event that is known to carry nothing else; the escaped text.

        None: the text is not where it can be found without a parser (spaces in the JSON); nothing is learned.
        """
        key = _TEXT_KEY.search(event)
        if key is None:
            return None
        text = _ESCAPED.match(event, key.end())
        end = len(event) if text is None else text.end()
        if event[end : end + 1] != b'"':
            return None
        self.prefix, self.suffix = event[: key.end()], event[end:]
        return event[key.end() : end]

    def piece(self, event: bytes) -> bytes | None:
        """The escaped text of an event of this shape; None when it has another."""
        prefix, suffix = self.prefix, self.suffix
        if (
            not event.startswith(prefix)
            or not event.endswith(suffix)
            or len(event) < len(prefix) + len(suffix)
        ):
            return None
        text = event[len(prefix) : len(event) - len(suffix)]
        return text if b'"' not in text or _ESCAPED.fullmatch(text) else None


class Transcript:
    """One stream as its client saw it. `feed` every byte that is passed on, whole events at a time."""

    __slots__ = (
        "_around_ids", "_limit", "_prefix", "_quick", "_skip", "_suffix", "_tail", "created", "done", "finish_reason",
        "id", "ids", "model", "object", "odd", "pattern", "role_sent", "text", "usage_seen",
    )  # fmt: skip

    def __init__(self, limit_bytes: int = TEXT_BYTES, *, token_ids: bool = False) -> None:
        """`token_ids`: the instance was asked for them."""
        self._limit = limit_bytes
        self.ids = TokenIds() if token_ids else None
        self._around_ids: tuple[bytes, bytes] | None = None  # see token_ids.around_ids
        self.pattern = Pattern()
        self._prefix = self._suffix = NEVER
        self._skip = self._tail = 0
        self._quick: Quick | None = None
        self.text = bytearray()  # the escaped text of each event, and a quotation mark after each
        self.id: str | None = None
        self.object: str | None = None
        self.created: int | None = None
        self.model: str | None = None
        self.role_sent = False
        self.finish_reason: str | None = None
        self.usage_seen = False
        self.done = False  # [DONE] came
        self.odd: str | None = None
        """Why this stream can't be continued; nothing is kept of it any more."""

    def quick(self, write: Callable[[bytes], None], moved: list[int]) -> Quick:
        """The hot path: a function that passes on one read from the instance, to `write`, if it is exactly one
        chunk (RFC 9112 7.1, size in lower-case hex) with exactly one ordinary event in it, or several such chunks;
        it returns False, and has done nothing, if it is anything else.

        `moved` are its sums: events and bytes. For one chunk it is one call, two comparisons of bytes and a copy of
        the text: each further call or attribute on this path is seen in the proxy's CPU time.
        """
        if self._quick is None:
            plain = self.ids is None or self.ids.lost
            make = self._make_quick if plain else self._make_quick_with_ids
            self._quick = make(write, moved)
        return self._quick

    def _make_quick(self, write: Callable[[bytes], None], moved: list[int]) -> Quick:
        text, keep = self.text, self.text.extend
        limit, prefix = self._limit, self._prefix
        end = self._suffix + b"\r\n"
        tail = 1 - len(end)  # the piece has the quotation mark that ends it
        two = 2 * (len(prefix) + len(end))
        starts: dict[int, bytes] = {}  # by a read's length: its size line and the prefix

        def start_of(size: int) -> bytes:
            line = SIZE_LINES[size] if size < SIZES and self.odd is None else None
            starts[size] = start = NEVER if line is None else line + prefix
            return start

        def quick(raw: bytes) -> bool:
            size = len(raw)
            start = starts.get(size) or start_of(size)
            if raw.startswith(start) and raw.endswith(end):
                piece = raw[len(start) : tail]
                if not piece or piece.find(b'"') != len(piece) - 1:
                    return False
                keep(piece)
                moved[0] += 1
            else:
                pieces = _pieces(raw, prefix, end) if size > two and self.odd is None else None
                if not pieces:
                    return False
                keep(b"".join(pieces))
                moved[0] += len(pieces)
            moved[1] += size
            write(raw)
            if len(text) > limit:
                self._give_up(f"more than {limit} bytes of text")
                starts.clear()
            return True

        return quick

    def _make_quick_with_ids(self, write: Callable[[bytes], None], moved: list[int]) -> Quick:
        if self.ids is None or self._around_ids is None or self.odd is not None:
            return _not_now
        frame = Frame(self.pattern.prefix, *self._around_ids, self.pattern.suffix)
        return quick_with_ids(
            frame, Kept(self.text, self.ids.entries, self._limit, self._too_long), write, moved
        )

    def _too_long(self) -> None:
        self._give_up(f"more than {self._limit} bytes of text")

    def feed(self, payload: bytes) -> bytes:
        """Follow what the client gets: one or more whole events. One ordinary event costs under a microsecond.

        Returns what the client gets: the same bytes, without token ids where the instance was asked for them.
        """
        if self.ids is not None:
            return self._look_with_ids(payload, self.ids)
        if payload.startswith(self._prefix) and payload.endswith(self._suffix):
            piece = payload[self._skip : self._tail]  # with the quotation mark that ends it
            if piece and piece.find(b'"') == len(piece) - 1:
                text = self.text
                text += piece
                if len(text) > self._limit:
                    self._too_long()
                return payload
        self._look(payload)
        return payload

    def pieces(self) -> list[bytes]:
        """The JSON-escaped text of each event that carried any or none, in order."""
        return [match[1] for match in _PIECE.finditer(bytes(self.text))]

    def _give_up(self, why: str) -> None:
        self.odd = why
        self.text.clear()
        self._prefix = self._suffix = NEVER
        self._around_ids = self._quick = None

    def tokens(self) -> Tokens | None:
        """The ids of all tokens so far, where they are all known."""
        ids = self.ids
        if ids is None or ids.lost or ids.prompt is None or self.odd is not None:
            return None
        return Tokens(numbers(ids.prompt), ids.of_events())

    def forget_silent(self) -> None:
        """Forget the last events as far as they brought no text: their tokens will come again."""
        pieces = self.pieces()
        told = max((number for number, piece in enumerate(pieces, 1) if piece), default=0)
        if told < len(pieces):
            del self.text[told - len(pieces) :]
        if self.ids is not None:
            self.ids.keep(told)

    def forget_ids(self) -> None:
        """From here on the stream's instance is not asked for token ids."""
        self.ids = self._quick = None

    def _keep(self, piece: bytes) -> None:
        self.text += piece
        self.text += b'"'
        if len(self.text) > self._limit:
            self._too_long()

    def _look(self, payload: bytes) -> None:
        start = 0
        for end in EVENT_END.finditer(payload):
            if self.odd is not None:
                return
            event, start = payload[start : end.end()], end.end()
            piece = self.pattern.piece(event)
            if piece is not None:
                self._keep(piece)
            else:
                self._parse(event)
        if start < len(payload):
            self._give_up("a part of an event")

    def _look_with_ids(self, payload: bytes, ids: TokenIds) -> bytes:
        out = bytearray()
        start = 0
        for end in EVENT_END.finditer(payload):
            event, start = payload[start : end.end()], end.end()
            told, tokens = ids.take(event)
            if self.odd is None:
                self._look_at(told, tokens, ids)
            if tokens is None or not without_meaning(told):
                out += told
        if start < len(payload) and self.odd is None:
            self._give_up("a part of an event")
        return bytes(out + payload[start:])

    def _look_at(self, told: bytes, tokens: bytes | None, ids: TokenIds) -> None:
        """One event as the client gets it, and its ids."""
        before = len(self.text)
        piece = self.pattern.piece(told)
        if piece is None:
            self._parse(told)
        else:
            self._keep(piece)
        if tokens is not None and len(self.text) == before and self.odd is None:
            self._keep(b"")  # no text yet: a parser holds it back
        if len(self.text) > before:
            ids.note(tokens)

    def _parse(self, event: bytes) -> None:
        data = event_data(event)
        if data is None:
            return
        if data == b"[DONE]":
            self.done = True
            return
        try:
            parsed = msgspec.json.decode(data)
            why = self._read(event, parsed)
        except UNREADABLE:
            why = "an event that is no chunk"
        if why is not None:
            self._give_up(why)

    def _read(self, event: bytes, chunk: dict[str, Any]) -> str | None:
        """One event that is not of the learned shape. Returns why nothing can go on after it."""
        if chunk.get("error") is not None:
            return "an error event"
        choices = chunk["choices"]
        if self.id is None:
            self.id, self.created = chunk["id"], chunk.get("created")
            self.model, self.object = chunk.get("model"), chunk.get("object")
        usage = chunk.get("usage")
        self.usage_seen = self.usage_seen or bool(usage)
        if not choices:
            return None
        choice = choices[0]
        # llama-server has it in the last choice of /v1/completions (build 11434), vLLM in an event of its own.
        if usage and choice.get("finish_reason") is None:
            return "usage in every event"
        if len(choices) > 1 or choice.get("index", 0) != 0:
            return "several choices"
        return self._read_choice(event, choice)

    def _read_choice(self, event: bytes, choice: dict[str, Any]) -> str | None:
        delta = choice.get("delta") or {}
        strange = [
            *(key for key, value in choice.items() if value is not None and key not in _CHOICE_KEYS),
            *(f"delta.{key}" for key, value in delta.items() if value and key not in _DELTA_KEYS),
        ]
        if strange:
            return f"{strange[0]} in its events"
        content = choice["text"] if "text" in choice else delta.get("content")
        role, finish = delta.get("role"), choice.get("finish_reason")
        if finish is not None:
            self.finish_reason = str(finish)
        self.role_sent = self.role_sent or role is not None
        if content is None or (role is not None and content == ""):
            return None
        if role is None and finish is None:
            self._learn(event)
        self._keep(msgspec.json.encode(content)[1:-1])
        return None

    def _learn(self, event: bytes) -> None:
        if self.pattern.learn(event) is not None:
            self._prefix, self._suffix = self.pattern.prefix, self.pattern.suffix
            self._skip, self._tail = len(self._prefix), 1 - len(self._suffix)
            self._around_ids = around_ids(self._suffix)
            self._quick = None


def _not_now(_raw: bytes) -> bool:
    return False


def _pieces(raw: bytes, prefix: bytes, end: bytes) -> list[bytes]:
    """Of several chunks that came in one read: what to keep of each; none unless all are whole and ordinary."""
    size, at = len(raw), 0
    skip, tail = len(prefix), 1 - len(end)
    found: list[bytes] = []
    while at < size:
        event = raw.find(b"\n", at, at + LINE_BYTES) + 1
        till = at + CHUNK_SIZES.get(raw[at:event], size + 1)
        if till > size or not raw.startswith(prefix, event) or not raw.endswith(end, event + skip, till):
            return []
        piece = raw[event + skip : till + tail]
        if piece.find(b'"') != len(piece) - 1:
            return []
        found.append(piece)
        at = till
    return found


def part_of(piece: bytes) -> str:
    """One event's text; a letter for half a surrogate pair, the other half of which is the next event's."""
    try:
        return text_of([piece])
    except msgspec.DecodeError:
        return "x"


def text_of(pieces: list[bytes]) -> str:
    return str(msgspec.json.decode(b'"' + b"".join(pieces) + b'"'))


def event_data(event: bytes) -> bytes | None:
    """The data of one event, its lines joined as the standard says; None for a comment or an empty event.

    Source: HTML Living Standard, 9.2.6 "Interpreting an event stream".
    """
    found = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(found) if found else None
