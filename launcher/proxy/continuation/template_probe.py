"""Does a model's chat template go on with a partial answer: asked of each instance once, when it is ready.

A cut chat stream is continued with its text as a final assistant message under `continue_final_message`
(continuation.py). That is exact where the prompt so made is the generation prompt and the text, nothing between
them and nothing behind. It is not where the generation prompt opens a thought that the assistant's turn leaves
out (`<think>` of DeepSeek-R1, QwQ, Qwen3-Thinking), and where a renderer does not know the field and closes the turn
(vLLM's tokenizers/deepseek_v32_encoding.py).

So vLLM's POST /tokenize (entrypoints/serve/tokenize/protocol.py, 0.32) renders both. What is compared is the tokens'
strings, joined, not their numbers: a tokenizer may merge across the boundary. llama-server knows no messages there; its
POST /apply-template answers with the prompt that a chat request would get (tools/server/server-context.cpp, build 11434).
A server that answers neither is not judged, and its sampled chats are not continued.
"""

from __future__ import annotations

import asyncio
import logging
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
_FAULTS: Final = (aiohttp.ClientError, HttpProcessingError, OSError, TimeoutError, msgspec.MsgspecError)


class _Tokens(msgspec.Struct):
    token_strs: list[str]

    @property
    def text(self) -> str:
        return "".join(self.token_strs)


class _Prompt(msgspec.Struct):
    prompt: str

    @property
    def text(self) -> str:
        return self.prompt


class TemplateChecks:
    """Owner of the questions under way. `close` ends them."""

    def __init__(self, traits: ModelTraits) -> None:
        self._traits = traits
        self._asked: dict[int, int] = {}  # generation by slot
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, slot: int, generation: int, model: str, address: Address) -> None:
        """Ask an instance that has become ready, once; returns at once."""
        if self._asked.get(slot) == generation:
            return
        self._asked[slot] = generation
        task = asyncio.get_running_loop().create_task(
            self._check(slot, model, address), name=f"template {slot}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for nobody's answer any more."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _check(self, slot: int, model: str, address: Address) -> None:
        fits = await goes_on(address)
        if fits is None:
            _LOG.debug("slot %d says nothing of its chat template", slot, extra={"slot": slot})
        elif self._traits.note_template(model, fits=fits):
            _LOG.info(
                "the chat template of %s does not go on with a partial answer: "
                "its cut chat streams are continued at temperature 0 only",
                model,
                extra={"model": model, "slot": slot},
            )


async def goes_on(address: Address) -> bool | None:
    """Whether the template continues a partial answer; None when the server does not tell."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S), session_to(address) as session:
            try:
                return await _by_tokens(session, url_of(address, TOKENIZE))
            except _FAULTS:  # or it does not answer as vLLM does
                return await _by_prompts(session, url_of(address, APPLY_TEMPLATE))
    except _FAULTS:
        return None


async def _by_tokens(session: aiohttp.ClientSession, url: str) -> bool | None:
    before = await _text(session, url, _GENERATION, _Tokens)
    after = await _text(session, url, _PARTIAL, _Tokens)
    alone = await _text(session, url, _ALONE, _Tokens)
    if before is None or alone is None:  # no chat template at all: no chat streams
        return None
    # SentencePiece marks a word's begin, or not, by what stands before it: `alone` has the mark.
    return after in {before + _WORD, before + alone}


async def _by_prompts(session: aiohttp.ClientSession, url: str) -> bool | None:
    before = await _text(session, url, _GENERATION, _Prompt)
    return None if before is None else await _text(session, url, _PARTIAL, _Prompt) == before + _WORD


async def _text(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], kind: type[_Tokens | _Prompt]
) -> str | None:
    """The prompt, or the tokens' strings, joined; None for 400, with which a template or the engine's renderer refuses."""
    async with session.post(url, json=body, allow_redirects=False) as answer:
        if answer.status == 400:
            return None
        answer.raise_for_status()
        return msgspec.json.decode(await answer.read(), type=kind).text
