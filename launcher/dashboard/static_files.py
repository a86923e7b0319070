"""The page's files: read when they change, compressed once."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent / "static"
_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class File:
    content_type: str
    body: bytes
    compressed: bytes
    etag: str
    changed_ns: int


class StaticFiles:
    """The files directly in `folder`, by name. Other names are no files, whatever they are."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._kept: dict[str, File] = {}

    def get(self, name: str) -> File | None:
        path = self._folder / name
        content_type = _TYPES.get(path.suffix)
        if content_type is None or path.name != name or name.startswith("."):
            return None
        try:
            changed_ns = path.stat().st_mtime_ns
            kept = self._kept.get(name)
            if kept is None or kept.changed_ns != changed_ns:
                kept = self._kept[name] = _file(content_type, path.read_bytes(), changed_ns)
        except (OSError, ValueError):  # ValueError: a NUL byte
            return None
        return kept


def _file(content_type: str, body: bytes, changed_ns: int) -> File:
    etag = hashlib.sha256(body).hexdigest()[:16]
    return File(content_type, body, gzip.compress(body, mtime=0), f'"{etag}"', changed_ns)
