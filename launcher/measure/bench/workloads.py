"""What is asked: the workloads of workloads.toml, and data sets of the user."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from launcher.base.errors import LauncherError, reason

DEFAULT: Final = "rackspace-128"
# Requests of a data set, and at once, when the user names none.
DATASET_REQUESTS: Final = 128
DATASET_CONCURRENCY: Final = 16


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One table of workloads.toml."""

    name: str
    what: str
    """One line for people."""
    source: str
    api: Literal["completions", "chat", "embeddings"]
    prompts: Literal["random", "conversations", "sharegpt", "requests"]
    """random: random tokens of an exact number. conversations: several turns behind a shared system prompt. The other two:
    the forms of `dataset`."""
    requests: int
    """Of one point, unless the load needs more."""
    concurrency: int
    input_tokens: int | None = None
    """None: the prompts decide."""
    output_tokens: int | None = None
    """None: the data set says it per request."""
    temperature: float | None = None
    """None: the endpoint's default."""
    turns: int = 0
    system_words: int = 0
    question_words: int = 0
    answer_words: int = 0
    dataset: str | None = None
    """Absolute path of the user's file."""

    @property
    def exact_output(self) -> int | None:
        """Output tokens that each answer must have; None: they end where the model ends them, or there are none."""
        return self.output_tokens if self.dataset is None and self.api != "embeddings" else None

    @property
    def longest(self) -> int | None:
        """Tokens of the longest prompt and its response; an estimate where prompts are made of words."""
        if self.prompts == "conversations":
            words = (
                self.system_words + self.turns * self.question_words + (self.turns - 1) * self.answer_words
            )
            return words + (self.output_tokens or 0)
        return None if self.input_tokens is None else self.input_tokens + (self.output_tokens or 0)


@cache
def all_workloads() -> dict[str, Workload]:
    """In the order of the file."""
    tree: dict[str, dict[str, Any]] = tomllib.loads(
        resources.files("launcher.measure.bench").joinpath("workloads.toml").read_text(encoding="utf-8")
    )
    return {name: msgspec.convert({"name": name, **table}, Workload) for name, table in tree.items()}


def named(name: str) -> Workload:
    """Raises LauncherError for an unknown name."""
    found = all_workloads().get(name)
    if found is None:
        raise LauncherError(
            f"cannot run workload '{name}': no such workload",
            f"choose one of {', '.join(all_workloads())}, or give a file with --dataset",
        )
    return found


def of_dataset(path: Path) -> Workload:
    """A workload of the user's own prompts: ShareGPT's JSON, or JSONL of requests. Raises LauncherError."""
    try:
        with path.open("rb") as file:
            head = file.read(4096).lstrip()
    except OSError as error:
        raise LauncherError(
            f"cannot read --dataset '{path}': {reason(error)}", "give a readable JSONL or ShareGPT file"
        ) from None
    if not head:
        raise LauncherError(f"cannot use --dataset '{path}': it is empty", "add requests to it")
    form: Literal["sharegpt", "requests"] = "sharegpt" if head.startswith(b"[") else "requests"
    return Workload(
        name=path.name, what=f"requests of {path.name}", source=str(path), api="completions", prompts=form,
        requests=DATASET_REQUESTS, concurrency=DATASET_CONCURRENCY, dataset=str(path.absolute()),
    )  # fmt: skip


# --- Prompts that are made here: conversations of several turns, and the requests of a user's file. ---

# Frequent English words: with the space before it, each is one token in the vocabulary of most models.
_TEXT: Final = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
one you were all her she there would their we him been has when who will no more if out so up said what its
about than into them can only other time new some could these two may first then do any like my now over such
our man me even most made after also did many off before must well back through years where much your way down
should because long each just state those people too mr how little good world make very year still see own
work men day get here old between both being under three never know same last another while us might
great go come since against right came take used himself few use place during high without again
around small however found mrs part school thought went say general once upon war every does got united left
number course until always away public something fact less though water put think almost enough far
took system better set told nothing night end called look eyes going find asked later knew point next give
group toward young days let side social given
"""
WORDS: Final = tuple(_TEXT.split())

Prompt = dict[str, Any]
"""One line of a data set for `vllm bench serve --dataset-name custom`."""


def conversations(workload: Workload, requests: int, seed: int) -> list[Prompt]:
    """Turn 1 of every conversation, then turn 2 of every one, and so on: a turn comes when its predecessor has been
    answered, as long as fewer requests are in flight than there are conversations.

    Each turn repeats the system prompt and the conversation so far, as a chat client does. The answers in it are made
    here, not the endpoint's: their KV blocks are computed again with the next turn."""
    rng = np.random.default_rng(seed)
    system = f"System: {_words(rng, workload.system_words)}"
    many = -(-requests // workload.turns)
    histories = [system] * many
    lines: list[Prompt] = []
    for _turn in range(workload.turns):
        for index, history in enumerate(histories):
            asked = f"{history}\n\nUser: {_words(rng, workload.question_words)}\n\nAssistant:"
            lines.append({"prompt": asked, "output_tokens": workload.output_tokens})
            histories[index] = f"{asked} {_words(rng, workload.answer_words)}"
    return lines[:requests]


def _words(rng: np.random.Generator, count: int) -> str:
    return " ".join(WORDS[index] for index in rng.integers(0, len(WORDS), size=count))


def read_requests(lines: Iterable[str], default_output: int) -> Iterator[Prompt]:
    """Requests of a JSONL file: objects with `prompt` or `messages`, as the OpenAI API takes them, alone or as `body` of a
    batch file's line. The number of output tokens is `output_tokens`, `max_tokens` or `max_completion_tokens`.

    Raises ValueError with the number of a line that cannot be used."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _request(json.loads(line), default_output)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"line {number} is no object with 'prompt' or 'messages'") from None


def _request(value: Any, default_output: int) -> Prompt:
    body = value.get("body", value)
    tokens = next(
        (body[key] for key in ("output_tokens", "max_tokens", "max_completion_tokens") if body.get(key)),
        default_output,
    )
    prompt = body["prompt"] if "prompt" in body else "\n\n".join(map(_message, body["messages"]))
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(prompt)
    return {"prompt": prompt, "output_tokens": int(tokens)}


def _message(message: Any) -> str:
    content = message["content"]
    if not isinstance(content, str):
        content = " ".join(part["text"] for part in content)
    return f"{str(message['role']).capitalize()}: {content}"
