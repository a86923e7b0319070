"""Seeded workloads: when requests come, what they ask, and how they hang together. Pure but for the seed's Random.

A request is open-loop: it comes at its time however slow the answers are, except that a conversation's next
turn comes its think time after the end of the answer before it.
"""

# ruff: noqa: S311 - a seeded Random is the point
from __future__ import annotations

import json
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import accumulate
from math import exp, log
from random import Random

from bench.engine_model import CHARACTERS_PER_TOKEN, Shape

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `at_s` is its time from the start, or None when it follows `after` by `think_s`."""

    id: int
    messages: tuple[Message, ...]
    max_tokens: int  # what the client asks for
    output_tokens: int  # what the answer will really have
    at_s: float | None
    after: int | None = None
    think_s: float = 0.0
    conversation: int | None = None

    def body(self, model: str, *, stream: bool = True) -> bytes:
        """The JSON that is sent."""
        fields: dict[str, object] = {
            "model": model,
            "messages": list(self.messages),
            "max_tokens": self.max_tokens,
            "stream": stream,
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    @property
    def prompt(self) -> str:
        """The text that the engine sees, roles marked as a chat template does."""
        return "".join(f"<|{m['role']}|>{m['content']}" for m in self.messages)


@dataclass(frozen=True, slots=True)
class Mix:
    """What is varied between runs, so that nothing is fitted to one of them. Tokens."""

    instances: int = 4
    load: float = 0.85  # of saturation
    requests: int = 1200
    prompt_scale: float = 1.0
    output_scale: float = 1.0
    zipf: float = 1.0
    asked: float = 1.0  # max_tokens is so many times what the answer has
    missed: float = (
        0.1  # of the shared prompts that caches could hold, counted in saturation: nobody places all well
    )


class Text:
    """Words that never repeat by chance, cut from one long random text."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._long = "".join(random.choices(string.ascii_lowercase + "    ", k=400_000))

    def of(self, tokens: float) -> str:
        """A text of so many tokens; no other begins alike."""
        length = max(8, int(tokens * CHARACTERS_PER_TOKEN))
        head = f"{self._random.getrandbits(48):012x} "
        start = self._random.randrange(len(self._long) - 1)
        text = head + self._long[start : start + length]
        while len(text) < length:
            text += self._long
        return text[:length]


def lognormal(random: Random, median: float, sigma: float, most: float) -> float:
    """A positive number, heavy to the right, at most `most`."""
    return min(most, exp(random.gauss(log(median), sigma)))


def unshared(
    random: Random, mix: Mix, shape: Shape, one: Callable[[Text], tuple[str, float]]
) -> list[Request]:
    """Single questions. `one`: the prompt and the output tokens of the next."""
    text = Text(random)
    drafts = []
    for number in range(mix.requests):
        prompt, output = one(text)
        drafts.append(draft(number, ({"role": "user", "content": prompt},), output, mix))
    return spread(random, drafts, mix, shape, [tokens(d) for d in drafts])


def short(random: Random, mix: Mix, shape: Shape) -> list[Request]:
    """Short prompts of like length, nothing shared."""

    def one(text: Text) -> tuple[str, float]:
        prompt = random.uniform(200, 500) * mix.prompt_scale
        output = random.uniform(20, 60) * mix.output_scale
        return text.of(prompt), output

    return unshared(random, mix, shape, one)


def heavy(random: Random, mix: Mix, shape: Shape) -> list[Request]:
    """Prompts and answers of very different length, nothing shared."""

    def one(text: Text) -> tuple[str, float]:
        prompt = lognormal(random, 300, 1.2, 6000) * mix.prompt_scale
        output = lognormal(random, 40, 0.9, 600) * mix.output_scale
        return text.of(prompt), output

    return unshared(random, mix, shape, one)


def chat(random: Random, mix: Mix, shape: Shape) -> list[Request]:
    """Conversations of three to nine turns; each turn sends all before it again."""
    text = Text(random)
    system = {"role": "system", "content": text.of(150)}
    drafts: list[Request] = []
    fresh: list[float] = []
    starts: list[int] = []
    conversation = 0
    while len(drafts) < mix.requests:
        messages: tuple[Message, ...] = (system,)
        starts.append(len(drafts))
        for turn in range(random.randint(3, 9)):
            question = random.uniform(100, 500) * mix.prompt_scale
            messages = (*messages, {"role": "user", "content": text.of(question)})
            answer = random.uniform(30, 100) * mix.output_scale
            one = draft(len(drafts), messages, answer, mix)
            fresh.append(question + (drafts[-1].output_tokens if turn else 150 / 10))
            if turn:
                one = replace(one, after=len(drafts) - 1, think_s=random.expovariate(1 / 6.0))
            drafts.append(replace(one, conversation=conversation))
            messages = (*messages, {"role": "assistant", "content": text.of(one.output_tokens)})
        conversation += 1
    whole_s = whole(drafts, mix, shape, fresh)
    times = sorted(random.uniform(0, whole_s) for _ in starts)
    for start, at in zip(starts, times, strict=True):
        drafts[start] = replace(drafts[start], at_s=at)
    return drafts


