"""Real vLLM on hosts of the drill: its model, and its answers, which clients check to the last letter.

The tiny model's greedy choice does not depend on the batch (launcher/engines/tiny_model.py), so every host must answer a
prompt with the words that one of them said when nothing else ran.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from chaos.clients import CHAT, COMPLETIONS, SUBJECTS
from chaos.wire import Wire

from launcher.engines.vllm.installed import interpreter_of

# Fewer than those of tests/chaos: each is asked once before the load begins.
NUMBERS: Final = 4
MOST_TOKENS: Final = 80
AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class Spoken:
    """The answer to one prompt."""

    prompt_tokens: int
    texts: Mapping[int, str]
    """After so many tokens; one event may bring several."""

    def fits(self, text: str, tokens: int) -> bool:
        """Whether `text` is the answer of so many tokens."""
        if (exact := self.texts.get(tokens)) is not None:
            return text == exact
        above = self.texts[min(count for count in self.texts if count > tokens)]
        below = self.texts[max(count for count in self.texts if count < tokens)]
        return text.startswith(below) and above.startswith(text)


Spoke = dict[tuple[str, str], Spoken]
"""By path and prompt."""


def prompts() -> list[str]:
    return [f"Speak of {subject} number {number}" for subject in SUBJECTS for number in range(NUMBERS)]


def vllm() -> Path:
    """The command beside this Python. Raises RuntimeError."""
    command = Path(sys.executable).with_name("vllm")
    if not command.exists():
        raise RuntimeError(
            f"no {command}: install numa-launcher[vllm] as scripts/test does, or --without-vllm"
        )
    return command


def make_model(folder: Path) -> None:
    """Raises RuntimeError."""
    python = interpreter_of((str(vllm()),)) or sys.executable
    done = subprocess.run(
        [python, "-m", "launcher.engines.tiny_model", str(folder)],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"cannot make the tiny model: {done.stderr[-2000:]}")


def asks(body: dict[str, Any]) -> str:
    """The prompt of a request."""
    return str(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])


async def learn(address: str) -> Spoke:
    """Asks a daemon (host:port) with real vLLM for every prompt."""
    wanted = iter([(path, prompt) for path in (CHAT, COMPLETIONS) for prompt in prompts()])
    found: Spoke = {}
    await asyncio.gather(*(_learn(Wire(address), wanted, found) for _ in range(AT_ONCE)))
    return found


async def _learn(wire: Wire, wanted: Iterable[tuple[str, str]], found: Spoke) -> None:
    for path, prompt in wanted:
        body = {
            "model": "chaos", "temperature": 0, "max_tokens": MOST_TOKENS, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        said = (
            {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
        )
        answer = await wire.post(path, json.dumps(body | said).encode(), "learn")
        page = b"".join([piece async for piece in answer.payload()])
        if answer.status != 200:
            raise RuntimeError(f"vLLM does not answer: {answer.status} {page[:300]!r}")
        found[path, prompt] = spoken(page)
    wire.close()


def spoken(page: bytes) -> Spoken:
    """Of a stream with usage in every event. Raises ValueError if it has not every token."""
    text, texts, prompt_tokens = "", {0: ""}, 0
    for line in page.decode().splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        for choice in event["choices"]:
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        prompt_tokens = event["usage"]["prompt_tokens"]
        texts[event["usage"]["completion_tokens"]] = text
    if max(texts) != MOST_TOKENS:
        raise ValueError(f"{max(texts)} tokens: {page[-300:]!r}")
    return Spoken(prompt_tokens, texts)
