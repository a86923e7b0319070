"""The Engine protocol: what to start, how to reach it, how to read it, and what its instances can do."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from launcher.base.address import Address, TcpAddress
from launcher.base.cpuset import CpuSet
from launcher.base.redaction import MASK, hides, is_secret_name, masked_arguments
from launcher.config.schema import Model
from launcher.engines.log import Accelerator, EngineLog
from launcher.models.identity import ModelFiles
from launcher.plan.plan import Slot

MARK: Final = "NUMA_LAUNCHER_INSTANCE"
"""Environment variable with a unique value per generation, by which leftover processes are found."""


class Container(Struct, frozen=True):
    """A container started by a client such as podman, outside of the client's process tree."""

    folders: tuple[str, ...]
    """Mounted; created on the host if missing."""
    last_word: tuple[str, ...]
    """Command that prints why a container exited, if it has something to report."""
    remove: tuple[str, ...]
    """Command that kills and removes the container; a missing one is not an error."""
    left_over: tuple[str, ...]
    """Command that prints the ids of this daemon's containers, one per line."""
    remove_ids: tuple[str, ...]
    """Command that kills and removes the containers whose ids are appended."""


class CompileCache(Struct, frozen=True):
    """The compile cache of one slot, below a folder of its own."""

    folder: str
    """The folder that code is compiled into; slots of one kind may share it while they start."""
    kind: str
    """Identifies what is compiled. Instances of the same kind can use each other's code."""
    compiles: bool = True
    """False where the engine is configured to compile nothing."""


class Expected(Struct, frozen=True):
    """Observations that the processes of a launch must show, beyond its placement."""

    binds_memory: bool = False
    """Memory is strictly bound to the slot's nodes."""
    omp_cpus: tuple[CpuSet, ...] = ()
    """One list per rank: on each cpu of it runs an OpenMP thread of the engine. Empty where none were asked for."""
    libraries: tuple[frozenset[str], ...] = ()
    """Alternatives: of each set some process maps one."""

    @property
    def while_starting(self) -> Expected:
        """An instance that loads has not yet mapped and bound everything."""
        return replace(self, omp_cpus=(), libraries=())


TCMALLOC: Final = frozenset({"libtcmalloc"})


def preloaded(env: Mapping[str, str]) -> tuple[frozenset[str], ...]:
    """The libraries that `env` preloads and a check should find, as in `Expected.libraries`."""
    return (TCMALLOC,) if "libtcmalloc" in env.get("LD_PRELOAD", "") else ()


class Unwanted(Struct, frozen=True):
    """Variables of the daemon's own environment that instances must not get. Operators set them in engine.env."""

    name: re.Pattern[str]
    """Matches the whole name."""
    value: re.Pattern[str] = re.compile("")
    """Found in the value."""
    warning: str = ""
    """For a person who may not know what the engine makes of it; {value} stands for it."""

    def fits(self, name: str, value: str) -> bool:
        return self.name.fullmatch(name) is not None and self.value.search(value) is not None


class Traits(Struct, frozen=True):
    """Abilities and defaults of one model's instances, for the proxy."""

    token_ids: bool = False
    """Streams tell the ids of their tokens where they are asked to."""
    adapters: tuple[str, ...] = ()
    """Names of LoRA adapters that are served beside the model."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters of requests that name none, by vLLM's names; MOST_TOKENS is a limit for all."""


MOST_TOKENS: Final = "most_tokens"
"""Name, in `Traits.sampling_defaults`, of a limit that no request may exceed."""


