"""Collects facts about the host and the engine's software with short parallel probes; takes about a second."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

from launcher.base.build import build
from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError, TimedOutError, timed_out
from launcher.base.files import state_folder
from launcher.base.watched_file import FileState, WatchedFile, unusable
from launcher.config.schema import Engine, Proxy
from launcher.doctor.facts import Facts, Kernel
from launcher.engines.checks import Compiler, Installed, Trouble
from launcher.engines.make import engine_type, probe_stack
from launcher.engines.numactl import Binding, probe_binding
from launcher.engines.software import PROBE_TIMEOUT_S, Stack, find_tcmalloc
from launcher.keys.api_keys import ApiKeys
from launcher.machine import sysfs
from launcher.machine.hardware import read_host, read_settings
from launcher.machine.topology import Topology
from launcher.measure.tune.remembered import recall
from launcher.proxy.downstream.tls import ServerTls
from launcher.proxy.upstream.overflow_endpoint import watched_key

# capabilities(7); linux/capability.h.
_CAP_SYS_NICE: Final = 23
COMPILERS: Final = ("g++", "c++", "clang++")
_OPENMP: Final = ("libgomp*.so*", "libiomp5.so", "libomp.so*")
_OPENMP_DIRS: Final = ("usr/lib/*-linux-gnu", "usr/lib64", "usr/local/lib")


def gather(engine: Engine, root: Path = Path("/"), proxy: Proxy | None = None) -> Facts:
    """All facts; of the files of `proxy`, too. Raises LauncherError when the topology cannot be read, TimedOutError when a
    probe does not end."""
    with ThreadPoolExecutor(thread_name_prefix="doctor") as side:
        host = side.submit(read_host)  # the slowest
        software = side.submit(find_software, engine)
        topology = sysfs.read(root)
        binding = _binding(engine, topology)
        return Facts(
            host=host.result(), topology=topology,
            binding=binding if isinstance(binding, Binding) else None,
            binding_trouble=binding if isinstance(binding, Trouble) else None,
            software=software.result(), kernel=read_kernel(root), build=build(), measured=_measured_layout(),
            files=() if proxy is None else tuple(read_files(proxy, time.time())),
        )  # fmt: skip


def read_files(proxy: Proxy, now: float) -> Iterator[FileState]:
    """Each as the daemon reads it at its start, by this user. `now`: seconds since the epoch."""
    readers: list[tuple[str, str | None, Callable[[], Iterable[WatchedFile[Any]]]]] = [
        (
            "TLS certificate", proxy.tls_certificate,
            lambda: ServerTls(str(proxy.tls_certificate), proxy.tls_key).files,
        ),
        ("API keys", proxy.api_keys_file, lambda: ApiKeys(proxy.api_keys_file).files),
        *(
            (f"key of the overflow endpoint {each.endpoint}", each.api_key_file, partial(watched_key, each))
            for each in proxy.overflow
        ),
    ]  # fmt: skip
    for what, path, read in readers:
        if path is None:
            continue
        try:
            yield from (file.state() for file in read())
        except LauncherError as error:
            yield unusable(what, path, error, now)


def _measured_layout() -> str | None:
    try:
        found = recall(state_folder(None, os.environ, os.geteuid()))
    except LauncherError:  # a user without a home folder
        return None
    latest = max(found, key=lambda best: best.measured_at, default=None)
    if latest is None:
        return None
    what = latest.label if latest.different else "none differs from the default"
    return f"{latest.measured_at[:10]}: {what}"


def _binding(engine: Engine, topology: Topology) -> Binding | Trouble:
    nodes = CpuSet(node.id for node in topology.numa_nodes if node.memory_bytes) & topology.allowed_nodes
    try:
        return probe_binding(engine, topology.allowed, nodes if topology.has_numa else CpuSet())
    except TimedOutError:
        raise
    except LauncherError as error:
        return Trouble(error.message, error.remedy)


def find_software(engine: Engine) -> Installed:
    """The engine that `serve` would start, or why it cannot."""
    kind, stack, trouble = engine_type(engine.kind), None, None
    try:
        stack = kind.examined(probe_stack(engine), engine.env)
    except TimedOutError:
        raise
    except LauncherError as error:
        trouble = Trouble(error.message, error.remedy)
    if stack is not None:
        tcmalloc = stack.tcmalloc
    else:
        tcmalloc = find_tcmalloc("auto") if kind.preloads and engine.tcmalloc == "auto" else None
    return Installed(
        stack=stack, trouble=trouble, tcmalloc=tcmalloc, tcmalloc_off=engine.tcmalloc == "off",
        openmp=(*_own_openmp(stack), *_system_openmp()), compiler=find_compiler(COMPILERS) if kind.compiles else None,
    )  # fmt: skip


def _own_openmp(stack: Stack | None) -> tuple[str, ...]:
    """In the engine's Python environment: torch's, and those of pip or conda in lib."""
    if stack is None or stack.python is None:
        return ()
    prefix = Path(stack.python).parent.parent
    places = ("lib", "lib/python3*/site-packages/torch.libs", "lib/python3*/site-packages/torch/lib")
    return _openmp_in(prefix, places)


def _system_openmp() -> tuple[str, ...]:
    return _openmp_in(Path("/"), _OPENMP_DIRS)


def _openmp_in(base: Path, places: tuple[str, ...]) -> tuple[str, ...]:
    found = (path for place in places for name in _OPENMP for path in sorted(base.glob(f"{place}/{name}")))
    return tuple(
        str(path) for path in found if not path.is_symlink() or not path.resolve().is_relative_to(path.parent)
    )


def find_compiler(names: tuple[str, ...]) -> Compiler | None:
    for name in names:
        path = shutil.which(name)
        if path is None:
            continue
        try:
            done = subprocess.run(
                [path, "-dumpfullversion", "-dumpversion"],
                capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise timed_out(path, PROBE_TIMEOUT_S) from None
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.strip():
            return Compiler(path, done.stdout.split()[0])
    return None


def read_kernel(root: Path) -> Kernel:
    """Settings under `root`; each is None where the file is missing."""
    settings = read_settings(root)
    status = dict(line.partition(":")[::2] for line in _text(root / "proc/self/status").splitlines())
    seccomp, capabilities = status.get("Seccomp"), status.get("CapEff")
    return Kernel(
        hugepages=settings.transparent_hugepages,
        numa_balancing=settings.numa_balancing,
        governors=settings.governors,
        seccomp=None if seccomp is None else seccomp.strip() != "0",
        sys_nice=None if capabilities is None else bool(int(capabilities, 16) >> _CAP_SYS_NICE & 1),
        container=_container(root),
    )


def _container(root: Path) -> str | None:
    """From the marker files of systemd and container engines (systemd-detect-virt(1))."""
    named = _text(root / "run/systemd/container").strip()
    if named:
        return named
    for mark, name in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if (root / mark).exists():
            return name
    environ = _text(root / "proc/1/environ").split("\0")
    return next(
        (entry.removeprefix("container=") for entry in environ if entry.startswith("container=")), None
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
