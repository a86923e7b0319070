"""Command lines of engines as lists of words: options and their values, whatever the names of the options. Pure.

Each engine brings a `Naming`: the usual name of the option that a word is. Where its parser takes "--option=value",
`value_of` and `places_of` read that form too."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

Naming = Callable[[str], str | None]
"""The usual name of the option that a word is; None for a value."""

_NUMBER: Final = re.compile(r"-\d+(?:\.\d+)?", re.ASCII)


def is_value(word: str) -> bool:
    """Whether a word is a value: parsers take negative numbers, and "-" (standard input), as values."""
    return not word.startswith("-") or word == "-" or _NUMBER.fullmatch(word) is not None


def value_of(words: Sequence[str], option: str, naming: Naming) -> str | None:
    """The value at the last place of an option; None without one there, or where another option follows instead."""
    value: str | None = None
    for index, word in enumerate(words):
        if naming(word) == option:
            _, equals, text = word.partition("=")
            following = _following(words, index)
            value = text if equals else words[following[0]] if following else None
    return value


def places_of(words: Sequence[str], options: Collection[str], naming: Naming) -> tuple[int, ...]:
    """Indices of these options and of their values."""
    found: list[int] = []
    for index, word in enumerate(words):
        if naming(word) in options:
            found += [index, *(() if "=" in word else _following(words, index))]
    return tuple(found)


def overriding(
    words: Sequence[str], keys: Iterable[str], options: Mapping[str, str], naming: Naming
) -> tuple[int, ...]:
    """Indices of the options, and of their values, that override these keys of [[models]]. `options` has the option of
    each key that the launcher passes on."""
    return places_of(words, {options[key] for key in keys if key in options}, naming)


def merge(
    ours: Sequence[tuple[str, ...]],
    theirs: Sequence[str],
    naming: Naming,
    opposites: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """The launcher's options (option and values each) without those that `theirs` sets, then `theirs` unchanged.

    `opposites`: options that replace others, to the others' names."""
    same = opposites or {}
    names = {name for word in theirs if (name := naming(word)) is not None}
    replaced = {same.get(name, name) for name in names}
    named = ((naming(option[0]) or "", option) for option in ours)
    kept = (word for name, option in named if same.get(name, name) not in replaced for word in option)
    return (*kept, *theirs)


def _following(words: Sequence[str], index: int) -> tuple[int, ...]:
    """The index of the value after an option, if one is there. An empty word is none."""
    after = index + 1
    return (after,) if after < len(words) and words[after] and is_value(words[after]) else ()
