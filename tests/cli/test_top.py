"""`top` on a real terminal: what a person sees, and what is left when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace
from support.fake_operations import CAUSE, Backstage, FakeOperations, slot_status
from support.terminal import Terminal

from launcher.cli import main

TOP = (sys.executable, "-m", "launcher", "top", "--interval", "0.2")
CTRL_C, CTRL_D = "\x03", "\x04"


@pytest.fixture
def operations() -> FakeOperations:
    return FakeOperations()


@pytest.fixture
def daemon(
    tmp_path: Path, operations: FakeOperations, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Backstage]:
    monkeypatch.delenv("NO_COLOR", raising=False)
    with Backstage(str(tmp_path / "c.sock"), operations) as daemon:
        monkeypatch.setenv("NUMA_LAUNCHER_SOCKET", daemon.path)
        yield daemon


def ended_by(key: str, terminal: Terminal) -> None:
    """The key ends it, and the terminal is as before. Four tests end with another key each."""
    assert not terminal.is_as_before()
    terminal.type(key)
    assert terminal.ended() == 0
    assert terminal.is_as_before()


@pytest.mark.usefixtures("daemon")
def test_what_it_shows_is_alive(operations: FakeOperations) -> None:
    with Terminal(TOP, 100, 30) as terminal:
        terminal.shows("OK 2/2 ready")
        terminal.shows("RSS ON NODE")
        terminal.shows("digit: slot")
        assert terminal.has_colours()
        operations.slots[1] = replace(operations.slots[1], state="failed", last_cause=CAUSE)
        terminal.shows("DEGRADED 1/2 ready; slot 1 failed")
        terminal.shows("slot 1: oom: it died")
        terminal.type("xyz \x1b[A")  # keys that mean nothing
        ended_by("q", terminal)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_it_in_order(number: signal.Signals) -> None:
    with Terminal(TOP) as terminal:
        terminal.shows("OK 2/2 ready")
        terminal.process.send_signal(number)
        assert terminal.ended() == 128 + number
        assert terminal.is_as_before()


LOST = """
import os, signal, sys
from launcher.cli.screen import TerminalScreen

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        for _ in range(1000): pass  # the handler runs in here: what it raises is dropped

with TerminalScreen() as screen:
    Finalized()
    sys.exit(42 if screen.wait(1000) == "quit" else 43)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 42), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal_during_a_finalizer_is_not_lost(number: signal.Signals, code: int) -> None:
    with Terminal((sys.executable, "-c", LOST, str(int(number)))) as terminal:
        assert terminal.ended() == code


@pytest.mark.usefixtures("daemon")
def test_a_window_that_is_closed_ends_it() -> None:
    with Terminal(TOP) as terminal:
        terminal.shows("OK 2/2 ready")
        terminal.hang_up()
        assert terminal.process.wait(20) != 0


@pytest.mark.usefixtures("daemon")
def test_ctrl_z_gives_the_terminal_back_for_a_while() -> None:
    with Terminal(TOP) as terminal:
        terminal.shows("OK 2/2 ready")
        process = psutil.Process(terminal.process.pid)
        terminal.type("\x1a")
        terminal.until(lambda: process.status() == psutil.STATUS_STOPPED, "that it stands")
        terminal.read(0.05)
        assert terminal.is_as_before()
        terminal.process.send_signal(signal.SIGCONT)
        terminal.until(lambda: not terminal.is_as_before(), "that it draws again")
        ended_by("Q", terminal)


@pytest.mark.usefixtures("daemon")
def test_80_by_24_with_many_slots_and_other_sizes(operations: FakeOperations) -> None:
    operations.slots = {
        n: slot_status(n, last_cause=replace(CAUSE, name="missing-instruction-set")) for n in range(16)
    }
    with Terminal(TOP, 80, 24) as terminal:
        terminal.shows("OK 16/16 ready")
        terminal.until(lambda: terminal.display[20].startswith("15 "), "the last slot")
        assert terminal.display[4].startswith("SLOT")
        for columns, lines in ((120, 40), (60, 20), (20, 5), (1, 1), (200, 60), (80, 24)):
            terminal.resize(columns, lines)
            end = terminal.raw
            # A frame of the new size: the head at the top, whatever was there before overwritten.
            head = "OK 16/16 ready"[:columns]
            cut = (
                (head[: columns - 1] + "…")
                if columns < len("OK 16/16 ready; 1 in flight, 0 waiting")
                else head
            )
            terminal.until(
                lambda end=end, cut=cut: (
                    len(terminal.raw) > len(end) and terminal.display[0][: len(cut) - 1] == cut[:-1]
                ),
                f"a frame of {columns} x {lines}",
            )
        terminal.until(lambda: terminal.display[20].startswith("15 "), "the last slot again")
        ended_by(CTRL_D, terminal)


@pytest.mark.usefixtures("daemon")
def test_no_color() -> None:
    with Terminal(TOP, environ={"NO_COLOR": "1"}) as terminal:
        terminal.shows("OK 2/2 ready")
        terminal.shows("digit: slot")
        ended_by(CTRL_C, terminal)
        assert not terminal.has_colours()


def test_it_goes_on_over_a_restart_of_the_daemon(tmp_path: Path, operations: FakeOperations) -> None:
    path = str(tmp_path / "c.sock")
    with Backstage(path, operations) as daemon:
        terminal = Terminal([*TOP, "--socket", path])
        with terminal:
            terminal.shows("OK 2/2 ready")
            daemon.close()
            terminal.shows("no answer for")
            terminal.shows("OK 2/2 ready")  # what was seen last stays
            operations.slots[0] = slot_status(0, state="starting", phase="loading weights")
            with Backstage(path, operations):
                terminal.shows("DEGRADED 1/2 ready")
                assert "no answer" not in "\n".join(terminal.display)
                terminal.shows("slot 0: loading weights")
                ended_by("q", terminal)


def test_nobody_there_is_said_as_by_any_verb(tmp_path: Path) -> None:
    with Terminal([*TOP, "--socket", str(tmp_path / "none")], 200, 24) as terminal:
        assert terminal.ended() == 2
        assert b"no such socket" in terminal.raw
        assert b"\x1b[?1049h" not in terminal.raw


def test_what_is_no_terminal_is_refused(daemon: Backstage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "cannot draw: standard output is not a terminal",
        "use `numa-launcher status --watch`, or `numa-launcher status --json`",
    ]
    with Terminal(TOP, 120, 24, environ={"TERM": "dumb"}) as terminal:
        assert terminal.ended() == 2
        assert b"cannot draw: TERM='dumb' has no cursor control" in terminal.raw


def test_without_keys_it_still_draws(daemon: Backstage) -> None:
    """Standard input that is no terminal, as of `top </dev/null`."""
    words = ["bash", "-c", f"exec {' '.join(TOP)} </dev/null"]
    with Terminal(words) as terminal:
        terminal.shows("OK 2/2 ready")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.ended() == 0
        assert terminal.is_as_before()


def test_other_verbs_do_not_pay_for_it() -> None:
    """rich is for `top` alone."""
    code = "import sys; from launcher.cli import build_parser; build_parser(); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=os.environ
    ).stdout
    assert "rich" not in loaded.split()
