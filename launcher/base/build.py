"""Which build of launcher/ runs: the Python sources alone, or with the libraries that scripts/compile made.

Python imports a library before the source beside it. Libraries of other sources, or of another Python, are never
imported: `ignore_stale_libraries` makes the process import the sources, and `build` says so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Literal

Build = Literal["python", "compiled", "stale"]

ROOT = Path(__file__).parents[1]
RECORD = "compiled.sha256"
"""Beside the libraries: `digest` of the sources that they were made of."""

REMEDY = "run scripts/compile again, or scripts/compile --clean"


def digest(root: Path) -> str:
    """A hash of every Python source below `root`, and of the binary interface of this Python."""
    from hashlib import sha256  # noqa: PLC0415  needed for a compiled build alone

    found = sha256(EXTENSION_SUFFIXES[0].encode())
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)} {sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


def inspect(root: Path) -> Build:
    try:
        recorded = (root / RECORD).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return "python"
    return "compiled" if recorded == digest(root) else "stale"


class _Sources:
    """An import finder that sees the sources of launcher/ only."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("launcher."):
            return None
        for folder in path or ():
            if spec := FileFinder(folder, (SourceFileLoader, SOURCE_SUFFIXES)).find_spec(name, target):
                return spec
        return None


_BUILD = inspect(ROOT)


def build() -> Build:
    """ "stale": there are libraries, and this process runs the Python sources because they do not match."""
    return _BUILD


def ignore_stale_libraries() -> None:
    """Must run before any module that may be a library is imported."""
    if _BUILD == "stale":
        sys.meta_path.insert(0, _Sources)
