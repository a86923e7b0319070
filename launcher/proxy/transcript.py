"""What a client has been told so far: the text of one plain stream, followed at almost no cost.

An engine's stream is one event per token, alike but for the text (vLLM 0.32,
entrypoints/openai/chat_completion/serving.py and completion/serving.py)::

    data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,
    "delta":{"content":"` Hello`"},"logprobs":null,"finish_reason":null}]}

The bytes before and after the text are learned from the first such event; after that an event costs two
comparisons and a copy of its text, which stays JSON-escaped. Whatever is not of that shape is parsed: the
role event, the last one (`finish_reason`), the usage, and what makes a stream impossible to go on with.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from launcher.proxy.sse import EVENT_END

Quick = Callable[[bytes], bool]

TEXT_BYTES = 256 * 1024
"""Text that one stream may keep, in bytes: about 60,000 tokens, more than the context of most models."""

UNREADABLE = (
    msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, ValueError, AttributeError, LookupError,
)  # fmt: skip
"""What reading JSON of an unknown shape may raise."""

_PIECE = re.compile(rb'((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPED = re.compile(rb'(?:[^"\\]|\\.)*', re.DOTALL)
_TEXT_KEY = re.compile(rb'"(?:content|text)":"')
_NEVER = b"\x00"  # in no event
_SIZES = 4096  # bytes of a chunk with its framing; a longer one takes the longer way
_CHOICE_KEYS = frozenset({"index", "delta", "text", "finish_reason", "stop_reason"})
_DELTA_KEYS = frozenset({"role", "content"})


def _size_lines() -> list[bytes | None]:
    """The size line of a chunk, by the length of the chunk with its framing."""
    lines: list[bytes | None] = [None] * _SIZES
    for size in range(1, _SIZES):
        line = b"%x\r\n" % size
        if len(line) + size + 2 < _SIZES:
            lines[len(line) + size + 2] = line
    return lines


_SIZE_LINES = _size_lines()
_CHUNK_SIZES = {line: size for size, line in enumerate(_SIZE_LINES) if line is not None}
_LINE_BYTES = 5  # the longest of them


class Pattern:
    """The constant bytes around the text of one stream's content events."""

    __slots__ = ("prefix", "suffix")

    def __init__(self) -> None:
        self.prefix = _NEVER
        self.suffix = _NEVER

    @property
    def known(self) -> bool:
        """An ordinary event has been seen."""
        return self.prefix is not _NEVER

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
        "_limit", "_prefix", "_quick", "_skip", "_suffix", "_tail", "created", "done", "finish_reason", "id",
        "model", "object", "odd", "pattern", "role_sent", "text", "usage_seen",
    )  # fmt: skip

    def __init__(self, limit_bytes: int = TEXT_BYTES) -> None:
        self._limit = limit_bytes
        self.pattern = Pattern()
        self._prefix = self._suffix = _NEVER
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
            self._quick = self._make_quick(write, moved)
        return self._quick

    def _make_quick(self, write: Callable[[bytes], None], moved: list[int]) -> Quick:
        text, keep = self.text, self.text.extend
        limit, prefix = self._limit, self._prefix
        end = self._suffix + b"\r\n"
        tail = 1 - len(end)  # the piece has the quotation mark that ends it
        two = 2 * (len(prefix) + len(end))
        starts: dict[int, bytes] = {}  # by a read's length: its size line and the prefix

        def start_of(size: int) -> bytes:
            line = _SIZE_LINES[size] if size < _SIZES and self.odd is None else None
            starts[size] = start = _NEVER if line is None else line + prefix
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

    def feed(self, payload: bytes) -> None:
        """Follow what the client gets: one or more whole events. One ordinary event costs under a microsecond."""
        if payload.startswith(self._prefix) and payload.endswith(self._suffix):
            piece = payload[self._skip : self._tail]  # with the quotation mark that ends it
            if piece and piece.find(b'"') == len(piece) - 1:
                text = self.text
                text += piece
                if len(text) > self._limit:
                    self._give_up(f"more than {self._limit} bytes of text")
                return
        self._look(payload)

    def pieces(self) -> list[bytes]:
        """The JSON-escaped text of each event that carried any or none, in order."""
        return [match[1] for match in _PIECE.finditer(bytes(self.text))]

    def _give_up(self, why: str) -> None:
        self.odd = why
        self.text.clear()
        self._prefix = self._suffix = _NEVER
        self._quick = None

    def _keep(self, piece: bytes) -> None:
        self.text += piece
        self.text += b'"'
        if len(self.text) > self._limit:
            self._give_up(f"more than {self._limit} bytes of text")

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
            self._quick = None


def _pieces(raw: bytes, prefix: bytes, end: bytes) -> list[bytes]:
    """Of several chunks that came in one read: what to keep of each; none unless all are whole and ordinary."""
    size, at = len(raw), 0
    skip, tail = len(prefix), 1 - len(end)
    found: list[bytes] = []
    while at < size:
        event = raw.find(b"\n", at, at + _LINE_BYTES) + 1
        till = at + _CHUNK_SIZES.get(raw[at:event], size + 1)
        if till > size or not raw.startswith(prefix, event) or not raw.endswith(end, event + skip, till):
            return []
        piece = raw[event + skip : till + tail]
        if piece.find(b'"') != len(piece) - 1:
            return []
        found.append(piece)
        at = till
    return found


def event_data(event: bytes) -> bytes | None:
    """The data of one event, its lines joined as the standard says; None for a comment or an empty event.

    Source: HTML Living Standard, 9.2.6 "Interpreting an event stream".
    """
    found = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(found) if found else None
