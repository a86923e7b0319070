"""The software behind `[engine]` that any engine may have: its program, the allocator, the image of containers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from msgspec import Struct

from launcher.base.errors import LauncherError, PassingError, timed_out
from launcher.config.schema import Engine

# For an interpreter that prints its path, ldconfig, numactl, a compiler, or a client of containers: milliseconds, but
# minutes while a machine boots and starts all services.
PROBE_TIMEOUT_S: Final = 60.0
TCMALLOC_FILE: Final = "libtcmalloc_minimal.so.4"
_LIBRARY_DIRS: Final = (
    "/usr/lib/*-linux-gnu", "/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib",
)  # fmt: skip
# docker 20 to 29, whose words before "Cannot" differ.
_NO_DOCKER: Final = re.compile(
    r"[Cc]annot connect to the Docker daemon|[Ff]ailed to connect to the docker API"
)


class Stack(Struct, frozen=True):
    """The software of `[engine]`. A version is None when unknown without running it."""

    command: tuple[str, ...]
    """engine.command, its first word an absolute path."""
    python: str | None = None
    """Interpreter that runs the command."""
    python_version: str | None = None
    version: str | None = None
    """The engine's own, as it prints it; vLLM's is `vllm`."""
    version_trouble: str | None = None
    """The reason why its program, which was run, printed no version; None where it gave none."""
    vllm: str | None = None
    torch: str | None = None
    zentorch: str | None = None
    cpu_build: bool | None = None
    """Whether vLLM will run on CPUs; None: unknown."""
    tcmalloc: str | None = None
    """Path of libtcmalloc_minimal; None when off or not found."""
    client: str | None = None
    """Path of podman or docker, where instances run in containers."""
    image: str | None = None
    """Id of the image; `command` is inside it."""
    instruction_sets: frozenset[str] | None = None
    """Those that llama.cpp was built for, by its own names; None: not examined, or unknown."""
    backends: tuple[str, ...] = ()
    """llama.cpp's, beside CPU."""
    load_generator: tuple[str, ...] = ()
    """Command of a vLLM whose `bench serve` can be the client of a measurement; empty where the engine has none."""
    warnings: tuple[str, ...] = ()
    """Statements to be logged once."""

    @property
    def fingerprint(self) -> str:
        """Key of the compile caches: code compiled for one stack must not be used with another."""
        parts = (
            ("vllm", self.vllm), ("torch", self.torch), ("zentorch", self.zentorch),
            ("image", self.image and self.image.removeprefix("sha256:")[:12]),
        )  # fmt: skip
        return "-".join(f"{name}{version}" for name, version in parts if version) or "unknown"


def find_program(word: str) -> str:
    """Absolute path of the first word of a template. Raises LauncherError, PassingError where it may come by itself."""
    if "{" in word:
        return word
    found = shutil.which(word)
    if found is None:
        raise absent(word)(
            f"cannot find the engine: no command {word!r}",
            "install it, or give its full path in engine.command",
        )
    return str(Path(found).absolute())


def absent(path: str) -> type[LauncherError]:
    """The error for a program or library: a path may come by itself, as an environment on NFS; a name in PATH may not."""
    return PassingError if "/" in path and not Path(path).exists() else LauncherError


def find_tcmalloc(wanted: str) -> str | None:
    """Path of the allocator to preload: "auto" searches for it, "off" is None, else the path itself."""
    if wanted == "off":
        return None
    if wanted != "auto":
        if Path(wanted).is_file():
            return wanted
        raise absent(wanted)(
            f"cannot preload engine.tcmalloc {wanted!r}: no such file",
            'install libtcmalloc-minimal4 and set "auto", or set "off"',
        )
    for pattern in _LIBRARY_DIRS:
        for found in sorted(Path("/").glob(f"{pattern.lstrip('/')}/{TCMALLOC_FILE}")):
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
    paths = (line.partition(" => ")[2].strip() for line in listing.splitlines() if TCMALLOC_FILE in line)
    return next((path for path in paths if path), None)


def probe_image(engine: Engine) -> Stack:
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
