"""Text files that people write: their encoding, and TOML. A byte order mark at the begin is skipped; what cannot be read is
shown with its line, a caret and the name of an odd character."""

from __future__ import annotations

import codecs
import re
import tomllib
import unicodedata
from pathlib import Path
from typing import Any, Final

from launcher.base.errors import LauncherError, reason
from launcher.base.redaction import MASK, Redactor, is_harmless_name, is_secret_name
from launcher.base.text import printable

# tomllib's own words: its exceptions have no position before Python 3.14.
_POSITION: Final = re.compile(r" \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")
_ILLEGAL: Final = re.compile(r"(?:Illegal|Found invalid) character")
_TWICE: Final = re.compile(r"Cannot declare \((?P<names>.*?),?\) twice")
_PLAINLY: Final = {
    "Illegal character '\\n'": "the text has no closing quotation mark on its line",
    "Unterminated string": "the text has no closing quotation mark",
    "Cannot overwrite a value": "the key is there twice",
}
_ENCODINGS: Final = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_BOM: Final = "\ufeff"
_SINGLE: Final = "‘’‚‛′"
_DOUBLE: Final = "“”„‟«»″"
_DASHES: Final = "‐‑‒–—−"
_CONTROLS: Final = {
    "\0": "null byte",
    "\r": "carriage return without a line feed",
    "\t": "tab",
    "\x0b": "vertical tab",
    "\x0c": "form feed",
    "\x1b": "escape",
    "\x7f": "delete",
}
# Longer lines are cut around the caret.
_MAX_SHOWN: Final = 100
_TABLE: Final = re.compile(r"^[ \t]*\[{1,2}[ \t]*([^\]#]*?)[ \t]*\]{1,2}", re.MULTILINE)


def read_toml(path: Path, what: str, missing: str = "give an existing file") -> dict[str, Any]:
    """The file's tables. Raises LauncherError: "cannot read WHAT 'PATH', line N: why", then the line and a caret,
    secrets masked. `missing`: the remedy where the file cannot be opened."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LauncherError(f"cannot read {what} '{path}': {reason(error)}", missing) from None
    return parse_toml(decoded(data, f"{what} '{path}'"), f"{what} '{path}'")


def decoded(data: bytes, origin: str) -> str:
    """UTF-8 text, without a byte order mark. Raises LauncherError, which names another encoding."""
    for mark, encoding in _ENCODINGS:
        if data.startswith(mark):
            raise _encoded(origin, encoding)
    # Without a mark: ASCII in UTF-16 has a null byte beside each character.
    nulls = data[:64].count(0)
    if nulls >= 8 and nulls * 2 >= len(data[:64]) - 1:
        raise _encoded(origin, "UTF-16" if nulls * 3 < len(data[:64]) * 2 else "UTF-32")
    try:
        return data.decode("utf-8").removeprefix(_BOM)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise LauncherError(
            f"cannot read {origin}, line {line}: byte 0x{data[error.start]:02x} is not UTF-8 text",
            "save the file as UTF-8",
        ) from None


def _encoded(origin: str, encoding: str) -> LauncherError:
    return LauncherError(
        f"cannot read {origin}: {encoding}, not UTF-8 text",
        f"save the file as UTF-8, or convert it: iconv -f {encoding} -t UTF-8 OLD > NEW",
    )


def parse_toml(text: str, origin: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises LauncherError as `read_toml`."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _explained(text, origin, str(error)) from None
    except RecursionError:
        raise LauncherError(f"cannot read {origin}: nested too deeply", "write it without nesting") from None


def _explained(text: str, origin: str, said: str) -> LauncherError:
    text = text.replace("\r\n", "\n")
    position = _POSITION.search(said)
    why = _why(said[: position.start()] if position is not None else said)
    lines = text.split("\n")
    if position is None or position["line"] is None:
        number, column = _last_written(lines)
    else:
        number, column = int(position["line"]), int(position["column"])
    line = lines[number - 1] if number <= len(lines) else ""
    illegal = _ILLEGAL.match(said) is not None
    odd = _odd_at(line, column, illegal=illegal)
    remedy = "correct the TOML syntax"
    if odd is not None:
        column = odd + 1
        why = f"{'TOML does not allow' if illegal else f'{why}:'} {_named(line[odd])}"
        remedy = _instead(line[odd], alone=line.count("\r") > 1)
    table = next((found[1] for found in reversed(list(_TABLE.finditer("\n".join(lines[: number - 1]))))), "")
    shown = _shown(line, column - 1, table)
    return LauncherError(f"cannot read {origin}, line {number}: {why}{shown}", remedy)


def _why(said: str) -> str:
    if (twice := _TWICE.match(said)) is not None:
        table = twice["names"].replace("'", "").replace(", ", ".")
        return f"the table [{table}] is there twice"
    return _PLAINLY.get(said) or f"{said[:1].lower()}{said[1:]}"


def _last_written(lines: list[str]) -> tuple[int, int]:
    """Where an error "at the end" begins to be seen: behind the last line that says something."""
    for number in range(len(lines), 0, -1):
        if lines[number - 1].strip():
            return number, len(lines[number - 1]) + 1
    return 1, 1


def _odd_at(line: str, column: int, *, illegal: bool) -> int | None:
    """The index of the odd character that an error is about: at the error's column, else the first before it on the line
    (a typographic quote is part of a value that goes wrong later), else the next after it."""
    at = column - 1
    if at < len(line) and (_is_odd(line[at]) or (illegal and line[at] == "\t")):
        return at
    before = [index for index in range(min(at, len(line))) if _is_odd(line[index])]
    if before:
        return before[0]
    return next((index for index in range(at, len(line)) if _is_odd(line[index])), None)


def _is_odd(character: str) -> bool:
    """Whether it looks like one of TOML's signs, or like nothing at all."""
    if character in _SINGLE + _DOUBLE + _DASHES:
        return True
    return (
        character != "\t"
        and not (character.isalnum() or character == " ")
        and (
            unicodedata.category(character)[0] in "ZC"
            or (not character.isascii() and unicodedata.normalize("NFKC", character) in {*"=[]{},.#\"'"})
        )
    )


