"""The llama-server of this host: the wheel's where there is no other, and the instruction sets and backends of a build."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from launcher.base.errors import LauncherError
from launcher.engines.checks import Row, Tier, ok, warn
from launcher.engines.llama_cpp import wheel_server
from launcher.engines.software import PROBE_TIMEOUT_S, Stack

PROGRAM: Final = "llama-server"
WHEEL: Final = (sys.executable, "-P", "-m", wheel_server.__name__)
"""The command of the wheel's server."""

# Names in ggml_backend_cpu_get_features (ggml/src/ggml-cpu/ggml-cpu.cpp, build 11434) that decide on speed, to the kernel's
# name of the processor's feature and the usual one.
_SETS: Final = {
    "AVX2": ("avx2", "AVX2"), "FMA": ("fma", "FMA"), "F16C": ("f16c", "F16C"), "AVX_VNNI": ("avx_vnni", "AVX-VNNI"),
    "AVX512": ("avx512f", "AVX-512"), "AVX512_VBMI": ("avx512vbmi", "AVX-512 VBMI"),
    "AVX512_VNNI": ("avx512_vnni", "AVX-512 VNNI"), "AVX512_BF16": ("avx512_bf16", "AVX-512 BF16"),
    "AMX_INT8": ("amx_int8", "AMX"), "DOTPROD": ("asimddp", "dot product"), "MATMUL_INT8": ("i8mm", "int8 matrices"),
    "SVE": ("sve", "SVE"),
}  # fmt: skip
_INFO: Final = re.compile(r"^.*system_info: (?P<features>.*)$", re.MULTILINE)
_FEATURE: Final = re.compile(r"(\w+) = [1-9]\d*\b")
_DEVICE: Final = re.compile(r"^.*  - (?P<name>\w+) *: ", re.MULTILINE)


def wheel_version(command: Sequence[str]) -> str | None:
    """The version of the wheel's server where engine.command names no other program and it is installed: its package says
    it, without a start. Raises LauncherError for a release that cannot be used."""
    found = wheel_server.release()
    if found is None or tuple(command) != (PROGRAM,):
        return None
    if (reason := wheel_server.why_not(found)) is not None:
        raise LauncherError(f"cannot start llama.cpp's server: {reason[0]}", reason[1])
    return wheel_server.version_of(found)


class Build(Struct, frozen=True):
    """The abilities of a build on this host."""

    features: frozenset[str]
    """As llama.cpp names them."""
    devices: tuple[str, ...]
    """Beside CPU, such as ZenDNN or BLAS."""


def parse_build(text: str) -> Build | None:
    """The build, from a log at verbosity 4 or the wheel's `--version`; None where neither is in `text`."""
    info = _INFO.search(text)
    if info is None:
        return None
    devices = (match["name"] for match in _DEVICE.finditer(text))
    return Build(
        frozenset(_FEATURE.findall(info["features"])), tuple(name for name in devices if name != "CPU")
    )


def trouble_of(done: subprocess.CompletedProcess[str]) -> str | None:
    """The last words of a program that printed no version, or its exit code; None where it gave neither."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {done.returncode}" if done.returncode else None


def asked(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program for what it prints, in the environment of the instances. Raises OSError and TimeoutExpired."""
    return subprocess.run(
        argv, capture_output=True, text=True, errors="replace", check=False, timeout=PROBE_TIMEOUT_S,
        stdin=subprocess.DEVNULL, env={**os.environ, **env},
    )  # fmt: skip


def examined(stack: Stack, env: Mapping[str, str]) -> Stack:
    """The stack with the abilities of its program, for `doctor`: it is started in the instances' environment with a model
    that does not exist, and prints them before it fails. Unchanged where it prints none, but for a wheel that does not run,
    which `probe` has not started."""
    wheel, build = stack.command == WHEEL, None
    with tempfile.TemporaryDirectory(prefix="numa-launcher-") as folder:
        # Options of build 11434; the wheel prints its own by --version.
        words = ("-lv", "4", "--offline", "--model", f"{folder}/none.gguf", "--host", f"{folder}/s.sock")
        try:
            done = asked([*stack.command, *(("--version",) if wheel else words)], env)
        except (OSError, subprocess.TimeoutExpired) as error:
            trouble: str | None = str(error)
        else:
            build = parse_build(done.stderr + done.stdout)
            trouble = trouble_of(done) if done.returncode else None
    if build is not None:
        return replace(stack, instruction_sets=build.features, backends=build.devices)
    return replace(stack, version=None, version_trouble=trouble) if wheel and trouble else stack


def build_rows(stack: Stack, flags: frozenset[str]) -> Iterator[Row]:
    """The row on instruction sets and backends, for a processor with these features; none where they are unknown."""
    if stack.instruction_sets is None:
        return
    built = [name for key, (_, name) in _SETS.items() if key in stack.instruction_sets]
    lacking = [
        name for key, (flag, name) in _SETS.items() if flag in flags and key not in stack.instruction_sets
    ]
    fact = f"built for {', '.join(built) or 'no known instruction set'}; backends: {', '.join(('CPU', *stack.backends))}"
    if "ZenDNN" not in stack.backends:
        fact += " (without ZenDNN)"
    if lacking:
        yield warn(
            "llama.cpp-build", f"{fact}; this CPU also has {', '.join(lacking)}",
            "build one for this CPU: scripts/build-llama-server --out /usr/local/bin/llama-server", Tier.DEGRADED,
        )  # fmt: skip
    else:
        yield ok("llama.cpp-build", fact)
