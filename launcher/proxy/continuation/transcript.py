"""What a client has been told so far: the text of one plain stream, followed at almost no cost.

An engine's stream is one event per token, alike but for the text (vLLM 0.32,
entrypoints/openai/chat_completion/serving.py and completion/serving.py)::

    data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,
    "delta":{"content":"` Hello`"},"logprobs":null,"finish_reason":null}]}

The bytes before and after the text are learned from the first such event (sse/fast_path.py); later events cost two
comparisons and a copy of their text, which stays JSON-escaped. Any other event is parsed: the role event, the last one
(`finish_reason`), the usage, and what makes a stream impossible to continue.

An instance that was asked for token ids (`return_token_ids`) writes the prompt's ids into the first event and the ids
of its tokens into each event; where nobody asks, vLLM writes null in both places, and that is what the client gets.
The ids are taken out without parsing: within a JSON string every quotation mark is escaped, so no text can pass for
one of these keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from launcher.proxy.sse.ends import NO_REASONS, finish_reason_of
from launcher.proxy.sse.fast_path import IDS_KEY, PROMPT_KEY, WORDLESS, EventPattern, FastPath, take_list
from launcher.proxy.sse.tracker import event_data, event_ends

TEXT_BYTES: Final = 256 * 1024
"""Text that one stream may keep, in bytes: about 60,000 tokens, more than the context of most models."""

PARSED_BYTES: Final = 64 * 1024
"""The most bytes of one event that are read: one token's text is shorter, and longer JSON takes too long (6 ms of CPU)."""

UNREADABLE: Final = (
    msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, ValueError, AttributeError, LookupError,
)  # fmt: skip
"""What reading JSON of an unknown shape may raise."""

# What `text` holds of each event, without token ids and with them.
_PIECE: Final = re.compile(rb'((?:[^"\\]|\\.)*+)"()', re.DOTALL)
_PIECE_AND_IDS: Final = re.compile(rb'((?:[^"\\]|\\.)*+)"([^\]]*+)\]', re.DOTALL)
_UNFINISHED: Final = b'"finish_reason":null'
_CHOICE_KEYS: Final = frozenset({"index", "delta", "text", "finish_reason", "stop_reason"})
_DELTA_KEYS: Final = frozenset({"role", "content"})


@dataclass(frozen=True, slots=True)
class Tokens:
    prompt: list[int]
    events: list[list[int]]  # of each event that brought tokens, in order

    @property
    def count(self) -> int:
        return sum(len(event) for event in self.events)


