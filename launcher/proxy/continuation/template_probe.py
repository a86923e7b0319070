"""Does a model's chat template go on with a partial answer: asked of each instance when it is ready.

A cut chat stream is continued with its text as a final assistant message under `continue_final_message`
(continuation.py). That is exact where the prompt so made is the generation prompt and the text, nothing between
them and nothing behind. It is not where the generation prompt opens a thought that the assistant's turn leaves
out (`<think>` of DeepSeek-R1, QwQ, Qwen3-Thinking), and where a renderer does not know the field and closes the turn
(vLLM's tokenizers/deepseek_v32_encoding.py).

So vLLM's POST /tokenize (entrypoints/serve/tokenize/protocol.py, 0.32) renders both. What is compared is the tokens'
strings, joined, not their numbers: a tokenizer may merge across the boundary. llama-server knows no messages there; its
POST /apply-template answers with the prompt that a chat request would get (tools/server/server-context.cpp, build 11434).
A server that answers neither is not judged, and its sampled chats are not continued. One that does not answer in time, or
whose connection ends, is asked again after AGAIN_S until it is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from launcher.base.address import Address
from launcher.base.http_json import session_to, url_of
from launcher.proxy.openai.models import ModelTraits

TOKENIZE: Final = "/tokenize"
APPLY_TEMPLATE: Final = "/apply-template"
ANSWER_TIMEOUT_S = 30.0  # nobody waits for it; a template's first rendering on busy cores takes seconds
AGAIN_S = 10.0  # from a fault to the next try

_LOG = logging.getLogger(__name__)
_QUESTION: Final = {"role": "user", "content": "Hello"}
_WORD: Final = "Well"
_GENERATION: Final = {"messages": [_QUESTION], "add_generation_prompt": True, "return_token_strs": True}
_PARTIAL: Final = {
    "messages": [_QUESTION, {"role": "assistant", "content": _WORD}],
    "add_generation_prompt": False,
    "continue_final_message": True,
    "return_token_strs": True,
}
_ALONE: Final = {"prompt": _WORD, "add_special_tokens": False, "return_token_strs": True}
# An answer that is another server's; before FAULTS, as the first is a ClientError.
_OTHER_ANSWERS: Final = (
    aiohttp.ClientResponseError, HttpProcessingError, msgspec.MsgspecError, UnicodeDecodeError,
)  # fmt: skip
# Statuses of a server that has no time, or of one before it.
_BUSY: Final = frozenset({429, 502, 503, 504})
FAULTS: Final = (aiohttp.ClientError, OSError)  # TimeoutError is an OSError


class _Tokens(msgspec.Struct):
    token_strs: list[str]


class _Prompt(msgspec.Struct):
    prompt: str


def _joined_tokens(answer: bytes) -> str:
    return "".join(msgspec.json.decode(answer, type=_Tokens).token_strs)


def _prompt(answer: bytes) -> str:
    return msgspec.json.decode(answer, type=_Prompt).prompt


class TemplateChecks:
    """Owner of the questions under way. `close` ends them."""

    def __init__(self, traits: ModelTraits) -> None:
        self._traits = traits
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}  # by slot and generation
        self._unfit: set[str] = set()  # models that were logged

    def begin(self, slot: int, generation: int, model: str, address: Address) -> None:
        """Ask an instance that has become ready, unless it is being asked; returns at once."""
        key = slot, generation
        if key in self._tasks:
            return
        task = asyncio.get_running_loop().create_task(
            self._check(slot, model, address), name=f"template {slot}"
        )
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key))

    def end(self, slot: int, generation: int) -> None:
        """The instance is gone: do not ask it again."""
        if (task := self._tasks.get((slot, generation))) is not None:
            task.cancel()

    async def close(self) -> None:
        """Wait for nobody's answer any more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _check(self, slot: int, model: str, address: Address) -> None:
        fits = await _answer_of(slot, address)
        self._traits.note_template(model, fits=fits)
        if fits is None:
            _LOG.debug("slot %d says nothing of its chat template", slot, extra={"slot": slot})
            return
        if fits:
            self._unfit.discard(model)
        elif model not in self._unfit:
            self._unfit.add(model)
            _LOG.info(
                "the chat template of %s does not go on with a partial answer: "
                "its cut chat streams are continued at temperature 0 only",
                model,
                extra={"model": model, "slot": slot},
            )


async def _answer_of(slot: int, address: Address) -> bool | None:
    while True:
        try:
            return await goes_on(address)
        except FAULTS as error:
            _LOG.debug(
                "slot %d gave no answer about its chat template: %r", slot, error, extra={"slot": slot}
            )
            await asyncio.sleep(AGAIN_S)


async def goes_on(address: Address) -> bool | None:
    """Whether the template continues a partial answer; None when the server does not tell. Raises FAULTS: no answer."""
    async with asyncio.timeout(ANSWER_TIMEOUT_S), session_to(address) as session:
        for ask, path in ((_by_tokens, TOKENIZE), (_by_prompts, APPLY_TEMPLATE)):
            with contextlib.suppress(*_OTHER_ANSWERS):
                return await ask(session, url_of(address, path))
    return None


async def _by_tokens(session: aiohttp.ClientSession, url: str) -> bool | None:
    before = await _text(session, url, _GENERATION, _joined_tokens)
    after = await _text(session, url, _PARTIAL, _joined_tokens)
    alone = await _text(session, url, _ALONE, _joined_tokens)
    if before is None or alone is None:  # no chat template at all: no chat streams
        return None
    # SentencePiece marks a word's begin, or not, by what stands before it: `alone` has the mark.
    return after in {before + _WORD, before + alone}


async def _by_prompts(session: aiohttp.ClientSession, url: str) -> bool | None:
    before = await _text(session, url, _GENERATION, _prompt)
    return None if before is None else await _text(session, url, _PARTIAL, _prompt) == before + _WORD


async def _text(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], read: Callable[[bytes], str]
) -> str | None:
    """The prompt, or the tokens' strings, joined; None for 400, with which a template or the engine's renderer refuses."""
    async with session.post(url, json=body, allow_redirects=False) as answer:
        if answer.status == 400:
            return None
        if answer.status in _BUSY:
            raise OSError(f"status {answer.status}")
        answer.raise_for_status()
        return read(await answer.read())
