"""support/forked_run.py: pytest --processes N, by pytests of their own on small folders of tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

TESTS = Path(__file__).resolve().parents[1]
CONFTEST = """
import os
from pathlib import Path

import pytest
from support import forked_run


def pytest_addoption(parser):
    forked_run.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    return forked_run.run_tests(session)


@pytest.fixture(scope="session", autouse=True)
def begun():
    note = Path(__file__).parent / f"session.{os.getpid()}"
    note.write_text("begun")
    yield
    note.write_text("ended")
    assert not (Path(__file__).parent / "teardown-fails").exists()


@pytest.fixture(autouse=True)
def noted(request, tmp_path):
    import random

    with (Path(__file__).parent / "notes").open("a") as notes:
        notes.write(f"{request.node.name} {os.getpid()} {random.random()} {tmp_path}\\n")
"""
SLOW = "import time\nimport pytest\n@pytest.mark.parametrize('n', range(40))\ndef test_{0}(n): time.sleep(0.01)\n"


def run(folder: Path, *arguments: str, **files: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), *arguments,
         "--junit-xml", str(folder / "all.xml"), str(folder)],
        check=False, cwd=folder, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip


def noted(folder: Path) -> list[list[str]]:
    """Of each test that began: its name, its process, a random number, its folder."""
    return [line.split() for line in (folder / "notes").read_text().splitlines()]


def failed(folder: Path) -> dict[str, str]:
    return {
        case.get("name", ""): found.text or ""
        for case in ET.parse(folder / "all.xml").getroot().iter("testcase")  # noqa: S314  written by our own pytest
        for found in [*case.iter("failure"), *case.iter("error")]
    }


def test_each_test_runs_once_in_some_process(tmp_path: Path) -> None:
    done = run(tmp_path, "--processes", "3", a=SLOW.format("a"), b=SLOW.format("b"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "80 passed" in done.stdout
    names, pids, numbers, folders = zip(*noted(tmp_path), strict=True)
    assert sorted(names) == sorted(f"test_{file}[{n}]" for file in "ab" for n in range(40))
    assert len({*pids}) == 3
    assert len({*numbers}) == len({*folders}) == 80
    sessions = list(tmp_path.glob("session.*"))
    assert {file.suffix[1:] for file in sessions} == {*pids}
    assert {file.read_text() for file in sessions} == {"ended"}


def test_files_may_be_whole_and_begin_in_their_order(tmp_path: Path) -> None:
    done = run(tmp_path, "--processes", "2", "--whole-files", **{name: SLOW.format(name) for name in "abc"})
    assert done.returncode == 0, done.stdout + done.stderr
    processes = {
        name: {pid for test, pid, *_ in noted(tmp_path) if test.startswith(f"test_{name}")} for name in "abc"
    }
    assert all(len(pids) == 1 for pids in processes.values())
    assert processes["a"] != processes["b"]
    assert noted(tmp_path)[-1][0] == "test_c[39]"


FAULTS = """
import os
import pytest


@pytest.fixture
def broken():
    yield
    raise OSError("in a teardown")


def test_right(): print("not shown")
def test_wrong():
    print("shown")
    assert 1 == 2
def test_killed(): os.kill(os.getpid(), 9)
def test_after(): pass
def test_teardown(broken): pass
@pytest.mark.skip(reason="for this")
def test_skipped(): pass
"""


def test_failures_are_those_of_one_process(tmp_path: Path) -> None:
    """But for a test that ends its process: it fails, and those after it run."""
    done = run(tmp_path, "--processes", "2", faults=FAULTS, others=SLOW.format("a"))
    assert done.returncode == 1
    assert "2 failed, 43 passed, 1 skipped, 1 error" in done.stdout
    assert "Captured stdout call" in done.stdout
    assert "not shown" not in done.stdout
    found = failed(tmp_path)
    assert {*found} == {"test_wrong", "test_killed", "test_teardown"}
    assert "assert 1 == 2" in found["test_wrong"]
    assert found["test_killed"] == "its process ended, exit code -9"
    assert "in a teardown" in found["test_teardown"]
    assert len(noted(tmp_path)) == 45


def test_a_session_that_cannot_end_fails(tmp_path: Path) -> None:
    (tmp_path / "teardown-fails").touch()
    done = run(tmp_path, "--processes", "2", a=SLOW.format("a"))
    assert done.returncode == 1
    assert "a process ended with exit code 1" in done.stdout
    assert "teardown-fails" in done.stderr


def test_the_first_failure_may_end_it(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "--processes",
        "2",
        "-x",
        a="def test_wrong(): assert 0\n",
        b=SLOW.format("b"),
        c=SLOW.format("c"),
    )
    assert done.returncode != 0
    assert "stopping after 1 failures" in done.stdout
    assert len(noted(tmp_path)) < 81


@pytest.mark.parametrize("arguments", [(), ("--processes", "0"), ("--processes", "2", "-k", "nothing")])
def test_in_one_process(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run(tmp_path, *arguments, a=SLOW.format("a"))
    none = "nothing" in arguments
    assert done.returncode == (5 if none else 0), done.stdout + done.stderr
    if not none:
        assert len({pid for _, pid, *_ in noted(tmp_path)}) == 1