class Transcript:
    """One stream as its client saw it. `feed` every byte that is passed on, whole events at a time."""

    __slots__ = (
        "_keeps_ids", "_limit", "_prompt", "asks_ids", "created", "done", "finish_reason", "id", "model", "object", "odd",
        "pattern", "role_sent", "text", "usage_seen",
    )  # fmt: skip

    def __init__(self, limit_bytes: int = TEXT_BYTES, *, token_ids: bool = False) -> None:
        """`token_ids`: the instance was asked for them."""
        self._limit = 2 * limit_bytes if token_ids else limit_bytes
        self.asks_ids = token_ids
        self._prompt: bytes | None = None  # its ids, "1,2,3"
        self._keeps_ids = token_ids  # so far every event that brought text brought ids, too
        self.pattern = EventPattern()
        self.text = bytearray()  # of each event the escaped text and a quotation mark; with ids, see FastPath
        self.id: str | None = None
        self.object: str | None = None
        self.created: int | None = None
        self.model: str | None = None
        self.role_sent = False
        self.finish_reason: str | None = None
        self.usage_seen = False
        self.done = False  # [DONE] came
        self.odd: str | None = None  # why this stream can't be continued; nothing is kept of it any more

    def arm(self, fast: FastPath, write: Callable[[bytes], None]) -> None:
        """Let usual events take the fast path to `write`, as far as they are known."""
        if self.odd is not None:
            fast.arm_any(write, without_ids=self.asks_ids)
        else:
            fast.arm(self.pattern, self.text, write, ids=self._keeps_ids)

    def feed(self, payload: bytes) -> bytes:
        """Follow one or more whole events. Returns what the client gets: token ids that it did not ask for are
        taken out; else it is the very same bytes.
        """
        if self.odd is not None and not self.asks_ids:
            return payload
        told = bytearray()
        start = 0
        for end in event_ends(payload):
            event, start = payload[start:end], end
            ids = None
            if self.asks_ids:
                event, ids = self._take_ids(event)
            if self.odd is None:
                self._follow(event, ids)
            if ids is None or not (WORDLESS in event and _UNFINISHED in event):
                told += event
        if start < len(payload):
            self._give_up("a part of an event")
        return bytes(told + payload[start:]) if self.asks_ids else payload

    def too_long(self) -> bool:
        """Whether the text is past its bound, and was dropped. The fast path does not look."""
        if len(self.text) <= self._limit:
            return False
        self._give_up(f"more than {self._limit} bytes of text")
        return True

    def pieces(self) -> list[bytes]:
        """The JSON-escaped text of each event that carried any or none, in order."""
        return [piece for piece, _ in self._records()]

    def tokens(self) -> Tokens | None:
        """The ids of all tokens so far, where they are all known."""
        if not self._keeps_ids or self._prompt is None or self.odd is not None:
            return None
        return Tokens(_numbers(self._prompt), [_numbers(ids) for _, ids in self._records()])

    def counted(self) -> tuple[int, int] | None:
        """How many tokens the prompt and the answer so far are, where all are known."""
        if not self._keeps_ids or self._prompt is None or self.odd is not None:
            return None
        return _count(self._prompt), sum(_count(ids) for _, ids in self._records())

    def forget_silent(self) -> None:
        """Forget the last events as far as they brought no text: their tokens will come again."""
        records = self._records()
        while records and not records[-1][0]:
            records.pop()
        self._keep_only(records)

    def forget_ids(self) -> None:
        """From here on the stream's instance is not asked for token ids."""
        self.asks_ids = False
        self._stop_keeping_ids()

    def _stop_keeping_ids(self) -> None:
        records = self._records()
        self._keeps_ids = False
        self._keep_only(records)

    def _records(self) -> list[tuple[bytes, bytes]]:
        found: list[tuple[bytes, bytes]] = (_PIECE_AND_IDS if self._keeps_ids else _PIECE).findall(self.text)
        return found

    def _keep_only(self, records: list[tuple[bytes, bytes]]) -> None:
        self.text.clear()
        for piece, ids in records:
            self._keep(piece, ids)

    def _keep(self, piece: bytes, ids: bytes) -> None:
        text = self.text
        text += piece
        text += b'"'
        if self._keeps_ids:
            text += ids
            text += b"]"

    def _give_up(self, why: str) -> None:
        if self.odd is None:
            self.odd = why
            self.text.clear()

    def _take_ids(self, event: bytes) -> tuple[bytes, bytes | None]:
        event, prompt = take_list(event, PROMPT_KEY)
        if self._prompt is None:
            self._prompt = prompt
        return take_list(event, IDS_KEY)

    def _follow(self, event: bytes, ids: bytes | None) -> None:
        piece = self.pattern.piece(event)
        if piece is None:
            piece = self._parse(event)
        if piece is None and ids is not None:
            piece = b""  # no text yet: a parser holds it back
        if piece is None or self.odd is not None:
            return
        if ids is None and self._keeps_ids:
            self._stop_keeping_ids()
        self._keep(piece, ids or b"")
        self.too_long()

    def _parse(self, event: bytes) -> bytes | None:
        """The escaped text of an event of any shape; None where it has none."""
        if len(event) > PARSED_BYTES:
            self._give_up(f"an event of more than {PARSED_BYTES} bytes")
            return None
        data = event_data(event)
        if data is None:
            return None
        if data == b"[DONE]":
            self.done = True
            return None
        try:
            return self._read(event, msgspec.json.decode(data))
        except UNREADABLE:
            self._give_up("an event that is no chunk")
            return None

    def _read(self, event: bytes, chunk: dict[str, Any]) -> bytes | None:
        if chunk.get("error") is not None:
            self._give_up("an error event")
            return None
        choices = chunk["choices"]
        if self.id is None:
            self.id, self.created = chunk["id"], chunk.get("created")
            self.model, self.object = chunk.get("model"), chunk.get("object")
        said = chunk.get("usage")
        usage = said if isinstance(said, dict) else None  # a string stands for null
        self.usage_seen = self.usage_seen or bool(usage)
        if not choices:
            return None
        choice = choices[0]
        # llama-server has it in the last choice of /v1/completions (build 11434), vLLM in an event of its own.
        if usage and finish_reason_of(choice) is None:
            self._give_up("usage in every event")
        elif len(choices) > 1 or choice.get("index", 0) != 0:
            self._give_up("several choices")
        else:
            return self._read_choice(event, choice)
        return None

    def _read_choice(self, event: bytes, choice: dict[str, Any]) -> bytes | None:
        delta = choice.get("delta") or {}
        strange = [
            *(key for key, value in choice.items() if value is not None and key not in _CHOICE_KEYS),
            *(f"delta.{key}" for key, value in delta.items() if value and key not in _DELTA_KEYS),
        ]
        reason, finish = choice.get("finish_reason"), finish_reason_of(choice)
        if finish is None and isinstance(reason, str) and reason not in NO_REASONS:
            strange.append("an unknown finish_reason")  # an end, or none: what follows is not known
        if strange:
            self._give_up(f"{strange[0]} in its events")
            return None
        content = choice["text"] if "text" in choice else delta.get("content")
        role = delta.get("role")
        self.finish_reason = finish or self.finish_reason
        self.role_sent = self.role_sent or role is not None
        if content is None or (role is not None and content == ""):
            return None
        if role is None and finish is None:
            self.pattern.learn(event)
        return msgspec.json.encode(content)[1:-1]


def silent(pieces: list[bytes]) -> int:
    """How many of the last events brought no text."""
    return next((count for count, piece in enumerate(reversed(pieces)) if piece), len(pieces))


def part_of(piece: bytes) -> str:
    """One event's text; a letter for half a surrogate pair, the other half of which is the next event's."""
    try:
        return text_of([piece])
    except msgspec.DecodeError:
        return "x"


def text_of(pieces: list[bytes]) -> str:
    return str(msgspec.json.decode(b'"' + b"".join(pieces) + b'"'))


def _count(ids: bytes) -> int:
    return ids.count(b",") + 1 if ids else 0


def _numbers(ids: bytes) -> list[int]:
    return [int(word) for word in ids.split(b",")] if ids else []
