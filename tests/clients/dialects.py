"""An engine's streams in the words of three APIs: their openings, pieces of text, calls of a tool and ends.

Sources: vLLM 0.32, entrypoints/openai/chat_completion/serving.py, openai/responses/serving.py, anthropic/serving.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

USAGE = {"input_tokens": 11, "output_tokens": 7}
CALL_ID = "call_0123456789"


@dataclass(frozen=True)
class Call:
    """A tool that the model wants to use."""

    name: str
    arguments: dict[str, Any]


class Dialect(Protocol):
    """One API; an instance writes one stream."""

    def opening(self) -> bytes: ...
    def words(self, words: Sequence[str]) -> Iterator[bytes]: ...
    # All of it at once, as a parser gives it that holds it back.
    def call(self, call: Call) -> bytes: ...
    def ending(self) -> bytes: ...


def event(payload: dict[str, Any], *, named: bool = True) -> bytes:
    name = f"event: {payload['type']}\n" if named else ""
    return f"{name}data: {json.dumps(payload, separators=(',', ':'))}\n\n".encode()


class Chat:
    """/v1/chat/completions"""

    def __init__(self, model: str) -> None:
        self._head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model}
        self._reason = "stop"

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return event({**self._head, "choices": [choice]}, named=False)

    def opening(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def words(self, words: Sequence[str]) -> Iterator[bytes]:
        return (self._chunk({"content": word}) for word in words)

    def call(self, call: Call) -> bytes:
        self._reason = "tool_calls"
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        return self._chunk(
            {"tool_calls": [{"index": 0, "id": CALL_ID, "type": "function", "function": function}]}
        )

    def ending(self) -> bytes:
        usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
        return b"".join(
            (
                self._chunk({}, self._reason),
                event({**self._head, "choices": [], "usage": usage}, named=False),
                b"data: [DONE]\n\n",
            )
        )


class Messages:
    """/v1/messages"""

    def __init__(self, model: str) -> None:
        self._model = model
        self._reason = "end_turn"

    def opening(self) -> bytes:
        message = {
            "id": "msg_1", "type": "message", "role": "assistant", "model": self._model, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": {**USAGE, "output_tokens": 0},
        }  # fmt: skip
        return event({"type": "message_start", "message": message})

    def words(self, words: Sequence[str]) -> Iterator[bytes]:
        yield self._block({"type": "text", "text": ""})
        for word in words:
            yield self._delta({"type": "text_delta", "text": word})
        yield event({"type": "content_block_stop", "index": 0})

    def call(self, call: Call) -> bytes:
        self._reason = "tool_use"
        return b"".join(
            (
                self._block({"type": "tool_use", "id": CALL_ID, "name": call.name, "input": {}}),
                self._delta({"type": "input_json_delta", "partial_json": json.dumps(call.arguments)}),
                event({"type": "content_block_stop", "index": 0}),
            )
        )

    def _block(self, block: dict[str, Any]) -> bytes:
        return event({"type": "content_block_start", "index": 0, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event({"type": "content_block_delta", "index": 0, "delta": delta})

    def ending(self) -> bytes:
        delta = {"stop_reason": self._reason, "stop_sequence": None}
        return event({"type": "message_delta", "delta": delta, "usage": USAGE}) + event(
            {"type": "message_stop"}
        )


class Responses:
    """/v1/responses"""

    def __init__(self, model: str) -> None:
        self._response = {
            "id": "resp_1", "object": "response", "created_at": 1, "model": model, "status": "in_progress", "output": [],
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        }  # fmt: skip
        self._number = -1
        self._output: list[dict[str, Any]] = []

    def _event(self, type_: str, **more: Any) -> bytes:
        self._number += 1
        return event({"type": type_, "sequence_number": self._number, **more})

    def opening(self) -> bytes:
        return self._event("response.created", response=self._response) + self._event(
            "response.in_progress", response=self._response
        )

    def words(self, words: Sequence[str]) -> Iterator[bytes]:
        at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **at, part=part)
        for word in words:
            yield self._event("response.output_text.delta", **at, delta=word, logprobs=[])
        part = {**part, "text": "".join(words)}
        item = {**item, "status": "completed", "content": [part]}
        yield self._event("response.output_text.done", **at, text=part["text"], logprobs=[])
        yield self._event("response.content_part.done", **at, part=part)
        yield self._done(item)

    def call(self, call: Call) -> bytes:
        arguments = json.dumps(call.arguments)
        item = {
            "id": "fc_1", "type": "function_call", "call_id": CALL_ID, "name": call.name, "arguments": "",
            "status": "in_progress",
        }  # fmt: skip
        at = {"item_id": "fc_1", "output_index": 0}
        whole = {**item, "arguments": arguments, "status": "completed"}
        return b"".join(
            (
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.function_call_arguments.delta", **at, delta=arguments),
                self._event(
                    "response.function_call_arguments.done", **at, name=call.name, arguments=arguments
                ),
                self._done(whole),
            )
        )

    def _done(self, item: dict[str, Any]) -> bytes:
        self._output.append(item)
        return self._event("response.output_item.done", output_index=0, item=item)

    def ending(self) -> bytes:
        usage = {
            **USAGE, "total_tokens": 18, "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }  # fmt: skip
        whole = {**self._response, "status": "completed", "output": self._output, "usage": usage}
        return self._event("response.completed", response=whole)


DIALECTS: dict[str, type[Chat | Messages | Responses]] = {
    "/v1/chat/completions": Chat,
    "/v1/messages": Messages,
    "/v1/responses": Responses,
}
