"""Each line that tests/support/planted_faults.py takes out is there once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.planted_faults import FAULTS, ROOT, Fault, plant


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.module)
def test_the_line_is_there(tmp_path: Path, fault: Fault) -> None:
    copy = tmp_path / "launcher" / fault.module
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / "launcher" / fault.module, copy)
    plant(tmp_path, fault)
    assert copy.read_text() != (ROOT / "launcher" / fault.module).read_text()
    assert all((ROOT / tests).is_dir() for tests in fault.tests)
