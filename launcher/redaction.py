"""What is secret, decided in one place: by name, by form, and those that are known by value. Pure.

Whatever shows configuration, environments, arguments, log lines or pages to others asks here: `plan`, the control
socket, `bundle`, `doctor`, the audit, errors, and what goes into a unit's properties, which every user may read.
It rather masks a word too many than one too few.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

MASK: Final = "<redacted>"

# A shorter value is a word like any other: masking every "1" would leave nothing to read.
MIN_SECRET: Final = 4

_SECRET_NAME: Final = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTHORIZATION|COOKIE|BEARER"
    r"|_PASS$|_PWD$",
    re.IGNORECASE,
)
# Names that match and are no secrets.
_PLAIN: Final = frozenset({"TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_IMPLICIT_TOKEN"})

# What a name in running text must look like. "max_tokens", "tokenizer", "token_ids" and "hf_token_file" are no secrets.
_NO_FILE: Final = r"(?![\w.-]*[_-](?:file|path)\b)[\w.-]*"
_WORDS: Final = (
    r"[\w.-]*(?:secret(?!s_file)|passw(?:or)?d|passphrase|credential|_(?:pass|pwd)(?![\w.-]))" + _NO_FILE
)
_KEYS: Final = (
    r"[\w.-]*(?:token(?!s|i[zs]|_?ids?\b|_type|_timeout)|api[_-]?keys?|access[_-]?key|private[_-]?key)"
    + _NO_FILE
)
_NAME: Final = rf"(?:{_WORDS}|{_KEYS})"
# An ellipsis stands for a value, and so may errors of ours: "engine.env.HF_TOKEN: not text".
_NONE: Final = r"""(?!["']\.\.\.["']|not text\b)"""
_VALUE: Final = (
    _NONE + r"""(?:\\["'][^"'\\\n]*|\[[^\]\n]*\]|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|[^\s,;&"'}\])]+)"""
)
# Behind a word such as "token" a count is no secret, and null is none.
_NUMBER: Final = r"(?!(?:\d+(?:\.\d+)?|null|None|true|false|True|False)(?![\w.-]))"

_PATTERNS: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), MASK),
    # Headers, as curl, http.client and our own messages write them: all to the end of the value.
    (
        re.compile(
            r"""(?i)\b((?:proxy-)?authorization|(?:set-)?cookie|x-api-key|x-auth-token)(\\?["']?\s*[:=,]\s*\\?["']?)[^"'\\\r\n]+"""
        ),
        rf"\1\2{MASK}",
    ),
    (re.compile(r"\b([Bb]earer|Basic)(\s+)(?!auth)[\w.~+/=:-]{6,}"), rf"\1\2{MASK}"),
    # --api-key VALUE VALUE, also as the items of a list: up to the next option.
    (
        re.compile(rf"""(?i)(--?{_NAME})(=|[\s"',]+)(?!-)[^\s"',\]]+(?:[ \t"',]+(?!-)[^\s"',\]]+)*"""),
        rf"\1\2{MASK}",
    ),
    # NAME=value, "name": "value", name: [..]
    (re.compile(rf"""(?i)(?<![\w/-])({_WORDS})(\\?["']?\s*[=:]\s*){_VALUE}"""), rf"\1\2{MASK}"),
    (re.compile(rf"""(?i)(?<![\w/-])({_KEYS})(\\?["']?\s*[=:]\s*){_NUMBER}{_VALUE}"""), rf"\1\2{MASK}"),
    # https://user:password@host and https://token@host; a password with a slash or an @ of its own, too.
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/\"'?#]+@", re.IGNORECASE), rf"\1{MASK}@"),
    (
        re.compile(
            r"(\b[a-z][a-z0-9+.-]*://)[^\s/@:\"']*:(?!\d{1,5}(?:[/?#]|\b(?!@)))[^\s@\"']+@", re.IGNORECASE
        ),
        rf"\1{MASK}@",
    ),
    # http_proxy=user:password@host: curl and requests take a proxy without a scheme.
    (re.compile(r"""(?i)(\w*_proxy(?:\\?["'])?\s*[=:]\s*(?:\\?["'])?)(?![a-z][a-z0-9+.-]*://)[^\s@"',]+@"""), rf"\1{MASK}@"),
    # Signed URLs: Azure's, AWS's, Google's.
    (re.compile(r"""(?i)([?&](?:sig|signature|[\w-]+-signature)=)[^\s&"']+"""), rf"\1{MASK}"),
    # Keys with a form of their own: Hugging Face, OpenAI, ours, GitHub, AWS, Slack, JSON web tokens.
    (
        re.compile(
            r"\bhf_[A-Za-z0-9]{8,}|\bsk-[A-Za-z0-9_-]{8,}|\bnl-[a-z2-7]{8}-[a-z2-7]{20,}|\bgh[pousr]_[A-Za-z0-9]{16,}|"
            r"\bgithub_pat_\w{16,}|\bAKIA[0-9A-Z]{12,}|\bxox[abprs]-[\w-]{8,}|\beyJ[\w-]{6,}\.[\w-]{6,}\.?[\w-]*"
        ),
        MASK,
    ),
)  # fmt: skip


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds what must never be printed."""
    return _SECRET_NAME.search(name) is not None and name not in _PLAIN


def is_secret(name: str, value: str) -> bool:
    """Whether a variable must never be printed: by its name, or for what stands in its value."""
    return bool(value) and (is_secret_name(name) or secret_parts(name, value) != [])


def secret_parts(name: str, value: str) -> list[str]:
    """What of a variable's value is secret: all under a secret name, else what has the form of a secret."""
    if is_secret_name(name):
        return [value]
    found = [match[1] for match in _USERINFO.finditer(value)]
    if name.lower().endswith("_proxy") and (bare := _BARE_USERINFO.match(value)) is not None:
        found.append(bare[1])
    parts = [part for userinfo in found for part in (userinfo, userinfo.partition(":")[2])]
    parts += [unquote(part) for part in parts]
    masked = Redactor().text(f"{name}={value}") != f"{name}={value}"
    return list(dict.fromkeys(filter(None, parts))) or ([value] if masked else [])


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line as it may be shown: its words, those that are secret masked."""
    return [str(word) for word in Redactor().tree(list(arguments))]


def secret_arguments(arguments: Sequence[str]) -> list[str]:
    """What of a command line is secret."""
    found = []
    for word, shown in zip(arguments, masked_arguments(arguments), strict=True):
        if word != shown:
            name, equals, value = word.partition("=")
            found += [value] if equals and shown == f"{name}={MASK}" else secret_parts("", word) or [word]
    return found


class Redactor:
    """Masks secrets in text. `known` are values that must not leave, whatever stands beside them."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        """Values shorter than MIN_SECRET are left to the names beside them."""
        values: set[str] = set()
        for value in known:
            if len(value.strip()) >= MIN_SECRET:
                values |= _written(value.strip())
        # The longest first: a secret may begin with another.
        every = "|".join(re.escape(value) for value in sorted(values, key=lambda value: (-len(value), value)))
        self._known = re.compile(every) if every else None
        self.count = 0
        """How many places have been masked."""

    def text(self, text: str) -> str:
        """The same with masks."""
        if self._known is not None:
            text = self._sub(self._known, MASK, text)
        for pattern, mask in _PATTERNS:
            text = self._sub(pattern, mask, text)
        return text

    def _sub(self, pattern: re.Pattern[str], mask: str, text: str) -> str:
        text, found = pattern.subn(mask, text)
        self.count += found
        return text

    def tree(self, value: Any) -> Any:
        """A JSON value: texts masked, and what stands under a secret name or behind an option of one."""
        match value:
            case Mapping():
                return {self._key(key): self._named(str(key), inner) for key, inner in value.items()}
            case str():
                return self.text(value)
            case Sequence():
                return self._items(value)
            case _:
                return value

    def _key(self, key: Any) -> Any:
        return self._sub(self._known, MASK, key) if self._known is not None and isinstance(key, str) else key

    def _named(self, name: str, value: Any) -> Any:
        if not is_secret_name(name) or name.endswith(("_file", "_path")):
            if isinstance(value, str) and name.lower().endswith("_proxy"):
                return self.text(f"{name}={value}").partition("=")[2]  # it may have no scheme
            return self.tree(value)
        if isinstance(value, str) and value:
            self.count += 1
            return MASK
        if isinstance(value, list | tuple):
            return [self._named(name, inner) for inner in value]
        return self.tree(value)

    def _items(self, items: Sequence[Any]) -> list[Any]:
        """A list, of arguments perhaps: `--api-key A B` hides what follows up to the next option."""
        found, hiding = [], False
        for item in items:
            option = isinstance(item, str) and item.startswith("-")
            if option:
                name, equals, _ = item.partition("=")
                hiding = _OPTION.fullmatch(name) is not None
                if hiding and equals:
                    self.count += 1
                    item, hiding = f"{name}={MASK}", False  # noqa: PLW2901
            elif hiding and isinstance(item, str):
                self.count += 1
                item = MASK  # noqa: PLW2901
            found.append(self.tree(item))
        return found


_USERINFO: Final = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://([^\s/\"'?#]+|[^\s/@:\"']*:[^\s@\"']+)@")
_BARE_USERINFO: Final = re.compile(r"([^\s@/]+)@")
_OPTION: Final = re.compile(rf"--?{_NAME}", re.IGNORECASE)


def _written(value: str) -> set[str]:
    """A value as programs print it: plain, in JSON, in Python's quotes; each line of one with several."""
    forms = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}
    forms |= {line.strip() for line in value.splitlines() if len(line.strip()) >= 16 and "-----" not in line}
    return forms
