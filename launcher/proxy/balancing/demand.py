"""What a request asks of an instance, how it leaves one, and why the queue refuses it."""

from __future__ import annotations

from enum import Enum

InstanceId = tuple[int, int]  # (slot, generation): one process


class Ending(Enum):
    """How a request left its instance, which decides what may be learned from it."""

    WHOLE = "whole"  # a complete answer below 400
    REFUSED = "refused"  # a 4xx: the instance works, and computed nothing
    LEFT = "left"  # given up by its client or by the proxy; says nothing about the instance
    BROKEN = "broken"  # the instance could not be used


class Demand:
    """One request, as far as its cost and its place in the queue depend on it. Tokens are estimates.

    `model` None: any instance will do. `pinned`: the instance that has the stored response; ignored once it is gone.
    `wished`: the slot that a trusted proxy chose, which has it if its instance can start it when it comes.
    `stream` False: the answer comes whole, so its first byte does not mark the end of its prefill.
    """

    __slots__ = (
        "body_bytes", "key", "max_tokens", "model", "output_tokens", "pinned", "prefix", "priority", "prompt_tokens",
        "stream", "wished",
    )  # fmt: skip

    def __init__(
        self,
        model: str | None,
        prompt_tokens: int = 0,
        output_tokens: int = 0,
        prefix: tuple[int, ...] = (),
        body_bytes: int = 0,
        *,
        key: str | None = None,
        priority: int = 0,
        pinned: InstanceId | None = None,
        max_tokens: int | None = None,
        stream: bool = True,
        wished: int | None = None,
    ) -> None:
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.prefix = prefix  # prefix_cache.fingerprint of the prompt's raw bytes
        self.body_bytes = body_bytes
        self.key = key  # the API key's name: keys share fairly
        self.priority = priority  # smaller first, as in vLLM
        self.pinned = pinned
        self.max_tokens = max_tokens  # what the client asked for, per choice
        self.stream = stream
        self.wished = wished


class LateError(Exception):
    """Its first token may come later than the ticket allows; nothing was queued or bound. `latest_s`: by when it will."""

    def __init__(self, latest_s: float) -> None:
        super().__init__(f"first token in up to {latest_s:.1f} s")
        self.latest_s = latest_s


class FullError(Exception):
    """The queue is full. `reason` is for a person; `retry_after_s` is at least 1."""

    def __init__(self, reason: str, retry_after_s: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s
