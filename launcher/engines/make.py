"""The kinds of engines, and the Engine of a configuration. Reads the token file and finds local models."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from launcher.base.errors import AWAY, LauncherError, PassingError, reason
from launcher.config.schema import Config, EngineKind, Runtime
from launcher.config.schema import Engine as EngineConfig
from launcher.engines import checks, command
from launcher.engines.base import Asking, Engine
from launcher.engines.checks import Check
from launcher.engines.command import LOOPBACK, CommandEngine
from launcher.engines.containers import ContainedEngine, Volume, Wrapping
from launcher.engines.llama_cpp import arguments as llama_arguments
from launcher.engines.llama_cpp import build as llama_build
from launcher.engines.llama_cpp import launch as llama_cpp
from launcher.engines.llama_cpp import planning as llama_planning
from launcher.engines.numactl import Binding, MemPolicy
from launcher.engines.software import Stack, probe_image
from launcher.engines.vllm import arguments, installed, needs, rules_model
from launcher.engines.vllm import planning as vllm
from launcher.engines.vllm.launch import VllmEngine
from launcher.models.profile import ModelProfile
from launcher.models.weight_files import Read
from launcher.plan.plan import Finding, Planning

# sockaddr_un.sun_path is 108 bytes with its NUL.
MAX_SOCKET_PATH: Final = 107
_LONGEST_SOCKET_NAME: Final = "slot9999-999999.sock"


def make_engine(
    config: Config, stack: Stack, binding: Binding, run_dir: Path, free_port: Callable[[], int] | None = None
) -> Engine:
    """The configured engine, with instances' sockets in `run_dir`.

    Raises LauncherError for an unreadable token file, an invalid command template, and a `run_dir` too long for UNIX
    sockets."""
    socket_dir = str(run_dir.absolute())
    _check_socket_dir(socket_dir)
    preload = _preload(stack.tcmalloc) if config.engine.runtime is Runtime.HOST else stack.tcmalloc
    token_file = config.engine.hf_token_file
    parts = Parts(
        stack=stack, binding=binding, socket_dir=socket_dir, free_port=free_port or free_loopback_port, preload=preload,
        hf_token=None if token_file is None else read_token(Path(token_file)), local_models=_local_models(config),
    )  # fmt: skip
    engine = TYPES[config.engine.kind].make(config, parts)
    if config.engine.runtime is Runtime.HOST:
        return engine
    return ContainedEngine(engine, _wrapping(config, parts))


class Parts(Struct, frozen=True, kw_only=True):
    """The parts of an engine, beside its configuration."""

    stack: Stack
    binding: Binding
    socket_dir: str
    """The folder of the instances' sockets."""
    free_port: Callable[[], int]
    preload: str | None
    """LD_PRELOAD of the instances."""
    hf_token: str | None
    local_models: Mapping[str, str]
    """`path` of each model that is here, to its absolute path."""


def _no_profiles(_config: Config, _read: Read) -> dict[str, ModelProfile]:
    return {}


def _unasked(
    _config: Config,
    profiles: Mapping[str, ModelProfile],
    _stack: Stack,
    _flags: frozenset[str],
    _asking: Asking,
) -> Mapping[str, ModelProfile]:
    return profiles


def _no_doubts(_name: str, _profile: ModelProfile) -> Iterator[Finding]:
    return iter(())


Shared = tuple[tuple[str, ...], Mapping[str, str]]
"""Folders of this host, and variables that name them."""


class EngineType(Struct, frozen=True, kw_only=True):
    """One kind of engine: everything in which kinds differ before an engine is made. `Engine` has the rest."""

    title: Callable[[EngineConfig], str]
    """The engine's name in a measurement."""
    planning: Planning
    probe: Callable[[EngineConfig], Stack]
    """Finds its software on this host. Raises LauncherError when it cannot be started."""
    examined: Callable[[Stack, Mapping[str, str]], Stack] = lambda stack, _env: stack
    """Adds what only `doctor` asks the software for."""
    make: Callable[[Config, Parts], Engine]
    """Makes the engine whose instances run on the host. Raises LauncherError for a configuration that it cannot use."""
    checks: Callable[[], tuple[Check, ...]] = lambda: ()
    """The checks of `doctor` on its software."""
    preloads: bool = False
    """engine.tcmalloc = "auto" searches for the allocator."""
    reads_gguf: bool = False
    """It reads models in GGUF and in no other format."""
    compiles: bool = False
    """Its instances need a C++ compiler."""
    is_local: Callable[[Path], bool] = Path.exists
    """Whether a model's path is one on this host that the engine reads."""
    shared: Callable[[Config, Parts], Shared] = lambda _config, _parts: ((), {})
    """The folders that instances in containers may write to, beside their sockets."""
    require_models: Callable[[Config], None] = lambda _config: None
    """Raises PassingError for a model that is not there yet. Nothing for an engine whose `profiles` raise it."""
    profiles: Callable[[Config, Read], dict[str, ModelProfile]] = _no_profiles
    """Profiles of the models whose files are here, by name. Raises LauncherError for one that cannot be read, PassingError
    where it may come by itself."""
    has_answers: Callable[[], bool] = lambda: False
    """Whether the engine was asked what models need, by this user."""
    answered: Callable[
        [Config, Mapping[str, ModelProfile], Stack, frozenset[str], Asking],
        Mapping[str, ModelProfile],
    ] = _unasked
    """Profiles with the engine's own figures: kept answers, and new ones if it is to be asked."""
    doubts: Callable[[str, ModelProfile], Iterator[Finding]] = _no_doubts
    """The reasons against a start of a model, by its name and profile."""
    facts: Callable[[Stack, Config, Mapping[str, str]], Mapping[str, str]] = (
        lambda _stack, _config, _environ: {}
    )
    """Versions and environment variables that its rules judge (`plan.Facts.engine`)."""
    overriding: Callable[[Sequence[str], Iterable[str]], tuple[int, ...]] = lambda _args, _keys: ()
    """Indices of the words of engine.args that override these keys of [[models]]."""
    has_stacks: bool = False
    """`tune --stack` can begin at a configuration of it."""


