"""What a key of the configuration may hold: the words of closed lists, and numbers within bounds."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct


class Strategy(StrEnum):
    """How a socket's cores are cut into instances."""

    INTERLEAVED = "interleaved"
    CONTIGUOUS = "contiguous"
    L3_ALIGNED = "l3-aligned"
    PER_NODE = "per-node"


class EngineKind(StrEnum):
    """What an instance runs."""

    VLLM = "vllm"
    COMMAND = "command"


class Runtime(StrEnum):
    """Where an instance's processes live: on the host, or in a container that one of these clients starts."""

    HOST = "host"
    PODMAN = "podman"
    DOCKER = "docker"


class Policy(StrEnum):
    """How the proxy picks an instance for a request."""

    PREFIX_AWARE = "prefix-aware"
    LEAST_TOKENS = "least-tokens"
    LEAST_REQUESTS = "least-requests"
    ROUND_ROBIN = "round-robin"
    SESSION = "session"


class SpawnerKind(StrEnum):
    """Who starts instances: systemd as units of their own, or the daemon as its children."""

    AUTO = "auto"
    DIRECT = "direct"
    SYSTEMD = "systemd"


class LogFormat(StrEnum):
    """Where log lines go: journald with fields under systemd, readable lines otherwise."""

    AUTO = "auto"
    JOURNAL = "journal"
    TEXT = "text"


PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
# A year: event loops can't take an infinite timer, and "for ever" is not what an operator wants at 3 a.m.
Seconds = Annotated[float, Meta(gt=0, le=31_536_000)]


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every table of the file: frozen, and a misspelt key is an error."""