def shared(prompts: int, system_tokens: float) -> Callable[[Random, Mix, Shape], list[Request]]:
    """A workload of `prompts` system prompts, used by Zipf's law, each with a short question."""

    def make(random: Random, mix: Mix, shape: Shape) -> list[Request]:
        text = Text(random)
        systems = [
            text.of(system_tokens * mix.prompt_scale * random.uniform(0.7, 1.3)) for _ in range(prompts)
        ]
        weights = list(accumulate(1 / (rank + 1) ** mix.zipf for rank in range(prompts)))
        space = mix.instances * shape.cache_tokens * 0.8 * CHARACTERS_PER_TOKEN
        drafts, fresh = [], []
        seen: set[int] = set()
        for number in range(mix.requests):
            which = random.choices(range(prompts), cum_weights=weights)[0]
            question = random.uniform(40, 200)
            messages = (
                {"role": "system", "content": systems[which]},
                {"role": "user", "content": text.of(question)},
            )
            drafts.append(draft(number, messages, random.uniform(20, 80) * mix.output_scale, mix))
            held = which in seen and sum(len(system) for system in systems[: which + 1]) <= space
            part = mix.missed if held else 1.0
            computed = part * len(systems[which]) / CHARACTERS_PER_TOKEN
            fresh.append(question + max(computed, shape.block_tokens / 2))  # a hit ends with a whole block
            seen.add(which)
        return spread(random, drafts, mix, shape, fresh)

    return make


WORKLOADS: dict[str, Callable[[Random, Mix, Shape], list[Request]]] = {
    "short": short,
    "heavy": heavy,
    "chat": chat,
    "12 prompts": shared(12, 2500),
    "48 prompts": shared(48, 4000),
}


def chosen(text: str, known: Collection[str]) -> list[str] | None:
    """The workloads that a command line names, separated by commas; None, and a message, if one is unknown."""
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        print(f"cannot simulate '{unknown[0]}': there is no such workload\n  choose from {', '.join(known)}")
        return None
    return names


def workload(name: str, seed: int, mix: Mix, shape: Shape) -> list[Request]:
    """The requests of one run, ordered by id."""
    return WORKLOADS[name](Random(f"{name}/{seed}"), mix, shape)


def long_prompts(random: Random, mix: Mix, shape: Shape) -> list[Request]:
    """Documents with a question each, nothing shared."""

    def one(text: Text) -> tuple[str, float]:
        prompt = lognormal(random, 1500, 0.6, 6000) * mix.prompt_scale
        return text.of(prompt), random.uniform(30, 120)

    return unshared(random, mix, shape, one)


def long_answers(random: Random, mix: Mix, shape: Shape) -> list[Request]:
    """Short prompts, long answers: places among the running requests are what is short."""

    def one(text: Text) -> tuple[str, float]:
        answer = lognormal(random, 250, 0.7, 1500) * mix.output_scale
        return text.of(random.uniform(50, 200)), answer

    return unshared(random, mix, shape, one)


def bursts(random: Random, mix: Mix, shape: Shape) -> list[Request]:
    """As `heavy`, but half of the requests come in bursts of 10 to 60 within a second."""
    drafts = heavy(random, mix, shape)
    last = max(d.at_s or 0.0 for d in drafts)
    drafted = iter(drafts[: len(drafts) // 2])
    times: list[float] = []
    while one := next(drafted, None):
        start = random.uniform(0, last)
        burst = [one, *(d for _, d in zip(range(random.randint(9, 59)), drafted, strict=False))]
        times += [start + random.random() for _ in burst]
    times += [d.at_s or 0.0 for d in drafts[len(drafts) // 2 :]]
    return [replace(d, at_s=at) for d, at in zip(drafts, times, strict=True)]


# Those that predictions of first tokens are measured with.
PREDICTED: dict[str, Callable[[Random, Mix, Shape], list[Request]]] = {
    "chat": chat,
    "long prompts": long_prompts,
    "mixed": heavy,
    "prefix-heavy": shared(12, 2500),
    "bursts": bursts,
    "long answers": long_answers,
}


def predicted_workload(name: str, seed: int, mix: Mix, shape: Shape) -> list[Request]:
    """The requests of one run, ordered by id."""
    return PREDICTED[name](Random(f"{name}/{seed}"), mix, shape)


def draft(number: int, messages: tuple[Message, ...], output: float, mix: Mix) -> Request:
    """A request without a time."""
    produced = max(1, int(output))
    return Request(number, messages, max(1, int(produced * mix.asked)), produced, None)


def tokens(request: Request) -> float:
    """Tokens of its prompt."""
    return len(request.prompt) / CHARACTERS_PER_TOKEN


def whole(drafts: list[Request], mix: Mix, shape: Shape, fresh: list[float]) -> float:
    """Seconds over which to spread the requests, `fresh` being the tokens that no cache can save.

    Saturation is where the dearer of prefill and decode takes all of the instances' time, or, where both share
    the steps, their sum.
    """
    prefill_s = sum(fresh) / shape.prefill_tokens_per_s
    decode_s = sum(d.output_tokens for d in drafts) * shape.full_step_s / shape.max_num_seqs
    busy_s = prefill_s + decode_s if shape.mixed else max(prefill_s, decode_s)
    return busy_s / mix.instances / mix.load


def spread(
    random: Random, drafts: list[Request], mix: Mix, shape: Shape, fresh: list[float]
) -> list[Request]:
    """Poisson arrivals: given their number, they are uniform."""
    whole_s = whole(drafts, mix, shape, fresh)
    times = sorted(random.uniform(0, whole_s) for _ in drafts)
    return [replace(one, at_s=at) for one, at in zip(drafts, times, strict=True)]