def _make_vllm(config: Config, parts: Parts) -> VllmEngine:
    engine = config.engine
    return VllmEngine(
        stack=parts.stack, binding=parts.binding, socket_dir=parts.socket_dir, cache_dir=str(cache_dir(engine.cache_dir)),
        args=engine.args, user_env=engine.env, ld_preload=parts.preload, hf_token=parts.hf_token, models=config.models,
        local_models=parts.local_models, health_path=engine.health_path, stop_timeout_s=config.supervision.stop_timeout_s,
        ready_timeout_s=config.supervision.ready_timeout_s, tells_cached_tokens=config.usage.enabled,
    )  # fmt: skip


def _make_command(config: Config, parts: Parts) -> CommandEngine:
    engine = config.engine
    return CommandEngine(
        template=(*parts.stack.command, *engine.args), binding=parts.binding, socket_dir=parts.socket_dir,
        free_port=parts.free_port, user_env=engine.env, ld_preload=parts.preload, hf_token=parts.hf_token,
        local_models=parts.local_models, health_path=engine.health_path,
    )  # fmt: skip


def _make_llama_cpp(config: Config, parts: Parts) -> llama_cpp.LlamaCppEngine:
    engine = config.engine
    llama_cpp.check_config(config)
    return llama_cpp.LlamaCppEngine(
        command=parts.stack.command, binding=parts.binding, socket_dir=parts.socket_dir, args=engine.args,
        user_env=engine.env, ld_preload=parts.preload, files=llama_cpp.first_files(config),
        health_path=engine.health_path,
    )  # fmt: skip


def _vllm_checks() -> tuple[Check, ...]:
    from importlib import resources  # noqa: PLC0415  heavy

    from launcher.engines.vllm.checks import Matrix, checks_by  # noqa: PLC0415  heavy

    text = (resources.files("launcher.engines.vllm") / "compatibility.toml").read_text(encoding="utf-8")
    return checks_by(Matrix.parse(text))


def _vllm_shared(config: Config, parts: Parts) -> Shared:
    """The compile caches; and the folder of downloads, of which a repository id needs one."""
    caches = str(cache_dir(config.engine.cache_dir))
    if all(model.path in parts.local_models for model in config.models):
        return (caches,), {}
    # This host's folder of downloads (huggingface_hub/constants.py).
    usual = os.environ.get("HF_HOME") or str(Path.home() / ".cache/huggingface")
    downloads = config.engine.env.get("HF_HOME") or usual
    return (caches, downloads), {"HF_HOME": downloads}


TYPES: Final[dict[EngineKind, EngineType]] = {
    EngineKind.VLLM: EngineType(
        title=lambda _engine: "vllm", planning=vllm.PLANNING, probe=installed.probe, make=_make_vllm, checks=_vllm_checks,
        preloads=True, compiles=True, is_local=Path.is_dir, shared=_vllm_shared, profiles=needs.read_profiles,
        has_answers=needs.has_answers, answered=needs.answered, doubts=rules_model.doubts_of, facts=vllm.facts_of,
        overriding=arguments.overriding, has_stacks=True,
    ),
    EngineKind.LLAMA_CPP: EngineType(
        title=lambda _engine: "llama.cpp", planning=llama_planning.PLANNING, probe=llama_cpp.probe, make=_make_llama_cpp,
        reads_gguf=True,
        checks=lambda: (llama_cpp.checks,), examined=llama_build.examined, profiles=llama_cpp.read_profiles,
        overriding=llama_arguments.overriding,
    ),
    EngineKind.COMMAND: EngineType(
        title=lambda engine: Path(engine.command[0]).name, planning=command.PLANNING, probe=command.probe,
        make=_make_command, checks=lambda: (checks.command,), require_models=command.require_models,
    ),
}  # fmt: skip


