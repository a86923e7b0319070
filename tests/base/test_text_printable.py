"""What others wrote begins no line, moves no cursor, and is no longer than said."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.text import MAX_QUOTED, cut, printable, printable_lines, printable_tree, quoted

# Explicit formatting characters (UAX #9, table 4).
DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("a\nb\r\n", "a\\nb\\r\\n"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\x9b2J \x85 \x7f", "\\x9b2J \\x85 \\x7f"),
        ("user\u202etxt.exe \u2066x\u2069 \u200f", "user\\u202etxt.exe \\u2066x\\u2069 \\u200f"),
        ("\u2028\u2029\ufeff\U000e0041", "\\u2028\\u2029\\ufeff\\U000e0041"),
        ("half \ud800", "half \\ud800"),
        ("tab\there, wörd, 模型, 🙂, 👩\u200d💻, C:\\x1b", "tab\there, wörd, 模型, 🙂, 👩\u200d💻, C:\\x1b"),
    ],
)
def test_what_is_escaped_and_what_is_not(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable_tree({text: [text, 1, None]}) == {shown: [shown, 1, None]}


@given(st.text())
def test_no_control_character_passes(text: str) -> None:
    shown = printable(text)
    assert not [
        sign
        for sign in shown
        if sign != "\t"
        and (
            unicodedata.category(sign) in {"Cc", "Cs", "Zl", "Zp"}
            or unicodedata.bidirectional(sign) in DIRECTIONS
        )
    ]
    assert printable(shown) == shown
    shown.encode()


def test_a_text_keeps_its_own_line_ends() -> None:
    assert printable_lines("a\x1b\nb\r\n") == "a\\x1b\nb\\r\n"


def test_what_is_long_is_cut_and_its_length_said() -> None:
    assert cut("x" * MAX_QUOTED) == "x" * MAX_QUOTED
    assert quoted("x" * 10_000_000) == "x" * MAX_QUOTED + "… (10000000 characters)"
    assert quoted("\n" * 10, 3) == "\\n\\n\\n… (10 characters)"
