"""Which of several API keys files is the latest. One that hosts share begins with the line `# fleet VERSION`; the highest
version is the fleet's, whichever hosts have it, so that no host is needed to keep it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from launcher.errors import RefusedError
from launcher.proxy.auth import key_record, key_store

_HEAD: Final = re.compile(r"# fleet (\d{1,15})\n")
NONE: Final = "0 -"
"""The stamp of a host without a keys file."""


def stamp(text: str) -> str:
    """Version and SHA-256 of a file; version 0: it is not the fleet's."""
    head = _HEAD.match(text)
    return f"{head[1] if head else 0} {hashlib.sha256(text.encode()).hexdigest()}" if text else NONE


def version(stamp: str) -> int:
    return int(stamp.partition(" ")[0])


def stamped(text: str, version: int) -> str:
    return f"# fleet {version}\n{_HEAD.sub('', text, count=1)}"


def newest(stamps: Mapping[str, str]) -> str | None:
    """The host whose file is the fleet's; None: no host has such a file."""
    host = max(stamps, key=lambda host: (version(stamps[host]), stamps[host]), default=None)
    return host if host is not None and version(stamps[host]) else None


def stamp_of(path: str) -> str:
    """Raises LauncherError."""
    return stamp(key_store.text(path)) if Path(path).exists() else NONE


def stored(path: str, text: str | None = None) -> str:
    """The file at `path`, after `text` has replaced it. Raises LauncherError; RefusedError if the file there is newer."""
    if text is None:
        return key_store.text(path) if Path(path).exists() else ""
    key_record.parse(text, "the fleet's API keys")

    def change(old: str) -> str:
        if old != text and version(stamp(old)) >= version(stamp(text)):
            raise RefusedError(
                "cannot store API keys: they were changed meanwhile", "start the command again"
            )
        return text

    return key_store.rewrite(path, change)