def engine_type(kind: str) -> EngineType:
    """The engines of a kind, by its name in the configuration. Raises ValueError for a name that is none."""
    return TYPES[EngineKind(kind)]


def as_llama_cpp(config: Config, gguf: str) -> Config:
    """The configuration with llama.cpp as its engine, wherever it is found, and the file `gguf` as its only model.

    Arguments and variables of the engine before are left out, and the keys of [[models]] that llama.cpp cannot follow."""
    [model] = config.models
    return replace(
        config,
        engine=replace(config.engine, kind=EngineKind.LLAMA_CPP, command=(), args=(), env={}),
        models=(replace(model, path=gguf, dtype="auto", quantization=None, tensor_parallel_size=1),),
    )


def probe_stack(engine: EngineConfig) -> Stack:
    """The software behind `[engine]`. Raises LauncherError when it cannot be started."""
    return engine_type(engine.kind).probe(engine) if engine.runtime is Runtime.HOST else probe_image(engine)


def _wrapping(config: Config, parts: Parts) -> Wrapping:
    """All files of an instance have the same paths inside the container."""
    engine = config.engine
    shared, env = TYPES[engine.kind].shared(config, parts)
    volumes = [Volume(path) for path in _model_folders(parts.local_models.values(), shared)]
    volumes += [Volume(path, writable=True) for path in shared]
    return Wrapping(
        runtime=engine.runtime, client=parts.stack.client or engine.runtime.value, image=engine.image or "",
        socket_dir=parts.socket_dir, binds_memory=parts.binding.policy is MemPolicy.MEMBIND, args=engine.runtime_args,
        volumes=tuple(volumes), env=env,
    )  # fmt: skip


def _model_folders(paths: Iterable[str], shared: Iterable[str]) -> list[str]:
    """The models and the targets of their symbolic links: the hub's snapshots are links to a folder of blobs.

    Not those in `shared`, which all instances may write to: they are there already, and a link in them, or in place of the
    folder, may be an instance's own, to a folder of root."""
    places = {place for each in map(Path, shared) for place in (each, each.resolve())}
    found = set[Path]()
    for path in map(Path, paths):
        if _is_in(path, places):
            continue
        found.add(path)
        if path.is_dir() and not _is_in(path.resolve(), places):
            targets = (file.resolve().parent for file in path.iterdir() if file.is_symlink())
            found |= {target for target in targets if not _is_in(target, places)}
    return sorted(str(path) for path in found if not any(parent in found for parent in path.parents))


def _is_in(path: Path, places: Iterable[Path]) -> bool:
    return any(path.is_relative_to(place) for place in places)


def free_loopback_port() -> int:
    """A loopback port that is currently free, but not reserved: see CommandEngine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def cache_dir(configured: str | None) -> Path:
    """The folder of compile caches: as configured, $CACHE_DIRECTORY (systemd), /var/cache for root, ~/.cache."""
    if configured is not None:
        return Path(configured).expanduser().absolute()
    if from_systemd := os.environ.get("CACHE_DIRECTORY"):
        return Path(from_systemd.split(":")[0])
    if os.geteuid() == 0:
        return Path("/var/cache/numa-launcher")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "numa-launcher"


def read_token(path: Path) -> str:
    """The Hugging Face token in a file. Raises LauncherError, PassingError where the file may come by itself, without
    the token."""
    try:
        token = path.expanduser().read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is not UTF-8 text"
        kind = PassingError if isinstance(error, OSError) and error.errno in AWAY else LauncherError
        raise kind(
            f"cannot read engine.hf_token_file {str(path)!r}: {why}",
            "write the token to this file, readable by this user",
        ) from error
    if not token or len(token.split()) != 1:
        raise LauncherError(
            f"cannot use engine.hf_token_file {str(path)!r}: it must contain exactly one token",
            "write a token from huggingface.co/settings/tokens to this file",
        )
    return token


def _local_models(config: Config) -> dict[str, str]:
    is_local = TYPES[config.engine.kind].is_local
    paths = ((model.path, Path(model.path).expanduser()) for model in config.models)
    return {text: str(path.absolute()) for text, path in paths if is_local(path)}


def _preload(tcmalloc: str | None) -> str | None:
    """Libraries that are preloaded already stay, such as an operator's profiler or OpenMP runtime."""
    inherited = os.environ.get("LD_PRELOAD", "")
    if tcmalloc is None or "tcmalloc" in inherited:
        return None
    return f"{tcmalloc}:{inherited}" if inherited else tcmalloc


def _check_socket_dir(socket_dir: str) -> None:
    length = len(os.fsencode(f"{socket_dir}/{_LONGEST_SOCKET_NAME}"))
    if length > MAX_SOCKET_PATH:
        raise LauncherError(
            f"cannot put instances' sockets in {socket_dir!r}: their paths would have {length} bytes, "
            f"but UNIX sockets allow {MAX_SOCKET_PATH}",
            "choose a shorter directory, for example /run/numa-launcher",
        )