class Launch(Struct, frozen=True):
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Added to the daemon's environment. Values of `secrets` are never printed."""
    secrets: frozenset[str]
    """Names in `env` whose values are secret."""
    address: Address
    container: Container | None = None
    """Set when `argv` starts a container instead of the engine itself."""
    scratch: str | None = None
    """Folder for the engine's internal sockets, created and emptied before each start."""
    files: ModelFiles | None = None
    """The model's, which the engine reads by the path in `argv`; None: unknown."""
    cache: CompileCache | None = None
    """None for an engine that compiles nothing, or where it compiles elsewhere."""
    expected: Expected = Expected()
    unwanted: tuple[Unwanted, ...] = ()
    """Variables that are taken from the environment before `env` is added."""
    lenient: frozenset[str] = frozenset()
    """Options in `argv` and names in `env` whose new value a running instance need not be restarted for: it applies at
    the slot's next start."""
    planned: frozenset[str] = frozenset()
    """Names in `env` that say the placement again."""

    @property
    def settled(self) -> tuple[tuple[str, ...], Mapping[str, str]]:
        """`argv` and `env` as they tell two launches of a generation apart: without the number of a loopback port, which
        each launch chooses, and without what is `lenient`."""
        port = str(self.address.port) if isinstance(self.address, TcpAddress) else None
        argv, skip = [], False
        for word in self.argv:
            name = word.removeprefix("--env=").partition("=")[0]
            if not skip and name not in self.lenient:
                argv.append(word if port is None else word.replace(port, "{port}"))
            skip = not skip and word in self.lenient
        return tuple(argv), {name: value for name, value in self.env.items() if name not in self.lenient}

    @property
    def own_env(self) -> Mapping[str, str]:
        """Environment of `argv`: a container's client gets only the secrets, its arguments contain the rest."""
        if self.container is None:
            return self.env
        return {name: value for name, value in self.env.items() if name in self.secrets}


class Asking(Struct, frozen=True):
    """Whether the engine is asked what models need. Answers that are kept are used without asking."""

    limit_s: float = 0.0
    """Seconds for all questions together; 0: none is asked."""
    again: bool = False
    """Also questions that the engine did not answer before."""
    become: Callable[[], tuple[str, ...]] = tuple
    """Returns a command that runs the command after it as the instances' user; empty where this process is not root's.
    Called before the engine is asked."""


class Engine(Protocol):
    @property
    def wants_completion_probe(self) -> bool:
        """Whether readiness needs one real completion after the health path answers 200."""

    @property
    def health_path(self) -> str:
        """Path that answers 200 while the engine is healthy."""

    @property
    def log(self) -> EngineLog:
        """How its log is read."""

    @property
    def accelerator(self) -> Accelerator | None:
        """The library that it may compute with; None: there is none."""

    @property
    def unwanted(self) -> tuple[Unwanted, ...]:
        """As in each of its launches."""

    def launch(self, slot: Slot, generation: int) -> Launch:
        """What to start for a generation of a slot. Creates no files."""

    def traits(self, model: Model) -> Traits:
        """Abilities of the instances of `model`. Reads small files of the model's folder."""


# --- Environments of instances: secret names, and shell commands for a person. ---


def secret_names(env: Mapping[str, str]) -> frozenset[str]:
    """Names in `env` whose values must not be printed: all that are not known to be harmless, and of those a value that has
    the form of a secret, such as an http_proxy with a password."""
    return frozenset(name for name, value in env.items() if is_secret_name(name) or hides(name, value))


def shell_lines(launch: Launch, token_file: str | None = None) -> str:
    """Shell commands with the environment and command line of one instance.

    They first create its folder for sockets. The shell reads HF_TOKEN from `token_file`; other secrets must be in the
    shell's environment, those of arguments as SECRET_1, SECRET_2, ... Values of secrets never appear."""
    words = [] if launch.scratch is None else [f"mkdir -p {shlex.quote(launch.scratch)} &&"]
    for name, value in launch.own_env.items():
        if name not in launch.secrets:
            words.append(f"{name}={shlex.quote(value)}")
        elif name == "HF_TOKEN" and token_file is not None:
            words.append(f'{name}="$(cat {shlex.quote(token_file)})"')
        else:
            words.append(f'{name}="${{{name}:?set it first}}"')
    words.append(" ".join(_shell_words(launch.argv)))
    return " \\\n  ".join(words) + "\n"


def _shell_words(argv: Sequence[str]) -> Iterator[str]:
    count = 0
    for word, shown in zip(argv, masked_arguments(argv), strict=True):
        if word == shown:
            yield shlex.quote(word)
            continue
        first, *rest = (shlex.quote(part) if part else "" for part in shown.split(MASK))
        for part in rest:
            count += 1
            first += f'"${{SECRET_{count}:?set it first}}"{part}'
        yield first
