"""Regular expressions that every supported Python matches alike."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

import launcher

# Of these an attempt that fails leaves Python before 3.11.5 in the middle of a possessively repeated group.
_LOSES_PLACE = {op.ASSERT, op.ASSERT_NOT}
_REPEATS = {op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT}


def within(value: Any) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from within(part)


def of_launcher() -> dict[str, re.Pattern[Any]]:
    names = [found.name for found in pkgutil.walk_packages(launcher.__path__, "launcher.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    return {
        f"{module.__name__}.{name}": pattern
        for module in modules
        for name, value in vars(module).items()
        for pattern in within(value)
    }


def parts(parsed: Any) -> Iterator[tuple[Any, Any]]:
    """Every operation in a parsed pattern, at any depth."""
    for operation, argument in parsed:
        yield operation, argument
        for inner in argument if isinstance(argument, tuple | list) else ():
            if isinstance(inner, parser.SubPattern):
                yield from parts(inner)
            elif isinstance(inner, list):
                for branch in inner:
                    if isinstance(branch, parser.SubPattern):
                        yield from parts(branch)


def is_safe(pattern: str | bytes, flags: int = 0) -> bool:
    """Whether no group that is repeated possessively has a repeated group or a lookahead in it (CPython's gh-106052)."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    for operation, argument in parts(parser.parse(text, flags & ~re.UNICODE)):
        if operation is op.POSSESSIVE_REPEAT:
            for inner, repeated in parts(argument[2]):
                if inner in _LOSES_PLACE or (inner in _REPEATS and len(repeated[2]) > 1):
                    return False
    return True


@pytest.mark.parametrize(
    ("pattern", "safe"),
    [
        (r'(?:"[^"]*+(?:\\.[^"]*+)*+")*+', False),
        (r"(?:;a++(?:=b++)?)*+", False),
        (r"(?:a{1,9}(?!-)b)*+", False),
        (r'(?:"[^"]*+(?:\\.[^"]*+)*+")*', True),
        (r"(?:[^a]|\\.)*+", True),
        (r"(?:a++:b*+\r\n)*+", True),
    ],
)
def test_the_check(pattern: str, *, safe: bool) -> None:
    assert is_safe(pattern) == safe


def test_no_pattern_is_matched_otherwise_by_an_early_python() -> None:
    found = of_launcher()
    assert len(found) > 50
    assert [name for name, pattern in found.items() if not is_safe(pattern.pattern, pattern.flags)] == []
