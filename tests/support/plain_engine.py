"""A deterministic engine without sockets: vLLM 0.32's events for an answer that depends on the context alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
QUESTION = "Why?"


def event(payload: dict[str, Any], *, escaped: bool = False) -> bytes:
    """One event; `escaped` as engines that write ASCII only."""
    text = json.dumps(payload, ensure_ascii=escaped, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


@dataclass(frozen=True)
class PlainEngine:
    """Says `tokens` to QUESTION. An empty token is one whose text comes with the next (half a character)."""

    path: str
    tokens: tuple[str, ...]
    name: str = "one"
    escaped: bool = False
    prompt_tokens: int = 7

    def request(self, **more: Any) -> bytes:
        """The client's request."""
        asked: dict[str, Any] = {"model": "m", "stream": True, "temperature": 0}
        asked |= (
            {"messages": [{"role": "user", "content": QUESTION}]}
            if self.path == CHAT
            else {"prompt": QUESTION}
        )
        return json.dumps(asked | more).encode()

    def answer(self, body: bytes) -> list[bytes]:
        """The events of its answer."""
        asked = json.loads(body)
        start, first = self._start(self._handed_over(asked))
        tokens = ([first] if first else []) + list(self.tokens[start:])
        limit = asked.get("max_completion_tokens") or asked.get(
            "max_tokens", 16 if self.path != CHAT else None
        )
        limit = len(tokens) + 1 if limit is None else limit
        said, finish = (tokens[:limit], "length") if limit <= len(tokens) else ([*tokens, ""], "stop")
        events = [] if self.path != CHAT else [self._chunk(role="assistant", content="")]
        events += [self._chunk(content=token) for token in said[:-1]]
        events.append(self._chunk(content=said[-1], finish=finish))
        if (asked.get("stream_options") or {}).get("include_usage"):
            prompt = self.prompt_tokens + start - bool(first)
            usage = {
                "prompt_tokens": prompt,
                "total_tokens": prompt + len(said),
                "completion_tokens": len(said),
            }
            details = {"cached_tokens": prompt - 1}
            events.append(self._event([], {"usage": usage | {"prompt_tokens_details": details}}))
        return [*events, b"data: [DONE]\n\n"]

    def _handed_over(self, asked: dict[str, Any]) -> str:
        if self.path != CHAT:
            assert asked["prompt"].startswith(QUESTION)
            return str(asked["prompt"][len(QUESTION) :])
        messages = asked["messages"]
        assert messages[0] == {"role": "user", "content": QUESTION}
        if len(messages) == 1:
            return ""
        assert asked["continue_final_message"] is True
        assert asked["add_generation_prompt"] is False
        assert messages[1]["role"] == "assistant"
        assert messages[1]["content"] == messages[1]["content"].rstrip()
        return str(messages[1]["content"])

    def _start(self, handed: str) -> tuple[int, str]:
        """The first token that is not in the text handed over, and what is left of one that is in part."""
        at = 0
        for index, token in enumerate(self.tokens):
            if at == len(handed):
                return index, ""
            assert handed[at:].startswith(token) or token.startswith(handed[at:]), (handed, self.tokens)
            at += len(token)
            if at > len(handed):
                return index + 1, token[len(token) - (at - len(handed)) :]
        assert at == len(handed)
        return len(self.tokens), ""

    def _chunk(self, content: str, role: str | None = None, finish: str | None = None) -> bytes:
        said: dict[str, Any] = {"text": content}
        if self.path == CHAT:
            said = {"delta": ({} if role is None else {"role": role}) | {"content": content}}
        last = {"stop_reason": None} if finish or self.path != CHAT else {}
        return self._event([{"index": 0, **said, "logprobs": None, "finish_reason": finish, **last}], {})

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self.path == CHAT else "text_completion"
        head = {"id": f"id-{self.name}", "object": kind, "created": len(self.name), "model": "m"}
        return event({**head, "choices": choices, **more}, escaped=self.escaped)
