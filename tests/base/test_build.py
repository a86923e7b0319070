"""Stale libraries are never imported, and `build` says which build runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from launcher.base import build

PROGRAM = "from launcher import part; from launcher.base import build; print(build.build(), part.VALUE)"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small launcher/ with one module that also has a library: an unusable one, so that an import of it shows."""
    package = tmp_path / "launcher"
    (package / "base").mkdir(parents=True)
    for name in ("__init__.py", "base/__init__.py", "base/build.py"):
        shutil.copy(build.ROOT / name, package / name)
    (package / "part.py").write_text("VALUE = 'from the source'\n")
    (package / f"part{EXTENSION_SUFFIXES[0]}").write_bytes(b"not a library")
    return package


def run(root: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-P", "-c", PROGRAM]
    environment = {"PYTHONPATH": str(root.parent)}
    return subprocess.run(argv, cwd=root, env=environment, capture_output=True, text=True, check=False)


def test_without_a_record_it_is_pure_python(root: Path) -> None:
    (root / f"part{EXTENSION_SUFFIXES[0]}").unlink()
    assert build.inspect(root) == "python"
    assert run(root).stdout == "python from the source\n"


def test_matching_libraries_are_imported(root: Path) -> None:
    (root / build.RECORD).write_text(build.digest(root) + "\n")
    assert build.inspect(root) == "compiled"
    ended = run(root)
    assert ended.returncode == 1
    assert "part.cpython" in ended.stderr


@pytest.mark.parametrize("change", ["edited", "added", "removed", "renamed", "other Python"])
def test_stale_libraries_are_not_imported(root: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = root / "other.py"
    other.write_text("OTHER = 1\n")
    with monkeypatch.context() as patch:
        if change == "other Python":
            patch.setattr(build, "EXTENSION_SUFFIXES", [".cpython-39-x86_64-linux-gnu.so"])
        (root / build.RECORD).write_text(build.digest(root) + "\n")
    match change:
        case "edited":
            other.write_text("OTHER = 2\n")
        case "added":
            (root / "new.py").touch()
        case "removed":
            other.unlink()
        case "renamed":
            other.rename(root / "moved.py")
    assert build.inspect(root) == "stale"
    ended = run(root)
    assert ended.stdout == "stale from the source\n", ended.stderr


def test_an_empty_or_foreign_record_is_stale(root: Path) -> None:
    (root / build.RECORD).write_text("")
    assert build.inspect(root) == "stale"
