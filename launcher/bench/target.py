"""The endpoint under test, with what is known of the machine behind it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from launcher.bench.result import Software
from launcher.cpuset import CpuSet
from launcher.host.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An OpenAI endpoint. Of a foreign one only the first four are known."""

    url: str
    """Without /v1 and without a trailing slash."""
    model: str
    """As requests name it."""
    tokenizer: str | None = None
    """Folder of the model's tokenizer; None: `model`, as a repository id of the Hugging Face hub."""
    key: str | None = field(default=None, repr=False)
    """API key."""
    client_cpus: CpuSet | None = None
    """Where the load generator runs: the plan's reserved cpus. None: anywhere."""
    cores: int | None = None
    """Physical cores of all instances."""
    plan: dict[str, Any] | None = None
    picture_svg: str | None = None
    hardware: Hardware | None = None
    software: Software | None = None
