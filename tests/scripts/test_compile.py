"""scripts/compile: its arguments and its list; `scripts/test compiled` runs it."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from launcher.base import build

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "compile", *words],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_every_entry_of_the_list_names_modules() -> None:
    for pattern in PROJECT["tool"]["numa-launcher"]["compile"]:
        modules = list(ROOT.glob(pattern))
        assert modules, pattern
        assert all(module.suffix == ".py" for module in modules), pattern


def test_each_compiled_module_is_tested_compiled() -> None:
    told = re.search(r"^readonly OF_COMPILED=\((.*)\)$", (ROOT / "scripts/test").read_text(), re.MULTILINE)
    assert told is not None
    run = [ROOT / name for name in told[1].split()]
    assert all(path.exists() for path in run)
    files = {file for path in run for file in ([path] if path.suffix else path.rglob("test_*.py"))}
    for pattern in PROJECT["tool"]["numa-launcher"]["compile"]:
        for module in ROOT.glob(pattern):
            folder = ROOT / "tests" / module.parent.relative_to(ROOT / "launcher")
            assert {*folder.glob(f"test_{module.stem}.py")} <= files, module


def test_the_compiler_is_pinned() -> None:
    assert any(need.startswith("mypy==") for need in PROJECT["project"]["optional-dependencies"]["compile"])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--claen"], "unknown argument '--claen'"),
        (["--opt-level"], "--opt-level '' is not one of 0 to 3"),
        (["--opt-level", "fast"], "--opt-level 'fast' is not one of 0 to 3"),
        (["/nowhere"], "there is no launcher/ in '/nowhere'"),
    ],
)
def test_refused(words: list[str], why: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"cannot compile: {why}\n  what to do: ")


def test_clean_removes_libraries_and_their_record(tmp_path: Path) -> None:
    package = tmp_path / "launcher"
    for folder in ("base", "proxy"):
        (package / folder).mkdir(parents=True)
    (package / "base" / "build.py").write_text((ROOT / "launcher" / "base" / "build.py").read_text())
    library = package / "proxy" / f"sse{EXTENSION_SUFFIXES[0]}"
    library.touch()
    (package / build.RECORD).touch()
    done = run("--clean", str(tmp_path))
    assert done.returncode == 0, done.stderr
    left = (path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert sorted(path.name for path in left) == ["build.py"]


def test_nothing_of_an_earlier_build_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    package = tmp_path / "launcher"
    package.mkdir()
    for name in ("build.py", f"sse{EXTENSION_SUFFIXES[0]}", build.RECORD):
        (package / name).touch()
    importlib.import_module("compile_modules").copy_sources(package, tmp_path / "copy", build.RECORD)
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["build.py"]


def test_an_entry_that_matches_nothing_is_named(tmp_path: Path) -> None:
    package = tmp_path / "launcher"
    (package / "base").mkdir(parents=True)
    (package / "base" / "build.py").write_text((ROOT / "launcher" / "base" / "build.py").read_text())
    done = run(str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("cannot compile: no module matches 'launcher/balancing/")
