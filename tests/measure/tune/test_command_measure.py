"""`tune --measure COMMAND` with real commands."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.daemon_process import eventually
from support.processes import still_running

from launcher.base.errors import LauncherError
from launcher.config.schema import Strategy
from launcher.measure.tune.command_measure import CommandVisits, parse_command
from launcher.measure.tune.model import Candidate, Layout, Measurement, MeasurementFailedError, Visit

CANDIDATE = Candidate(
    layout=Layout(strategy=Strategy.INTERLEAVED, instances_per_socket=4, reserve_cores=2), label="interleaved x 4",
    plan={"strategy": "interleaved", "slots": [{"cpus": "0-3"}], "reserved": "4"},
)  # fmt: skip
VISIT = Visit(number=7, candidate=1, purpose="race", repeats=3)
FIGURES = '{"output_tokens_per_s": 12, "ttft_p99_s": 0.5, "itl_p99_s": 0.02, "failed": 0}'


def measure(*command: str, limit_s: float = 60.0) -> Measurement:
    with CommandVisits(command, limit_s=limit_s).start(CANDIDATE, VISIT) as session:
        return session.measure(2, seed=99)


def python(code: str, limit_s: float = 60.0) -> Measurement:
    return measure(sys.executable, "-I", "-S", "-c", code, limit_s=limit_s)


def test_the_figures_of_the_command_are_the_measurement() -> None:
    assert measure("echo", FIGURES) == Measurement(
        output_tokens_per_s=12.0, ttft_p99_s=0.5, itl_p99_s=0.02, failed=0
    )


def test_the_command_gets_the_plan_with_its_candidate(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    measure("sh", "-c", f"cat > {seen}; echo '{FIGURES}'")
    given: dict[str, Any] = json.loads(seen.read_text())
    its = given.pop("candidate")
    assert given == CANDIDATE.plan
    assert (its["visit"], its["repeat"], its["seed"], its["purpose"]) == (7, 2, 99, "race")
    assert (its["label"], its["layout"]["instances_per_socket"]) == ("interleaved x 4", 4)


def test_a_command_that_does_not_read_is_no_error() -> None:
    assert measure("echo", FIGURES).output_tokens_per_s == 12


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("import sys; sys.exit('no memory')", "exit code 1: no memory"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
        ("print('fast')", "ends with 'fast'"),
        ("print()", "standard output ends with ''"),
        ("print('{}')", "missing required field `output_tokens_per_s`"),
        ("""print('{"output_tokens_per_s": "12"}')""", "Expected `float`, got `str`"),
        ("""print('{"output_tokens_per_s": 1}{"output_tokens_per_s": 2}')""", "trailing characters"),
        ("""print('{"output_tokens_per_s": NaN}')""", "invalid"),
    ],
)
def test_a_failure_is_a_failed_measurement_with_its_cause(code: str, cause: str) -> None:
    with pytest.raises(MeasurementFailedError, match=cause):
        python(code)


def test_a_command_that_hangs_is_killed_with_its_children() -> None:
    code = "import subprocess, time; subprocess.Popen(['sleep', '4321']); time.sleep(600)"
    with pytest.raises(MeasurementFailedError, match="not ended within 2 s"):
        python(code, limit_s=2.0)
    left = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "4321"]]
    # Killed with its group, and nobody waits for it: it ends when the kernel comes to it.
    eventually(lambda: not still_running(left), what="the child's end")


def test_a_missing_command_ends_the_run() -> None:
    """It would fail for every candidate alike."""
    with pytest.raises(LauncherError, match="cannot run --measure '/no/such x': no such file"):
        measure("/no/such", "x")


@pytest.mark.parametrize(("text", "why"), [("", "empty"), ("  ", "empty"), ("a 'b", "No closing quotation")])
def test_a_command_that_is_none_is_refused(text: str, why: str) -> None:
    with pytest.raises(LauncherError, match=why):
        parse_command(text)


def test_words_are_split_as_by_a_shell() -> None:
    with pytest.raises(LauncherError, match="no command 'nosuch'"):
        parse_command("nosuch x")
    assert parse_command("sh -c 'a b' \"c d\"") == ["sh", "-c", "a b", "c d"]


def test_ctrl_c_ends_the_command() -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from launcher.measure.tune.command_measure import CommandVisits\n"
        "sys.path.insert(0, 'tests'); from measure.tune.test_command_measure import CANDIDATE, VISIT\n"
        "with CommandVisits(['sleep', '4322'], limit_s=600).start(CANDIDATE, VISIT) as session: session.measure(0, 0)\n"
    )

    def sleeps() -> bool:
        return any(p.info["cmdline"] == ["sleep", "4322"] for p in psutil.process_iter(["cmdline"]))

    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as parent:
        deadline = time.monotonic() + 60
        while not sleeps():
            assert parent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        parent.send_signal(signal.SIGINT)
    assert not sleeps()
