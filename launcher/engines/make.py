"""The kinds of engines, and the Engine of a configuration. Reads the token file and finds local models."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from launcher.base.errors import AWAY, LauncherError, PassingError, reason
from launcher.config.schema import Config, EngineKind, Runtime
from launcher.config.schema import Engine as EngineConfig
from launcher.engines import checks, command
from launcher.engines.base import Asking, Engine
from launcher.engines.checks import Check
from launcher.engines.command import LOOPBACK, CommandEngine, placeholders
from launcher.engines.containers import ContainedEngine, Volume, Wrapping
from launcher.engines.numactl import Binding, MemPolicy
from launcher.engines.software import Stack, find_program, find_tcmalloc, probe_image
from launcher.engines.vllm import arguments, installed, needs, rules_model
from launcher.engines.vllm import checks as vllm_checks
from launcher.engines.vllm import planning as vllm
from launcher.engines.vllm.launch import VllmEngine
from launcher.models.identity import model_files
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
    return ContainedEngine(engine, _wrapping(config, stack, binding, socket_dir))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
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


def _probe_command(engine: EngineConfig) -> Stack:
    """A custom server gets an allocator only when its path is configured."""
    tcmalloc = None if engine.tcmalloc == "auto" else find_tcmalloc(engine.tcmalloc)
    return Stack(command=(find_program(engine.command[0]), *engine.command[1:]), tcmalloc=tcmalloc)


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


def _wait_for_models(config: Config) -> None:
    """A path that is not there would end the server, again and again."""
    engine = config.engine
    if engine.runtime is not Runtime.HOST or "model" not in placeholders((*engine.command, *engine.args)):
        return
    for model in config.models:
        if Path(model.path).expanduser().is_absolute():
            try:
                model_files(model.path)
            except PassingError:
                raise
            except LauncherError:  # its own user may be able to read it
                continue


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineType:
    """One kind of engine: what else differs between kinds, beside a running engine's own (`Engine`)."""

    planning: Planning
    make: Callable[[Config, Parts], Engine]
    """An engine whose instances run on the host. Raises LauncherError for a configuration that it cannot use."""
    is_local: Callable[[Path], bool] = Path.exists
    """Whether a model's path is one on this host that the engine reads."""
    title: Callable[[EngineConfig], str] = lambda engine: Path(engine.command[0]).name
    """Its name in a measurement."""
    probe: Callable[[EngineConfig], Stack] = _probe_command
    """The software on this host. Raises LauncherError when it cannot be started."""
    preloads: bool = False
    """engine.tcmalloc = "auto" searches for the allocator."""
    checks: Callable[[], tuple[Check, ...]] = lambda: (checks.command,)
    """The checks of `doctor` on its software."""
    require_models: Callable[[Config], None] = _wait_for_models
    """Raises PassingError for a model that is not there yet. Those with profiles are looked for when these are read."""
    profiles: Callable[[Config, Read], dict[str, ModelProfile]] = _no_profiles
    """Profiles of the models whose files are here, by name. Raises LauncherError for one that cannot be read, PassingError
    where it may come by itself."""
    answered: Callable[
        [Config, Mapping[str, ModelProfile], Stack, frozenset[str], Asking],
        Mapping[str, ModelProfile],
    ] = _unasked
    """Profiles with the engine's own figures, as needs.answered."""
    facts: Callable[[Stack, Config, Mapping[str, str]], Mapping[str, str]] = (
        lambda _stack, _config, _environ: {}
    )
    """What its rules want to know of software and environment variables (`plan.Facts.engine`)."""
    has_answers: Callable[[], bool] = lambda: False
    """Whether it was asked what models need, by this user."""
    doubts: Callable[[str, ModelProfile], Iterator[Finding]] = _no_doubts
    """The reasons against a start of a model, by its name and answered profile."""
    overriding: Callable[[Sequence[str], Iterable[str]], tuple[int, ...]] = lambda _args, _keys: ()
    """Indices of the words of engine.args that override these keys of [[models]]."""


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


TYPES: Final[dict[EngineKind, EngineType]] = {
    EngineKind.VLLM: EngineType(
        planning=vllm.PLANNING, make=_make_vllm, is_local=Path.is_dir, title=lambda _: "vllm", probe=installed.probe,
        preloads=True, checks=vllm_checks.checks, require_models=lambda _: None, profiles=needs.read_profiles,
        answered=needs.answered, has_answers=needs.has_answers, doubts=rules_model.doubts_of,
        overriding=arguments.overriding, facts=vllm.facts_of,
    ),
    EngineKind.COMMAND: EngineType(planning=command.PLANNING, make=_make_command),
}  # fmt: skip


def engine_type(kind: str) -> EngineType:
    """The engines of a kind, by its name in the configuration."""
    return TYPES[EngineKind(kind)]


def probe_stack(engine: EngineConfig) -> Stack:
    """The software behind `[engine]`. Raises LauncherError when it cannot be started."""
    return engine_type(engine.kind).probe(engine) if engine.runtime is Runtime.HOST else probe_image(engine)


def _wrapping(config: Config, stack: Stack, binding: Binding, socket_dir: str) -> Wrapping:
    """All files of an instance have the same paths inside the container."""
    engine, local_models, env = config.engine, _local_models(config), dict[str, str]()
    shared: list[str] = []
    if engine.kind is EngineKind.VLLM:
        shared.append(str(cache_dir(engine.cache_dir)))
        if any(model.path not in local_models for model in config.models):
            # Where this host downloads models to (huggingface_hub/constants.py).
            usual = os.environ.get("HF_HOME") or str(Path.home() / ".cache/huggingface")
            env["HF_HOME"] = engine.env.get("HF_HOME") or usual
            shared.append(env["HF_HOME"])
    volumes = [Volume(path) for path in _model_folders(local_models.values(), shared)]
    volumes += [Volume(path, writable=True) for path in shared]
    return Wrapping(
        runtime=engine.runtime, client=stack.client or engine.runtime.value, image=engine.image or "",
        socket_dir=socket_dir, binds_memory=binding.policy is MemPolicy.MEMBIND, args=engine.runtime_args,
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
