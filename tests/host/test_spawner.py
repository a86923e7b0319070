"""systemd's units keep the contract of a Spawner: tests/instances/test_spawner_contract.py, in a virtual host."""

from __future__ import annotations

import shutil
from pathlib import Path

from host.image import ROOT
from host.vm import LAYOUTS, run

SCRIPT = """#!/bin/bash
mkdir /root/tests && cp -r fakes.py conftest.py pyproject.toml instances /root/tests/
python -m zipfile --extract *.whl "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
cd /root/tests || exit
NUMA_LAUNCHER_TEST_SPAWNER=systemd PYTHONPATH=. python -m pytest -q -p no:cacheprovider -c pyproject.toml \\
  --basetemp=/run/contract instances/test_spawner_contract.py
"""
TESTS = ROOT / "tests"


def test_the_contract_holds_for_units(wheel: Path, tmp_path: Path) -> None:
    script, work = tmp_path / "script", tmp_path / "work"
    script.write_text(SCRIPT)
    (work / "instances").mkdir(parents=True)
    for name in ("conftest.py", "test_spawner_contract.py"):
        shutil.copy(TESTS / "instances" / name, work / "instances")
    files = [wheel, TESTS / "fakes.py", TESTS / "conftest.py", ROOT / "pyproject.toml"]
    done = run(LAYOUTS["2s8"], script, work, timeout_s=900, files=files)
    assert done.status == 0, done.output
    assert " passed" in done.output
    assert "skipped" not in done.output
