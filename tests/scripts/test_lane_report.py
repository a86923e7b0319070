"""scripts/lane_report.py: a test that passes when it runs again is flaky, a skip needs a reason that is accepted."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "lane_report.py"
TESTS = """
import pathlib
import pytest

def test_good(): pass
def test_bad(): assert False
def test_once():
    tried = pathlib.Path(__file__).with_name("tried")
    again = tried.exists()
    tried.touch()
    assert again
def test_gives_up():
    tried = pathlib.Path(__file__).with_name("given up")
    if tried.exists():
        pytest.skip("this machine is tired")
    tried.touch()
    assert False
@pytest.mark.skip("this machine has no wings")
def test_wings(): pass
@pytest.mark.skip("tomorrow")
def test_lazy(): pass
@pytest.fixture
def dirty():
    yield
    assert False
def test_torn(dirty): pass
"""


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lane_report", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(folder: Path, out: str, *arguments: str) -> None:
    """pytest on TESTS, as scripts/test starts it."""
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-o", "junit_family=xunit2", "--rootdir", str(folder),
         "-o", f"cache_dir={folder}/cache", *arguments, f"--junit-xml={folder}/{out}", "test_some.py"],
        check=False, cwd=folder, capture_output=True, timeout=120,
    )  # fmt: skip


def test_a_run_is_judged_by_name(tmp_path: Path, report: ModuleType) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    run(tmp_path, "unit.xml")
    assert report.judge(tmp_path).failed == 4
    run(tmp_path, "unit.again.xml", "--last-failed")
    found = report.judge(tmp_path)
    assert (found.passed, found.failed) == (2, 3)
    assert found.flaky == ("unit: test_some::test_once",)
    assert [test for test, _ in found.skipped] == [
        "unit: test_some::test_wings",
        "unit: test_some::test_lazy",
    ]
    assert found.unexplained == ("unit: test_some::test_lazy",)
    assert not found.ok
    told = list(report.lines(found))
    assert "flaky: unit: test_some::test_once" in told
    assert told[-1] == "2 passed, 3 failed, 2 skipped, 1 flaky"


@pytest.mark.parametrize(("flaky", "ok"), [(3, True), (4, False)])
def test_more_than_three_flaky_tests_fail_a_run(report: ModuleType, flaky: int, ok: bool) -> None:
    names = tuple(f"unit: test_{n}" for n in range(flaky))
    assert report.Report(passed=9, failed=0, flaky=names, skipped=(), unexplained=()).ok is ok


def test_a_users_skip_for_lack_of_root_is_accepted_of_users_only(tmp_path: Path, report: ModuleType) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n@pytest.mark.skip('only root can')\ndef test_root(): pass\n"
    )
    run(tmp_path, "unit.xml")
    assert not report.judge(tmp_path).ok
    assert report.judge(tmp_path, report.ACCEPTED_OF_USERS).ok
