"""Words of a command line, under the naming of an invented engine: "-s" is short for "--size"."""

from __future__ import annotations

import pytest

from launcher.engines import options
from launcher.engines.llama_cpp import arguments as llama_cpp
from launcher.engines.vllm import arguments as vllm


def name_of(word: str) -> str | None:
    if options.is_value(word):
        return None
    name = word.partition("=")[0]
    return "--size" if name == "-s" else name


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("x", True),
        ("-", True),
        ("-1", True),
        ("-0.5", True),
        ("", True),
        ("-x", False),
        ("--y", False),
        ("-1x", False),
    ],
)
def test_values_and_options(word: str, value: object) -> None:
    assert options.is_value(word) is value


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (("--size", "1"), "1"), (("-s", "-1"), "-1"), (("--size=1", "-s", "2"), "2"), (("-s", "2", "--size=1"), "1"),
        (("--size",), None), (("--size", "--other"), None), (("--size", "1", "--size"), None), (("--size", ""), None),
        (("--other", "1"), None), ((), None),
    ],
)  # fmt: skip
def test_the_last_value_of_an_option(words: tuple[str, ...], value: str | None) -> None:
    assert options.value_of(words, "--size", name_of) == value


def test_places_of_options_and_their_values() -> None:
    words = ("--other", "1", "-s", "2", "--size=3", "4", "--size", "--last")
    assert options.places_of(words, {"--size"}, name_of) == (2, 3, 4, 6)
    assert options.places_of(words, {"--size", "--last"}, name_of) == (2, 3, 4, 6, 7)
    assert options.overriding(words, ["limit", "unknown"], {"limit": "--size"}, name_of) == (2, 3, 4, 6)


def test_merge_drops_only_the_options_that_are_replaced() -> None:
    ours = [("--size", "1"), ("--no-page",), ("--z", "3", "4")]
    assert options.merge(ours, (), name_of) == ("--size", "1", "--no-page", "--z", "3", "4")
    assert options.merge(ours, ("-s", "2"), name_of) == ("--no-page", "--z", "3", "4", "-s", "2")
    opposites = {"--page": "--no-page"}
    assert options.merge(ours, ("--page",), name_of, opposites) == ("--size", "1", "--z", "3", "4", "--page")


def test_both_engines_read_words_by_these_rules() -> None:
    """vLLM's parser takes "--option=value" and abbreviates negation; llama-server's does neither."""
    words = ("--max-num-seqs=4", "--max-num-batched-tokens", "8", "--seed", "-1")
    assert vllm.overriding(words, ["max_num_seqs", "max_num_batched_tokens"]) == (0, 1, 2)
    assert vllm.value_of(words, "--seed") == "-1"
    assert llama_cpp.overriding(("-b", "8", "--mlock"), ["max_num_seqs", "max_num_batched_tokens"]) == (0, 1)
    assert llama_cpp.merge([("--no-webui",)], ("--webui",)) == ("--webui",)
