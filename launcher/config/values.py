"""Types of configuration keys: closed lists of words, and numbers within bounds."""

from __future__ import annotations

from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from msgspec import Meta, Struct


class Strategy(StrEnum):
    """How the cores of a zone are divided among instances."""

    INTERLEAVED = "interleaved"
    CONTIGUOUS = "contiguous"
    L3_ALIGNED = "l3-aligned"
    PER_NODE = "per-node"


class EngineKind(StrEnum):
    """The server that an instance runs."""

    VLLM = "vllm"
    LLAMA_CPP = "llama.cpp"
    COMMAND = "command"


class Runtime(StrEnum):
    """Where the processes of an instance run: on the host, or in a container started by one of these clients."""

    HOST = "host"
    PODMAN = "podman"
    DOCKER = "docker"


class Policy(StrEnum):
    """How the proxy chooses an instance for a request."""

    PREFIX_AWARE = "prefix-aware"
    LEAST_REQUESTS = "least-requests"
    ROUND_ROBIN = "round-robin"
    # Of earlier versions: they are read, and mean prefix-aware.
    LEAST_TOKENS = "least-tokens"
    SESSION = "session"


REMOVED_POLICIES: Final = frozenset({Policy.LEAST_TOKENS, Policy.SESSION})


class SpawnerKind(StrEnum):
    """Who starts instances: systemd as units of their own, or the daemon as its children."""

    AUTO = "auto"
    DIRECT = "direct"
    SYSTEMD = "systemd"


class LogFormat(StrEnum):
    """Format of log lines: journald fields under systemd, plain text otherwise."""

    AUTO = "auto"
    JOURNAL = "journal"
    TEXT = "text"


PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
# At most a year: event loops reject infinite timers.
Seconds = Annotated[float, Meta(gt=0, le=31_536_000)]


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every table of the file: frozen; an unknown key is an error."""


def doc(description: str, **bounds: Any) -> Meta:
    """The description of a key, as documentation and error messages show it, and the bounds of its value."""
    return Meta(description=description, **bounds)


def notes_of(kind: Any) -> list[Meta]:
    """What `doc` attached to a key's type."""
    return [note for note in getattr(kind, "__metadata__", ()) if isinstance(note, Meta)]


def unwrap(kind: Any) -> Any:
    """A key's type without its notes and without None."""
    if get_origin(kind) is Annotated:
        return unwrap(get_args(kind)[0])
    if get_origin(kind) in {Union, UnionType}:
        parts = [part for part in get_args(kind) if part is not NoneType]
        return unwrap(parts[0]) if len(parts) == 1 else kind
    return kind
