"""Text files as people and their editors write them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import LauncherError
from launcher.base.text_files import decoded, parse_toml, read_toml

GOOD = '[proxy]\nlisten = ["a:1"]\n'


def refused(text: str) -> tuple[str, str]:
    with pytest.raises(LauncherError) as caught:
        parse_toml(text, "file 'x'")
    assert "\n" not in caught.value.remedy
    return caught.value.message, caught.value.remedy


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert read_toml(file, "configuration") == {"proxy": {"listen": ["a:1"]}}


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        (
            "[proxy]\nlisten = [“a:1”]\n",
            ("cannot read file 'x', line 2: invalid value: U+201C LEFT DOUBLE QUOTATION MARK\n"
            "  listen = [“a:1”]\n"
            "            ^"),
            'write " instead of the typographic quotation mark',
        ),
        (
            "a = ‘b’",
            "cannot read file 'x', line 1: invalid value: U+2018 LEFT SINGLE QUOTATION MARK\n  a = ‘b’\n      ^",
            "write ' instead of the typographic quotation mark",
        ),
        (
            "a\u00a0= 1",
            ("cannot read file 'x', line 1: expected '=' after a key in a key/value pair: U+00A0 NO-BREAK SPACE\n"
            "  a␣= 1\n"
            "   ^"),
            "write a plain space instead",
        ),
        (
            "a = 1\n\ufeff[b]\n",
            "cannot read file 'x', line 2: invalid statement: U+FEFF BYTE ORDER MARK\n  \\ufeff[b]\n  ^",
            "remove it",
        ),
        (
            'a = "x\0y"',
            "cannot read file 'x', line 1: TOML does not allow U+0000 null byte\n  a = \"x\\x00y\"\n        ^",
            "remove it",
        ),
        (
            "[a]\rb = 1\rc = 2\r",
            ("cannot read file 'x', line 1: expected newline or end of document after a statement: U+000D carriage return "
            "without a line feed\n  [a]\\rb = 1\\rc = 2\\r\n     ^"),
            "end lines with a line feed: tr '\\r' '\\n' < OLD > NEW",
        ),
        (
            "a – 1",
            "cannot read file 'x', line 1: expected '=' after a key in a key/value pair: U+2013 EN DASH\n  a – 1\n    ^",
            "write - instead",
        ),
        (
            "a ＝ 1",
            ("cannot read file 'x', line 1: expected '=' after a key in a key/value pair: U+FF1D FULLWIDTH EQUALS SIGN\n"
            "  a ＝ 1\n    ^"),
            "write = instead",
        ),
        (
            "a = 1\n\tb = 2 3\n",
            "cannot read file 'x', line 2: expected newline or end of document after a statement\n   b = 2 3\n         ^",
            "correct the TOML syntax",
        ),
        (
            'a = "b\nc = 1\n',
            "cannot read file 'x', line 1: the text has no closing quotation mark on its line\n  a = \"b\n        ^",
            "correct the TOML syntax",
        ),
        (
            'a = """b\n\n\n',
            "cannot read file 'x', line 1: the text has no closing quotation mark\n  a = \"\"\"b\n          ^",
            "correct the TOML syntax",
        ),
        (
            "[a]\n[a]\n",
            "cannot read file 'x', line 2: the table [a] is there twice\n  [a]\n    ^",
            "correct the TOML syntax",
        ),
    ],
    ids=range(12),
)  # fmt: skip
def test_the_line_and_the_odd_character_are_shown(text: str, message: str, remedy: str) -> None:
    assert refused(text) == (message, remedy)


@pytest.mark.parametrize(
    "text",
    ["api_key = “sk-0123”", 'hf_token = "abc', "[engine.env]\nHOOK = “https://x/y”", "password = 'a\n"],
)
def test_no_secret_is_shown(text: str) -> None:
    message, _ = refused(text)
    assert "<redacted>" in message
    assert not {"sk-0123", "abc", "https://x/y", "'a"} & set(
        message.replace("“", " ").replace("”", " ").split()
    )


def test_a_long_line_is_cut_around_the_caret() -> None:
    message, _ = refused("a = [" + "1, " * 400 + "“]")
    _, shown, caret = message.split("\n")
    assert len(shown) < 120
    assert shown[caret.index("^")] == "“"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_another_encoding_is_named(encoding: str) -> None:
    with pytest.raises(LauncherError) as caught:
        decoded(GOOD.encode(encoding), "file 'x'")
    name = encoding[:6].upper()
    assert caught.value.message == f"cannot read file 'x': {name}, not UTF-8 text"
    assert f"iconv -f {name} -t UTF-8" in caught.value.remedy


def test_a_byte_that_is_not_utf_8() -> None:
    with pytest.raises(LauncherError, match="file 'x', line 3: byte 0xbf is not UTF-8 text"):
        decoded(GOOD.encode() + "# ż".encode("iso-8859-2"), "file 'x'")


@given(st.text(st.sampled_from("a1 =\"'[]{},.#\n\r\t\\“\u00a0\ufeff\0–é"), max_size=40))
def test_any_text_is_read_or_explained(text: str) -> None:
    """As tomllib reads it, or with a line and a caret below it."""
    try:
        expected = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        message, _ = refused(text)
        _, *shown = message.split("\n")
        assert not shown or (len(shown) == 2 and shown[1].strip() == "^")
    else:
        assert parse_toml(text, "x") == expected
