"""Words of an earlier private vocabulary stay out of code, messages and pages. docs/glossary.md has the words in use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Word or phrase -> what to write. Identifiers are split at `_` and at capitals before the comparison.
FORBIDDEN = {
    "front door": "proxy, endpoint",
    "front house": "proxy",
    "door|doors": "proxy, endpoint",
    "house|landlord": "name the thing",
    "seat|seats": "concurrency limit (max_num_seqs), slot state, zone",
    "keeper|keepers": "slot controller; shim; the instance that stores a response",
    "desk": "request registry",
    "intake": "admission",
    "life|lives": "instance, generation",
    "rooms": "packages",
    "wave|waves": "group of starts",
    "whisper|whispers": "name the thing",
    "goes on with": "continues, adopts",
    "nothing any more": "no longer",
    "what is left of": "name the thing",
    "anew": "again",
    "in vain": "without success",
}
# File -> words that it may have, and why.
EXCEPTIONS: dict[str, dict[str, str]] = {
    "launcher/planning/layers.py": {"whisper": "a model's name"},
}
FOLDERS = ("launcher", "scripts", "systemd", "configs", "docs")
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def files() -> Iterator[Path]:
    yield ROOT / "README.md"
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if (
                path.is_file()
                and "__pycache__" not in path.parts
                and path.suffix not in {".svg", ".png", ".so"}
            ):
                yield path


def found() -> Iterator[tuple[str, int, str, str]]:
    """File, line, what is forbidden, the line."""
    patterns = {words: re.compile(rf"\b(?:{words})\b") for words in FORBIDDEN}
    for path in files():
        name = str(path.relative_to(ROOT))
        allowed = EXCEPTIONS.get(name, {})
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            text = " ".join(WORD.findall(line)).lower()
            for words, pattern in patterns.items():
                if any(hit not in allowed for hit in pattern.findall(text)):
                    yield name, number, words, line.strip()


def test_no_word_of_the_old_vocabulary() -> None:
    assert [f"{name}:{number}: {words}: {line}" for name, number, words, line in found()] == []


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_exceptions_are_needed(name: str) -> None:
    text = " ".join(WORD.findall((ROOT / name).read_text(encoding="utf-8"))).lower()
    assert all(re.search(rf"\b{word}\b", text) for word in EXCEPTIONS[name])
