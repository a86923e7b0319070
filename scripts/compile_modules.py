"""scripts/compile: mypyc over one list of modules, in a copy of the sources; only finished libraries are put in place."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "pyproject.toml"

# mypyc 2.4 gives a slice of bytes whose end lies before its start a negative size: SystemError where Python returns
# b"" (lib-rt/bytes_ops.c, CPyBytes_GetSlice). Can go when `b"ab"[2:1]` compiles to b"".
FIX_IN = "bytes_ops.c"
BROKEN = "        Py_ssize_t slice_len = endn - startn;\n"
FIXED = "        Py_ssize_t slice_len = endn < startn ? 0 : endn - startn;\n"

CHECK = """
import importlib, sys
for name in sys.argv[1:]:
    file = importlib.import_module(name).__file__
    if file is None or file.endswith(".py"):
        sys.exit(f"{name} was imported from {file}")
"""


def fail(why: str, remedy: str) -> NoReturn:
    sys.exit(f"cannot compile: {why}\n  what to do: {remedy}")


def listed(folder: Path) -> list[Path]:
    """The modules to compile, relative to the folder; an entry that matches nothing is an error."""
    patterns: list[str] = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["tool"]["numa-launcher"][
        "compile"
    ]
    found: set[Path] = set()
    for pattern in patterns:
        # A package's __init__ stays Python: mypyc's library of it does not find the package's modules.
        paths = {path.relative_to(folder) for path in folder.glob(pattern) if path.name != "__init__.py"}
        if not paths:
            fail(f"no module matches '{pattern}'", f"correct [tool.numa-launcher] compile in {PROJECT}")
        found |= paths
    return sorted(found)


def clean(package: Path, record: str) -> None:
    # The record first: without it the build counts as pure Python.
    (package / record).unlink(missing_ok=True)
    for library in package.rglob("*.so"):
        library.unlink()


def fixed_runtime(target: Path) -> Path:
    """A copy of mypyc's C runtime without the defect above."""
    spec = importlib.util.find_spec("mypyc")
    if spec is None or spec.origin is None:
        fail("mypy is not installed", f"{sys.executable} -m pip install '{ROOT}[compile]'")
    shutil.copytree(Path(spec.origin).parent / "lib-rt", target)
    file = target / FIX_IN
    text = file.read_text(encoding="utf-8")
    if text.count(BROKEN) != 1:
        fail(
            f"mypyc's {FIX_IN} is not the one that this version corrects",
            "install the mypy that pyproject.toml pins",
        )
    file.write_text(text.replace(BROKEN, FIXED), encoding="utf-8")
    return target


def copy_sources(package: Path, target: Path, record: str) -> None:
    """Without an earlier build's libraries, and without its record: by that the new libraries would be stale."""
    shutil.copytree(package, target, ignore=shutil.ignore_patterns("*.so", "__pycache__", record))


def compile_in(work: Path, modules: list[Path], opt_level: str) -> None:
    """Compiles in `work`; each library ends beside its source."""
    os.environ["CFLAGS"] = f"-I{fixed_runtime(work / 'runtime')} {os.environ.get('CFLAGS', '')}"
    os.chdir(work)
    from mypyc.build import mypycify  # noqa: PLC0415  reads CFLAGS
    from setuptools import setup  # noqa: PLC0415

    # One library for all, so that calls between modules are direct; it lies in launcher/.
    extensions = mypycify(
        ["--config-file", str(PROJECT), *map(str, modules)],
        group_name="launcher.compiled",
        debug_level="0",
        opt_level=opt_level,
    )
    check_generated(work / "build")
    setup(
        name="launcher",
        packages=[],
        ext_modules=extensions,
        script_args=["--quiet", "build_ext", "--inplace"],
    )


def check_generated(build: Path) -> None:
    """mypyc 2.4 inverts a test where a module reads a Final tuple of another one: NameError if its first item is a float."""
    for file in build.rglob("*.c"):
        text = file.read_text(encoding="utf-8")
        if found := re.search(r'!= -113\.0 && PyErr_Occurred\(\)\).*\n.*final name \\"(\w+)\\"', text):
            fail(f"mypyc miscompiles the Final tuple {found[1]}", "make a Final of each of its floats")


def names(modules: list[Path]) -> list[str]:
    return [".".join(path.with_suffix("").parts) for path in modules]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clean", action="store_true")
    parser.add_argument("--opt-level", choices=("0", "1", "2", "3"), default="3")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    package: Path = args.folder / "launcher"
    # By its path, because `import launcher` could import another copy.
    spec = importlib.util.spec_from_file_location("launcher_build", package / "base" / "build.py")
    if spec is None or spec.loader is None:
        fail(f"there is no {package / 'build.py'}", "name the folder that holds launcher/")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    if args.clean:
        clean(package, build.RECORD)
        return
    modules = listed(args.folder)
    with tempfile.TemporaryDirectory(prefix="numa-launcher-compile-") as name:
        work = Path(name)
        copy_sources(package, work / "launcher", build.RECORD)
        compile_in(work, modules, args.opt_level)
        made = sorted((work / "launcher").rglob("*.so"))
        subprocess.run([sys.executable, "-P", "-c", CHECK, *names(modules)], cwd=work, check=True,
                       env={**os.environ, "PYTHONPATH": str(work)})  # fmt: skip
        digest = build.digest(work / "launcher")
        os.chdir(args.folder)
        clean(package, build.RECORD)
        for library in made:
            shutil.copy(library, args.folder / library.relative_to(work))
        (package / build.RECORD).write_text(digest + "\n", encoding="ascii")
    print(f"compiled {len(modules)} modules of {package}")


if __name__ == "__main__":
    main()
