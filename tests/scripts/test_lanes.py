"""scripts/test: lanes in turn, some beside others; what fails is named. pytest and the installation are stand-ins."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIB = """
RUN_NEEDS= TEST_NEEDS= BROWSER_NEEDS= HOST_NEEDS= RELEASE_NEEDS=
python=$venv/bin/python
step() { printf '\\n==> %s\\n' "$*"; }
install_packages() { :; }
fetch_prometheus() { :; }
install_launcher() { echo "$*" >"$root/extras"; }
"""
# A lane's pytest: waits for a file where it is told to, says its name, and fails where it is told to.
PYTHON = """#!/usr/bin/env bash
[[ $1 != scripts/lane_report.py ]] || exec {python} "$@"
words="$*" name=${{words##*/}} name=${{name%%.xml*}}
echo "$words" >>"$NOTES.$name"
echo "begin $name" >>"$NOTES"
if [[ $name == "$WAITS" ]]; then until grep -qs "begin $FOR" "$NOTES"; do sleep 0.05; done; fi
echo "<testsuites><testcase classname='a' name='$name'/></testsuites>" >"${{words##* }}"
echo "pytest of $name"
[[ $name != "$FAILS" ]] || exit 2
[[ $name == "$FLAKY" ]] || exit 0
for word; do
  [[ $word != cache_dir=* ]] || {{ mkdir -p "${{word#*=}}/v/cache"; echo '"a": true' >"${{word#*=}}/v/cache/lastfailed"; }}
done
exit 1
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in ("scripts", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("test", "lane_report.py"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    (tmp_path / "scripts" / "lib.sh").write_text(LIB)
    for name in ("python", "mypy", "ruff"):
        program = tmp_path / ".venv" / "bin" / name
        program.write_text(
            PYTHON.format(python=sys.executable) if name == "python" else "#!/bin/sh\necho $0\n"
        )
        program.chmod(0o755)
    return tmp_path


def run(checkout: Path, *lanes: str, **told: str) -> subprocess.CompletedProcess[str]:
    environ = (
        os.environ
        | {"NOTES": str(checkout / "notes"), "WAITS": "", "FOR": "", "FAILS": "", "FLAKY": ""}
        | told
    )
    return subprocess.run(
        [checkout / "scripts" / "test", *lanes],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def steps(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("==> lane", "pytest of")) or line.endswith("bin/mypy")
    ]


def test_a_lane_begins_beside_another_and_is_told_of_in_its_turn(checkout: Path) -> None:
    """The smoke test ends only after the integration tests have begun."""
    done = run(checkout, "types", "integration", "smoke", WAITS="smoke", FOR="integration")
    assert done.returncode == 0, done.stdout + done.stderr
    notes = (checkout / "notes").read_text().split()
    assert set(notes) == {"begin", "smoke", "integration"}
    shown = [line.replace(f"{checkout}/.venv/bin/", "") for line in steps(done)]
    assert shown == [
        "==> lane types", "mypy", "==> lane integration", "pytest of integration", "==> lane smoke", "pytest of smoke",
    ]  # fmt: skip
    assert done.stdout.count(" ok\n") == 3
    assert "2 passed, 0 failed" in done.stdout


@pytest.mark.parametrize("fails", ["smoke", "integration"])
def test_a_lane_that_fails_is_named_and_the_others_run(checkout: Path, fails: str) -> None:
    done = run(checkout, "types", "integration", "smoke", FAILS=fails)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"failed: {fails}"
    assert done.stdout.count(" ok\n") == 2
    assert done.stdout.count(" FAILED\n") == 1
    assert len(steps(done)) == 6


@pytest.mark.parametrize(("lane", "again"), [("integration", True), ("fuzz", False)])
def test_failed_tests_run_once_more_unless_they_would_draw_other_examples(
    checkout: Path, lane: str, *, again: bool
) -> None:
    done = run(checkout, lane, FLAKY=lane)
    assert done.returncode == (0 if again else 1), done.stderr
    second = [f"pytest of {lane}.again"] if again else []
    assert steps(done) == [f"==> lane {lane}", f"pytest of {lane}", *second]


def test_alone_it_runs_in_its_turn_and_twice_where_it_is_named_twice(checkout: Path) -> None:
    done = run(checkout, "smoke", "types", "smoke")
    assert done.returncode == 0, done.stderr
    assert [line for line in steps(done) if "smoke" in line] == ["==> lane smoke", "pytest of smoke"] * 2


def words_of(checkout: Path, lane: str) -> list[str]:
    """The arguments of a lane's pytest."""
    return (checkout / f"notes.{lane}").read_text().split()


def test_integration_begins_with_the_files_that_take_long(checkout: Path) -> None:
    folder = checkout / "tests" / "integration"
    folder.mkdir(parents=True)
    for name in ("audit", "chaos", "fleet", "tune"):
        (folder / f"test_{name}.py").touch()
    assert run(checkout, "integration").returncode == 0
    words = words_of(checkout, "integration")
    listed = re.search(r"LONG_FILES=\(([^)]*)\)", (ROOT / "scripts" / "test").read_text())
    assert listed
    first = [f"{name}.py" for name in listed[1].split()]
    assert "--whole-files" in words
    files = [word.removeprefix("tests/integration/test_") for word in words if word.endswith(".py")]
    assert files == [*first, "audit.py"]
    assert all((ROOT / "tests" / "integration" / f"test_{name}").exists() for name in first)


def test_real_engines_of_the_gate_are_installed_with_it_and_run_in_no_other_lane(checkout: Path) -> None:
    done = run(checkout, "smoke", "engine")
    assert done.returncode == 0, done.stdout + done.stderr
    files = [word for word in words_of(checkout, "smoke") if word.startswith("tests/")]
    assert len(files) == 2
    assert all((ROOT / file).is_file() for file in files)
    for lane in ("engine-starts", "engine"):
        assert {f"--ignore={file}" for file in files} <= {*words_of(checkout, lane)}
    for lane, wheel in (("smoke", True), ("engine", True), ("types", False)):
        run(checkout, lane)
        assert ("llama-cpp" in (checkout / "extras").read_text().split()) is wheel
