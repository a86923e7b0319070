"""`numa-launcher tune`: killed and resumed, refused, interrupted; a process of its own where it is killed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.daemon_process import FAKE_ENGINE, SOON_S, DaemonProcess, eventually, fake_config
from support.verbs import run_verb

SURFACE = Path(__file__).parents[1] / "measure" / "tune" / "surface.py"
MACHINE = ("--machine", "epyc-9755-2p")
# 51 measurements in 17 visits: ten kills, each after up to five of them, leave some to measure.
SEARCH = (
    "--strategies",
    "interleaved",
    "--instances",
    "1,4",
    "--no-refine",
    "--repeats",
    "3",
    "--seed",
    "7",
)


class Tune:
    """One state folder, and runs of `tune` in it."""

    def __init__(self, folder: Path, call_s: float = 0.0) -> None:
        folder.mkdir()
        self.state, self.log, self.call_s = folder / "state", folder / "calls", call_s
        self.log.touch()
        self.measure = f"{sys.executable} -I -S {SURFACE} {self.log} {call_s}"

    def words(self, *more: str) -> list[str]:
        return ["tune", "--state-dir", str(self.state), *more]

    def new(self, *more: str) -> list[str]:
        return self.words(*MACHINE, *SEARCH, "--measure", self.measure, *more)

    def calls(self, word: str) -> list[str]:
        return [line.partition(" ")[2] for line in self.log.read_text().splitlines() if line.startswith(word)]

    def journal(self) -> list[dict[str, Any]]:
        (file,) = self.state.glob("tuning/*/journal.jsonl")
        return [json.loads(line) for line in file.read_bytes().rpartition(b"\n")[0].splitlines()]


def started(words: list[str]) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "launcher", *words]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def verdict(output: str) -> dict[str, Any]:
    """Without what a clock says."""
    found = json.loads(output)
    for visit in found["visits"]:
        for name in ("started_at", "start_s", "measure_s"):
            del visit[name]
    return {name: value for name, value in found.items() if name != "run"}


@dataclass(frozen=True)
class Finished:
    """A run that nothing disturbs, and what it printed. Nobody measures in it: it is only resumed."""

    tune: Tune
    output: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    tune = Tune(tmp_path_factory.mktemp("whole") / "t")
    with started(tune.new("--json")) as process:
        output, errors = process.communicate(timeout=4 * SOON_S)
    assert process.returncode == 0, errors
    return Finished(tune, output)


@pytest.fixture(scope="module")
def uninterrupted(finished: Finished) -> dict[str, Any]:
    return verdict(finished.output)


def test_json_is_alone_on_standard_output_and_complete(uninterrupted: dict[str, Any]) -> None:
    winner = uninterrupted["winner"]
    assert winner["layout"]["instances_per_socket"] == 4
    assert winner["layout"]["strategy"] == "interleaved"
    assert winner["interval"][0] <= winner["ratio_to_default"] <= winner["interval"][1]
    assert uninterrupted["complete"]
    assert {visit["label"] for visit in uninterrupted["visits"]} == {
        candidate["label"] for candidate in uninterrupted["candidates"]
    }


@pytest.mark.parametrize(
    "kills", [pytest.param(4, id="4"), pytest.param(10, id="10", marks=pytest.mark.release)]
)
@pytest.mark.long
def test_kills_change_no_verdict_and_nothing_is_measured_twice(
    tmp_path: Path, uninterrupted: dict[str, Any], kills: int
) -> None:
    moments = random.Random(kills)  # noqa: S311
    tune = Tune(tmp_path / "t", call_s=0.05)
    in_progress: list[str] = []
    for kill in range(kills):
        before = len(tune.calls("begin"))
        with started(tune.new() if not kill else tune.words("--resume")) as process:
            # Between the first lines of the journal, within a call, or between two.
            if kill:
                wanted = before + moments.randrange(1, 4)
                eventually(
                    lambda n=wanted: process.poll() is not None or len(tune.calls("begin")) >= n,
                    pause_s=tune.call_s,
                )
            else:
                eventually(lambda: list(tune.state.glob("tuning/*/journal.jsonl")))
            time.sleep(moments.uniform(0, 0.12))
            assert process.poll() is None, process.stderr and process.stderr.read()
            process.kill()
        journaled = sum(record["event"] == "repeat-ended" for record in tune.journal())
        in_progress += tune.calls("begin")[journaled + len(in_progress) :]
    done = run_verb(*tune.words("--resume", "--json"))
    assert done.returncode == 0, done.stderr
    assert verdict(done.stdout) == uninterrupted
    twice = Counter(tune.calls("begin")) - Counter(set(tune.calls("begin")))
    assert twice == Counter(in_progress), "only what was in progress at a kill is measured again"
    repeats = [record for record in tune.journal() if record["event"] == "repeat-ended"]
    assert len(repeats) == len(set(tune.calls("begin")))
    assert len(in_progress) <= kills


def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    tune = Tune(tmp_path / "t", call_s=600.0)
    with started(tune.new()) as process:
        eventually(lambda: tune.calls("begin"))
        process.kill()
    eventually(lambda: not _processes_of(tune.log), what="the command survived")


def _processes_of(log: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if str(log) in words:
            found.append(entry.name)
    return found


@pytest.mark.parametrize(
    "name",
    [
        signal.SIGINT,
        *(pytest.param(each, marks=pytest.mark.long) for each in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_a_signal_prints_what_is_known_and_the_run_can_be_resumed(
    tmp_path: Path, uninterrupted: dict[str, Any], name: signal.Signals
) -> None:
    tune = Tune(tmp_path / "t", call_s=0.05)
    with started(tune.new("--json")) as process:
        eventually(lambda: len(tune.calls("end")) >= 9)
        process.send_signal(name)
        output, errors = process.communicate(timeout=SOON_S)
    assert process.returncode == 130, errors
    known = json.loads(output)
    assert not known["complete"]
    assert known["visits"]
    assert f"numa-launcher tune --resume {known['run']} continues" in errors
    assert "Traceback" not in errors
    if name == signal.SIGINT:  # the journal is the same for each; after SIGKILL at any moment: the test above
        done = run_verb(*tune.words("--resume", known["run"], "--json"))
        assert verdict(done.stdout) == uninterrupted


def test_a_finished_run_is_resumed_without_a_measurement(finished: Finished) -> None:
    calls = finished.tune.calls("begin")
    assert calls
    assert json.loads(run_verb(*finished.tune.words("--resume", "--json")).stdout) == json.loads(
        finished.output
    )
    assert finished.tune.calls("begin") == calls


@pytest.mark.long
def test_a_resume_with_other_values_says_which(finished: Finished) -> None:
    tune = finished.tune
    for words, what in (
        (("--seed", "8"), "seed: 7, now 8"),
        (("--machine", "epyc-9654-2p"), "machine."),
        (
            ("--set", "layout.strategy=contiguous"),
            'configuration.layout.strategy: "interleaved", now "contiguous"',
        ),
    ):
        done = run_verb(*tune.words("--resume", *words))
        assert done.returncode == 2
        assert "it was begun with other values: " in done.stderr
        assert what in done.stderr
        assert "begin a new run" in done.stderr
    assert run_verb(*tune.words("--resume", "--seed", "7")).returncode == 0


def test_a_second_run_at_the_same_time_is_refused(tmp_path: Path) -> None:
    tune = Tune(tmp_path / "t", call_s=600.0)
    with started(tune.new()) as process:
        eventually(lambda: tune.calls("begin"))
        done = run_verb(*tune.new())
        process.terminate()
        process.communicate(timeout=SOON_S)
    assert done.returncode == 2
    assert f"another tune (pid {process.pid})" in done.stderr


def test_a_command_that_always_fails_is_a_result(tmp_path: Path) -> None:
    tune = Tune(tmp_path / "t")
    done = run_verb(*tune.words(*MACHINE, *SEARCH, "--measure", "false", "--json"))
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["winner"] is None
    assert found["sentence"].startswith("no layout gave a figure")
    assert {visit["cause"] for visit in found["visits"]} == {"false: exit code 1"}


def test_a_running_daemon_is_never_disturbed(tmp_path: Path, start: Callable[..., DaemonProcess]) -> None:
    daemon = start(instances=1)
    daemon.wait_ready(1)
    tune = Tune(tmp_path / "t")
    for more in ((), ("--stop-service",)):
        done = run_verb(*tune.words("-c", str(daemon.config), "--measure", tune.measure, *more))
        assert done.returncode == 2, more
        assert f"a numa-launcher daemon (pid {daemon.process.pid})" in done.stderr, more
        assert not tune.calls("begin"), more
        assert not list(tune.state.glob("tuning/*/journal.jsonl")), "--resume would continue it"
        assert daemon.status()["ready"] == 1, more


def test_apply_writes_the_winner_and_reloads_the_running_daemon(
    tmp_path: Path, start: Callable[..., DaemonProcess]
) -> None:
    """The surface says that the second instance is worth it, on this machine."""
    tune = Tune(tmp_path / "t")
    free = tmp_path / "free.toml"  # the same models; no daemon behind its socket
    free.write_text(fake_config(instances=1) + f'[control]\nsocket = "{tmp_path}/none.sock"\n')
    words = (
        "-c",
        str(free),
        "--measure",
        tune.measure,
        "--no-refine",
        "--instances",
        "1,2",
        "--json",
    )
    done = run_verb(*tune.words(*words))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["different"]
    daemon = start(instances=1, more="# my own remark\n")
    daemon.wait_ready(1)
    before = daemon.config.read_text()
    applied = run_verb(*tune.words("-c", str(daemon.config), "--apply", "--json"))
    assert applied.returncode == 0, applied.stderr
    found = json.loads(applied.stdout)["applied"]
    assert (found["reload"], found["in_use"]) == ("done", True)
    daemon.wait_ready(2)
    assert Path(found["kept"]).read_text() == before
    assert "# my own remark" in daemon.config.read_text()
    assert "instances_per_socket = 2" in daemon.config.read_text()


def test_a_budget_without_room_for_a_comparison_is_refused(tmp_path: Path) -> None:
    tune = Tune(tmp_path / "t")
    done = run_verb(*tune.new("--budget", "1s"))
    assert done.returncode == 2
    assert done.stderr.startswith("cannot tune within 1 s: a visit takes about ")
    assert not tune.calls("begin")


def test_a_machine_with_one_layout_is_refused(tmp_path: Path) -> None:
    tune = Tune(tmp_path / "t")
    done = run_verb(*tune.words(*MACHINE, "--instances", "7", "--no-refine", "--measure", tune.measure))
    assert done.returncode == 2
    assert "there is no layout beside the default" in done.stderr


@pytest.mark.long
def test_a_layout_that_the_daemon_cannot_start_is_taken_back(tmp_path: Path) -> None:
    """The daemon keeps its old layout, and so does the file."""
    engine = json.dumps([
        "sh", "-c", f"[ {{slot}} = 0 ] || exit 3; exec {sys.executable} {FAKE_ENGINE} --uds {{uds}} --model {{name}}",
    ])  # fmt: skip
    text = (
        '[[models]]\nname = "fake"\npath = "fake"\n[layout]\ninstances_per_socket = 1\n'
        f'[engine]\nkind = "command"\ncommand = {engine}\n[supervision]\ncrash_limit = 1\n'
    )
    daemon = DaemonProcess(tmp_path, text)
    try:
        daemon.wait_ready(1)
        before = daemon.config.read_text()
        tune = Tune(tmp_path / "t")
        free = tmp_path / "free.toml"  # the same models; no daemon behind its socket
        free.write_text(text + f'[control]\nsocket = "{tmp_path}/none.sock"\n')
        words = ("-c", str(free), "--measure", tune.measure, "--no-refine", "--instances", "1,2", "--json")
        measured = run_verb(*tune.words(*words))
        assert json.loads(measured.stdout)["different"], measured.stderr
        done = run_verb(*tune.words("--apply", "-c", str(daemon.config), "--json"))
        assert done.returncode == 1, done.stderr
        assert json.loads(done.stdout)["applied"]["reload"] == "rolled back"
        assert "restored" in done.stderr
        assert daemon.config.read_text() == before
        assert daemon.wait_ready(1)["ready"] == 1
    finally:
        daemon.end()
