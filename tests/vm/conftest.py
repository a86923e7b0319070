"""One boot per layout: scripts in the guest record facts, the tests judge them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vm.bytecode import add_bytecode
from vm.image import ROOT
from vm.vm import LAYOUTS, run

GUEST = Path(__file__).parent / "guest"
# One boot takes 3 to 9 minutes on two idle cores, several times that on busy ones. A guest
# that hangs is stopped here; the time of each is printed.
GUEST_TIMEOUT_S = 5400.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.host)
            # Building the image and booting happen in the first test's fixture.
            item.add_marker(pytest.mark.timeout(7200))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built in another folder."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "launcher", source / "launcher", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)],
        check=True, timeout=600,
    )  # fmt: skip
    (found,) = folder.glob("*.whl")
    add_bytecode(found)
    return found


@pytest.fixture(scope="session")
def record(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The facts that guest/oncall.py recorded, with every request of the load."""
    folder = tmp_path_factory.mktemp("oncall")
    repo, tests = folder / "repo", ROOT / "tests"
    for name in ("scripts", "systemd", "configs"):
        shutil.copytree(ROOT / name, repo / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(tests / "support", folder / "support", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "instances").mkdir()
    for name in ("conftest.py", "test_spawner_contract.py"):
        shutil.copy(tests / "instances" / name, folder / "instances")
    files = [wheel, tests / "conftest.py", ROOT / "pyproject.toml"]
    files += [GUEST / name for name in ("notes.py", "load.py", "contract")]
    facts = recorded("oncall", "nps2", folder, files)
    facts["load"] = [json.loads(line) for line in (folder / "load.jsonl").read_text().splitlines()]
    return facts


@pytest.fixture(scope="module", params=["nps4", "cxl"])
def facts(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The facts that guest/observe.py recorded on a host of that layout."""
    found = of_units("observe", wheel, tmp_path_factory, "remember.py", layout=request.param)
    return found | {"layout": request.param}


@pytest.fixture(scope="module")
def caches(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The facts that guest/caches.py recorded about compile caches under the shipped units."""
    return of_units("caches", wheel, tmp_path_factory, "stand_in_vllm.py")


@pytest.fixture(scope="module", params=[pytest.param("2s8", marks=pytest.mark.release), "nps2"])
def ranks(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The facts that guest/ranks.py recorded about an instance with a rank on each node of that layout."""
    return of_units("ranks", wheel, tmp_path_factory, "ranked_vllm.py", layout=request.param)


@pytest.fixture(scope="module")
def tuned(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The facts that guest/tune.py recorded about a tuning run beside the service."""
    return of_units("tune", wheel, tmp_path_factory)


@pytest.fixture(scope="module")
def dashboard(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The facts that guest/dashboard.py recorded about the dashboard's unit."""
    return of_units("dashboard", wheel, tmp_path_factory)


@pytest.fixture(scope="module")
def late(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The facts that guest/late.py recorded about a mount and an address that come after the start."""
    return of_units("late", wheel, tmp_path_factory)


@pytest.fixture(scope="module")
def ingress(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The facts that guest/ingress.py recorded about the unit of a fleet's ingress."""
    return of_units("ingress", wheel, tmp_path_factory)


def of_units(
    script: str, wheel: Path, folders: pytest.TempPathFactory, *more: str, layout: str = "2s8"
) -> dict[str, Any]:
    """The facts that a script of guest/ recorded on a host with the shipped units; `more`: files of guest/ that it needs."""
    guest = [GUEST / name for name in ("notes.py", "units.py", *more)]
    files = [wheel, ROOT / "tests" / "support" / "fake_engine.py", *guest, *(ROOT / "systemd").iterdir()]
    return recorded(script, layout, folders.mktemp(script), files)


def recorded(script: str, layout: str, folder: Path, files: Sequence[Path]) -> dict[str, Any]:
    """The facts that a script of guest/ recorded on a host of that layout."""
    done = run(LAYOUTS[layout], GUEST / f"{script}.py", folder, timeout_s=GUEST_TIMEOUT_S, files=files)
    print(done.output)
    print(f"booted in {done.boot_s:.0f} s, {done.total_s:.0f} s in all; everything is in {folder}")
    assert done.status == 0, f"{done.output}\nsee {folder}/journal"
    found: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return found
