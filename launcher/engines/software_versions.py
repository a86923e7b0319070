"""The software an instance is made of: versions and what follows from them. No effects."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

Version = tuple[int, ...]

# vLLM pull request 24274; torch 2.10 and later use it unless told not to.
AOT_COMPILE_SINCE: Final[Version] = (0, 11, 1)
# vLLM pull request 34730.
SHUTDOWN_TIMEOUT_SINCE: Final[Version] = (0, 18, 0)
# From here on the CPU worker sizes its cache by --kv-cache-memory-bytes; before, only by whole GiB.
# Checked on 0.32; the variable works on every version, so older ones get the variable.
KV_CACHE_BYTES_SINCE: Final[Version] = (0, 18, 0)

_RELEASE: Final = re.compile(r"\d+(?:\.\d+)*", re.ASCII)


def parse_release(version: str) -> Version:
    """The release part of a version: "2.13.0+cpu" is (2, 13, 0). Empty when there is none."""
    match = _RELEASE.match(version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


@dataclass(frozen=True, slots=True)
class Stack:
    """What was found for one `[engine]` table. A version is None when it can't be told without running it."""

    command: tuple[str, ...]
    """engine.command, its first word an absolute path."""
    python: str | None = None
    """Interpreter that runs the command."""
    vllm: str | None = None
    torch: str | None = None
    zentorch: str | None = None
    tcmalloc: str | None = None
    """Path of libtcmalloc_minimal, None when it is off or not found."""
    client: str | None = None
    """Path of podman or docker, where instances run in containers."""
    image: str | None = None
    """Id of the image, which names its content; `command` lies inside it."""
    warnings: tuple[str, ...] = ()
    """Plain statements, each worth saying once."""

    def has(self, since: Version) -> bool:
        """Whether vLLM is at least `since`. A vLLM of unknown version counts as new."""
        return self.vllm is None or parse_release(self.vllm) >= since

    @property
    def fingerprint(self) -> str:
        """Names the compile caches: code compiled for one stack must not meet another."""
        parts = (
            ("vllm", self.vllm),
            ("torch", self.torch),
            ("zentorch", self.zentorch),
            ("image", self.image and self.image.removeprefix("sha256:")[:12]),
        )
        return "-".join(f"{name}{version}" for name, version in parts if version) or "unknown"


def zentorch_mismatch(torch: str | None, zentorch: str | None) -> str | None:
    """A warning when zentorch is not the build for this torch: its number starts with its torch's."""
    if torch is None or zentorch is None:
        return None
    wanted, built_for = parse_release(torch)[:3], parse_release(zentorch)[:3]
    if wanted == built_for:
        return None
    return (
        f"zentorch {zentorch} is built for torch {'.'.join(map(str, built_for))}, but torch {torch} "
        "is installed: vLLM will run without ZenTorch"
    )
