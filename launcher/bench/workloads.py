"""What is asked: the workloads of workloads.toml, and data sets of the user."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from launcher.errors import LauncherError, reason

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
        resources.files("launcher.bench").joinpath("workloads.toml").read_text(encoding="utf-8")
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
