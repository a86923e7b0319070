"""Flags are recognised in every spelling vLLM's own parser takes."""

from __future__ import annotations

import pytest

from launcher.engines.vllm.arguments import flag_of, has_flag, json_of, merge, value_of


@pytest.mark.parametrize(
    ("argument", "flag"),
    [
        ("--max-model-len", "--max-model-len"),
        ("--max_model_len=4", "--max-model-len"),
        ("--no-enable-prefix-caching", "--enable-prefix-caching"),
        ("-tp", "--tensor-parallel-size"),
        ("-q=awq", "--quantization"),
        ("-1", None),
        ("-0.5", None),
        ("-", None),
        ("value", None),
    ],
)
def test_flag_of(argument: str, flag: str | None) -> None:
    assert flag_of(argument) == flag


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ((), {}),
        (("--x", '{"a": 1}'), {"a": 1}),
        (("--x", "[1]"), {}),
        (("--x", "{"), {}),
        (("--x={}", "--x.b-c", "2"), {"b_c": 2}),
        (
            ("--x", '{"a": {"b": 1}}', "--x.a.c=true", "--x.d.e", '"f"'),
            {"a": {"b": 1, "c": True}, "d": {"e": "f"}},
        ),
        (("--x.a", "1", "--x.a.b", "2"), {"a": {"b": 2}}),
    ],
)
def test_an_object_in_either_form(arguments: tuple[str, ...], value: object) -> None:
    assert json_of(arguments, "--x") == value


def test_merge_keeps_order_and_values() -> None:
    ours = [("--x", "1"), ("--y",), ("--z", "3")]
    assert merge(ours, ("--no-y", "--w", "x", "y")) == ("--x", "1", "--z", "3", "--no-y", "--w", "x", "y")
    assert merge(ours, ()) == ("--x", "1", "--y", "--z", "3")


def test_the_last_word_on_a_flag_counts() -> None:
    assert has_flag(("--enforce_eager",), "--enforce-eager")
    assert not has_flag(("--enforce-eager", "--no-enforce-eager"), "--enforce-eager")
    assert not has_flag((), "--enforce-eager")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [(("--a", "1"), "1"), (("--a=1", "--a", "2"), "2"), (("--a",), None), (("--a", "--b"), None), ((), None)],
)
def test_value_of(arguments: tuple[str, ...], value: str | None) -> None:
    assert value_of(arguments, "--a") == value
