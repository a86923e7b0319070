"""A deterministic engine without sockets that tells token ids as vLLM 0.32 does, and takes them as a prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from support.plain_engine import CHAT, QUESTION, event

PROMPT = [1, 2, 3, 4, 5, 6, 7]
END_OF_TEXT = 2
FIRST_ID = 100  # of the answer's first token; the others follow


@dataclass(frozen=True)
class TokenEngine:
    """Says `tokens` to QUESTION. An empty token is half a character: its text comes with the next."""

    path: str
    tokens: tuple[str, ...]
    name: str = "one"
    merged: frozenset[int] = frozenset()  # tokens that come in one event with the one before
    parser: bool = False  # a parser writes no text as {}
    tells_ids: bool = True
    takes_ids: bool = True  # as a chat's prompt
    more_tokens: int = 0  # that a text makes when it is tokenized anew

    def request(self, **more: Any) -> bytes:
        """The client's request."""
        asked: dict[str, Any] = {"model": "m", "stream": True, "temperature": 0}
        chat = {"messages": [{"role": "user", "content": QUESTION}]}
        return json.dumps(asked | (chat if self.path == CHAT else {"prompt": QUESTION}) | more).encode()

    def answer(self, body: bytes) -> list[bytes]:
        """The events of its answer."""
        asked = json.loads(body)
        given, start = self._prompt(asked)
        told = self.tells_ids and asked.get("return_token_ids") is True
        limit = asked.get("max_completion_tokens") or asked.get(
            "max_tokens", None if self.path == CHAT else 16
        )
        said, finish = self.tokens[start:], "stop"
        ids = [FIRST_ID + start + number for number in range(len(said))]
        if limit is None or limit > len(said):
            said, ids = (*said, ""), [*ids, END_OF_TEXT]
        else:
            said, ids, finish = said[:limit], ids[:limit], "length"
        events = [self._role(given if told else None)] if self.path == CHAT else []
        groups = self._groups(said, start, _held_back(asked))
        at = 0
        for number, (text, count) in enumerate(groups):
            last = finish if number == len(groups) - 1 else None
            own = ids[at : at + count] if told else None
            first = given if told and not number else None
            events.append(self._tokens(text, own, last, first))
            at += count
        if (asked.get("stream_options") or {}).get("include_usage"):
            usage = {
                "prompt_tokens": len(given),
                "total_tokens": len(given) + len(ids),
                "completion_tokens": len(ids),
            }
            events.append(self._event([], {"usage": usage}))
        return [*events, b"data: [DONE]\n\n"]

    def _prompt(self, asked: dict[str, Any]) -> tuple[list[int], int]:
        """What it makes of the prompt, and how many of the answer's tokens are in that."""
        ids = (asked.get("kv_transfer_params") or {}).get("prompt_token_ids") if self.takes_ids else None
        ids = asked["prompt"] if isinstance(asked.get("prompt"), list) else ids
        if ids is None:
            handed = self._handed_text(asked)
            start = next(n for n in range(len(self.tokens) + 1) if "".join(self.tokens[:n]) == handed)
            return [*PROMPT, *range(500, 500 + start + (self.more_tokens if start else 0))], start
        assert ids[: len(PROMPT)] == PROMPT
        start = len(ids) - len(PROMPT)
        assert ids[len(PROMPT) :] == [FIRST_ID + number for number in range(start)]
        assert not start or self.tokens[start - 1], (
            "vLLM would say the whole prompt again after half a character"
        )
        return ids, start

    def _handed_text(self, asked: dict[str, Any]) -> str:
        if self.path != CHAT:
            return str(asked["prompt"]).removeprefix(QUESTION)
        return str(asked["messages"][1]["content"]) if len(asked["messages"]) > 1 else ""

    def _groups(self, said: tuple[str, ...], start: int, held: int) -> list[tuple[str, int]]:
        """Text and number of tokens of each event; `held`: characters that may begin a stop string."""
        groups: list[tuple[str, int]] = []
        text, sent = "", 0
        for number, token in enumerate(said):
            text += token
            till = len(text) if number == len(said) - 1 else max(len(text) - held, sent)
            part, sent = text[sent:till], till
            if groups and start + number in self.merged:
                groups[-1] = (groups[-1][0] + part, groups[-1][1] + 1)
            else:
                groups.append((part, 1))
        return groups

    def _role(self, given: list[int] | None) -> bytes:
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._event([choice], {"prompt_token_ids": given, "prompt_text": None})

    def _tokens(self, text: str, ids: list[int] | None, finish: str | None, given: list[int] | None) -> bytes:
        if self.path == CHAT:
            # vLLM writes an event without text only for its ids' sake.
            delta = {} if self.parser and not text and not finish else {"content": text}
            if not delta and ids is None:
                return b""
            last = {"stop_reason": None} if finish else {}
            choice: dict[str, Any] = {
                "index": 0,
                "delta": delta,
                "logprobs": None,
                "finish_reason": finish,
                **last,
            }
        else:
            choice = {
                "index": 0,
                "text": text,
                "logprobs": None,
                "finish_reason": finish,
                "stop_reason": None,
            }
            choice["prompt_token_ids"] = given
        return self._event([choice | {"token_ids": ids}], {})

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self.path == CHAT else "text_completion"
        head = {"id": f"id-{self.name}", "object": kind, "created": len(self.name), "model": "m"}
        return event({**head, "choices": choices, **more})


def _held_back(asked: dict[str, Any]) -> int:
    return max((len(text) for text in asked.get("stop") or ()), default=1) - 1
