"""Wheels that come with their byte code: an emulated Python takes minutes to compile what this one does in seconds.

    python3 bytecode.py [--importable] WHEEL...

The byte code is not checked against its source, because what unpacks a wheel sets other times. --importable: also
where modules have it that are imported from the archive, as `ensurepip` does with pip.
"""

from __future__ import annotations

import importlib.util
import marshal
import sys
import zipfile
from pathlib import Path

# PEP 552: a hash of the source follows, and nobody compares it.
UNCHECKED = (0b01).to_bytes(4, "little")


def add_bytecode(wheel: Path, *, importable: bool = False) -> None:
    """Put it into the archive, for this very version of Python."""
    new = wheel.with_suffix(".new")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(new, "w") as out:
        for info in old.infolist():
            data, name = old.read(info), info.filename
            out.writestr(info, data)
            if name.endswith(".py") and ".data/" not in name and (compiled := bytecode(name, data)):
                out.writestr(importlib.util.cache_from_source(name), compiled)
                if importable:
                    out.writestr(f"{name}c", compiled)
    new.replace(wheel)


def bytecode(name: str, source: bytes) -> bytes | None:
    """A .pyc; None for what is no Python of this version, as some templates are."""
    try:
        code = compile(source, name, "exec", dont_inherit=True, optimize=0)
    except SyntaxError:
        return None
    return importlib.util.MAGIC_NUMBER + UNCHECKED + importlib.util.source_hash(source) + marshal.dumps(code)


if __name__ == "__main__":
    words = sys.argv[1:]
    for word in words:
        if word != "--importable":
            add_bytecode(Path(word), importable="--importable" in words)