def _named(character: str) -> str:
    """`U+201C LEFT DOUBLE QUOTATION MARK`; control characters have no name in Unicode."""
    name = (
        "BYTE ORDER MARK"
        if character == _BOM
        else unicodedata.name(character, "") or _CONTROLS.get(character, "")
    )
    return f"U+{ord(character):04X} {name}".rstrip()


def _instead(character: str, *, alone: bool) -> str:
    if character in _DOUBLE + _SINGLE:
        return f"""write {'"' if character in _DOUBLE else "'"} instead of the typographic quotation mark"""
    if character == "\r":
        if alone:
            return "end lines with a line feed: tr '\\r' '\\n' < OLD > NEW"
        return "end the line with a line feed"
    if character in _DASHES:
        return "write - instead"
    if unicodedata.category(character) == "Zs":
        return "write a plain space instead"
    plain = unicodedata.normalize("NFKC", character)
    return (
        f"write {plain} instead" if plain != character and plain.isascii() and plain.strip() else "remove it"
    )


def _shown(line: str, at: int, table: str) -> str:
    """The line and a caret below it; without the value where it may be a secret."""
    before = _safe(line[:at], table)
    whole = _safe(line, table)
    if not whole.startswith(before):
        before = whole
    begin = max(0, len(before) - _MAX_SHOWN // 2)
    window = whole[begin : begin + _MAX_SHOWN]
    cut = ("…" if begin else "") + window + ("…" if begin + _MAX_SHOWN < len(whole) else "")
    if not cut.strip():
        return ""
    return f"\n  {cut}\n  {' ' * (len(before) - begin + bool(begin))}^"


def _safe(line: str, table: str) -> str:
    """Printable, one column for each character, secrets masked."""
    name, equals, value = line.partition("=")
    hidden = is_secret_name(name.strip(" \t\"'")) or (
        table == "engine.env" and not is_harmless_name(name.strip(" \t\"'"))
    )
    if equals and value.strip() and hidden:
        return f"{_columns(name)}= {MASK}"
    return _columns(Redactor().text(line))


def _columns(text: str) -> str:
    return printable(text.replace("\t", " ").replace("\u00a0", "␣"))
