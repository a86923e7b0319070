"""The Engine protocol: what to start, and how to reach it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from launcher.base.address import Address
from launcher.base.redaction import MASK, hides, is_secret_name, masked_arguments
from launcher.models.identity import ModelFiles
from launcher.plan.plan import Slot

MARK: Final = "NUMA_LAUNCHER_INSTANCE"
"""Environment variable with a unique value per generation, by which leftover processes are found."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container started by a client such as podman, outside of the client's process tree."""

    name: str
    command: tuple[str, ...]
    """Command inside the container."""
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


@dataclass(frozen=True, slots=True)
class Launch:
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

    @property
    def own_env(self) -> Mapping[str, str]:
        """Environment of `argv`: a container's client gets only the secrets, its arguments contain the rest."""
        if self.container is None:
            return self.env
        return {name: value for name, value in self.env.items() if name in self.secrets}


class Engine(Protocol):
    @property
    def wants_completion_probe(self) -> bool:
        """Whether readiness needs one real completion after the health path answers 200."""

    @property
    def health_path(self) -> str:
        """Path that answers 200 while the engine is healthy."""

    def launch(self, slot: Slot, generation: int) -> Launch:
        """What to start for a generation of a slot. Creates no files."""


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
