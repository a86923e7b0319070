"""The command line as a person uses it: words in, text and an exit code out."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.daemon_process import SOON_S
from support.fake_operations import CAUSE, Backstage, FakeOperations, slot_status
from support.gguf_headers import entry, write_gguf
from support.ports import free_port

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.timeline import timeline_of
from launcher.base.errors import BusyError, LauncherError
from launcher.cli import VERBS, build_parser, main, options, slot_verbs, why
from launcher.config.loading import load_config
from launcher.control.client import ControlClient, UnreachableError
from launcher.control.messages import Request, SlotCommand

Run = Any


@pytest.fixture
def operations() -> FakeOperations:
    return FakeOperations()


@pytest.fixture
def daemon(
    tmp_path: Path, operations: FakeOperations, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Backstage]:
    with Backstage(str(tmp_path / "c.sock"), operations) as daemon:
        monkeypatch.setenv("NUMA_LAUNCHER_SOCKET", daemon.path)
        monkeypatch.setattr(slot_verbs, "POLL_S", 0.001)
        yield daemon


# --- the parser ---------------------------------------------------------------------------------


def test_every_verb_has_help() -> None:
    text = build_parser().format_help()
    for verb, (_, summary) in VERBS.items():
        assert verb in text
        assert summary.split(",")[0][:40] in " ".join(text.split())


def test_no_verb_imports_what_it_does_not_need() -> None:
    """`status` answers at once: no aiohttp, no msgspec."""
    code = "import sys; from launcher.cli import build_parser; build_parser('status'); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not {"aiohttp", "msgspec", "uvloop", "psutil", "numpy", "launcher.daemon.main"} & set(loaded)


@pytest.mark.parametrize(
    ("words", "why", "remedy"),
    [
        (["xyzzy"], "cannot run 'xyzzy': unknown verb", "numa-launcher --help"),
        (["staus"], "cannot run 'staus': unknown verb", "did you mean 'status'?"),
        (["status", "--jsn"], "cannot run status: unknown argument '--jsn'", "did you mean '--json'?"),
        (["status", "--jsn=1"], "cannot run status: unknown argument '--jsn=1'", "did you mean '--json'?"),
        (["status", "extra"], "cannot run status: unknown argument 'extra'", "numa-launcher status --help"),
        (["status", "--js"], "cannot run status: unknown argument '--js'", "did you mean '--json'?"),
        (["restart"], "cannot run restart: SLOT is missing", "give SLOT; numa-launcher restart --help"),
        (
            ["restart", "x"],
            "cannot run restart: SLOT: 'x' is not a slot number",
            "give a slot number; numa-launcher restart --help",
        ),
        (
            ["logs", "-1"],
            "cannot run logs: SLOT: '-1' is not a slot number",
            "give a slot number; numa-launcher logs --help",
        ),
        (
            ["logs", "0", "-n", "x"],
            "cannot run logs: -n/--lines: 'x' is not a number of 0 or more",
            "give a number of 0 or more; numa-launcher logs --help",
        ),
        (
            ["logs", "0", "-n"],
            "cannot run logs: -n/--lines: its value is missing",
            "give a number of 0 or more; numa-launcher logs --help",
        ),
        (
            ["logs", "0", "--since", "soon"],
            "cannot run logs: --since: 'soon' is not a time such as 90s, 10m",
            "give a time such as 90s, 10m, 2h or 1d; numa-launcher logs --help",
        ),
        (
            ["logs", "0", "--since", "9w"],
            "cannot run logs: --since: '9w' is not a time",
            "give a time such as 90s, 10m, 2h or 1d; numa-launcher logs --help",
        ),
        (
            ["drain", "0", "--deadline", "x"],
            "cannot run drain: --deadline: 'x' is not a number of seconds",
            "give a number of seconds; numa-launcher drain --help",
        ),
        (
            ["status", "--watch=-1"],
            "cannot run status: --watch: '-1' is not a number of seconds",
            "give a number of seconds; numa-launcher status --help",
        ),
        (
            ["top", "-d", "inf"],
            "cannot run top: -d/--interval: 'inf' is not a number of seconds",
            "give a number of seconds; numa-launcher top --help",
        ),
        (
            ["scale", "zero"],
            "cannot run scale: N: 'zero' is not a number of 1 or more, or \"auto\"",
            'give a number of 1 or more, or "auto"; numa-launcher scale --help',
        ),
        (
            ["scale", "0"],
            "cannot run scale: N: '0' is not a number of 1 or more",
            'give a number of 1 or more, or "auto"; numa-launcher scale --help',
        ),
        (
            ["quickstart", "--port", "99999"],
            "cannot run quickstart: --port: '99999' is not a port from 1 to 65535",
            "give a port from 1 to 65535; numa-launcher quickstart --help",
        ),
        (
            ["plan", "--color", "blue"],
            "cannot run plan: --color: invalid choice: 'blue'",
            "choose one of auto, always, never; numa-launcher plan --help",
        ),
        (
            ["plan", "-c"],
            "cannot run plan: -c/--config: its value is missing",
            "give FILE; numa-launcher plan --help",
        ),
        (
            ["topology", "snapsht"],
            "cannot run topology: action: invalid choice: 'snapsht'",
            "choose one of snapshot; numa-launcher topology --help",
        ),
        (
            ["key", "add", "n", "--concurrency", "0"],
            "cannot run key add: --concurrency: '0' is not a number of 1 or more",
            "give a number of 1 or more; numa-launcher key add --help",
        ),
        (["key", "ad"], "cannot run 'key ad': unknown verb", "did you mean 'add'?"),
        (
            ["key"],
            "cannot run key: ACTION is missing",
            "give ACTION: add, list, set, revoke; numa-launcher key --help",
        ),
        (
            ["key", "add", "--mdel", "x", "n"],
            "cannot run key add: unknown argument '--mdel'",
            "did you mean '--model'?",
        ),
        (
            ["status", "--short", "--json"],
            "cannot run status: --json: not allowed with argument --short",
            "remove one of the two; numa-launcher status --help",
        ),
    ],
)
def test_what_is_mistyped(
    words: list[str], why: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(why)
    assert second.startswith(remedy)


def test_no_verb_shows_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert all(verb in err for verb in VERBS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("numa-launcher ")


# --- errors and ends ----------------------------------------------------------------------------


def two_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("cannot ")
    return lines


@pytest.mark.parametrize(
    "words",
    [
        ["status"], ["restart", "0"], ["logs", "0"], ["logs", "0", "-f"], ["verify"],
        ["plan", "-c", "/nowhere.toml"], ["serve", "-c", "/nowhere.toml"], ["topology", "--root", "/nowhere"],
        ["plan", "--model", "/m", "-c", "/x.toml"], ["plan", "--model", "/m", "--strategy", "zigzag"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_an_error_for_a_person_is_two_lines_and_exit_code_2(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMA_LAUNCHER_SOCKET", "/nowhere/c.sock")
    assert main(words) == 2
    two_lines(capsys)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"])
def test_no_answer_in_time_is_neither_yes_nor_no(
    tmp_path: Path, sent: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that takes the request, begins to answer perhaps, and says nothing more."""
    monkeypatch.setattr("launcher.cli.verify._PATIENCE_S", 0.1)
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(tmp_path / "c.sock"))
        hung.listen()

        def begin() -> None:
            peer, _ = hung.accept()
            with peer:
                peer.recv(65536)
                os.write(peer.fileno(), sent)
                peer.recv(1)  # until the verb has gone

        thread = threading.Thread(target=begin)
        thread.start()
        assert main(["verify", "0", "--socket", str(tmp_path / "c.sock")]) == 3
        thread.join()
    assert two_lines(capsys)[0].endswith("no answer within 0.1 s")


def test_a_daemon_that_gives_up_is_neither_yes_nor_no(
    daemon: Backstage,
    operations: FakeOperations,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def busy(slot: int) -> None:
        raise BusyError(f"cannot verify slot '{slot}': it took more than 600 s", "ask again")

    monkeypatch.setattr(operations, "verify", busy)
    assert main(["verify", "0"]) == 3
    assert two_lines(capsys)[0] == "cannot verify slot '0': it took more than 600 s"


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.cli.status.run", interrupted)
    assert main(["status"]) == 130


def test_a_reader_that_leaves(daemon: Backstage, operations: FakeOperations) -> None:
    """`numa-launcher logs 0 | head -1`: no traceback, now or at exit, and the exit code of other tools."""
    operations.lines = [f"line {n} {'x' * 200}" for n in range(20_000)]
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m launcher logs 0 -n 20000 | head -1"],
        check=False, capture_output=True, text=True, env=os.environ,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
    assert "line 0" in done.stdout


# --- which configuration, which daemon ------------------------------------------------------------


def parse(*words: str) -> argparse.Namespace:
    return build_parser(words[0]).parse_args(list(words))


def test_configuration_of_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = options.config_of(
        parse(
            "plan",
            "--model",
            "/srv/m",
            "--strategy",
            "contiguous",
            "--kv-cache",
            "2GiB",
            "--set",
            "layout.use_smt=true",
        )
    )
    assert (config.models[0].name, config.models[0].path) == ("m", "/srv/m")
    assert (config.layout.strategy, config.memory.kv_cache, config.layout.use_smt) == (
        "contiguous",
        "2GiB",
        True,
    )
    with pytest.raises(LauncherError, match="cannot use --model with -c"):
        options.config_of(parse("plan", "--model", "/m", "-c", str(tmp_path)))
    monkeypatch.setenv("NUMA_LAUNCHER_CONFIG", str(tmp_path / "none.toml"))
    with pytest.raises(LauncherError, match=r"none\.toml"):
        options.config_of(parse("plan"))


def test_which_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[[models]]\nname = "m"\npath = "/m"\n[control]\nsocket = "/from/file"\n')
    monkeypatch.delenv("NUMA_LAUNCHER_SOCKET", raising=False)
    assert options.client_of(parse("status"))._path == options.DEFAULT_SOCKET
    assert options.client_of(parse("status", "-c", str(file)))._path == "/from/file"
    monkeypatch.setenv("NUMA_LAUNCHER_SOCKET", "/from/env")
    assert options.client_of(parse("status"))._path == "/from/env"
    assert options.client_of(parse("status", "-c", str(file)))._path == "/from/file", (
        "what is typed comes first"
    )
    assert options.client_of(parse("status", "--socket", "/from/flag"))._path == "/from/flag"


# --- verbs ----------------------------------------------------------------------------------------


READY = {"state": "ready", "intent": "run"}
STOPPED = {"state": "stopped", "intent": "stop"}
STARTING = {"state": "starting", "generation": 2}
DRAIN = {"state": "draining", "intent": "drain"}
LEAVING: list[dict[str, Any]] = [
    {"state": "draining", "in_flight": 2},
    {"in_flight": 0},
    {"state": "stopping"},
]


@pytest.mark.parametrize(
    ("verb", "before", "after", "code", "said"),
    [
        ("start", STOPPED, [{"state": "starting", "intent": "run", "generation": 2}, READY], 0, "is ready"),
        ("start", {"state": "failed"}, [STARTING, {"state": "failed"}], 1, "is failed: start did not succeed"),
        ("restart", {}, [*LEAVING, STARTING, READY], 0, "is ready"),
        ("restart", {}, [*LEAVING, {"intent": "stop"}], 1, "is stopping: restart did not succeed"),
        ("restart", {"state": "starting"}, [{}, READY, {"state": "stopping"}, STARTING, READY], 0, "is ready"),
        ("restart", STOPPED, [STARTING | {"intent": "run"}, READY], 0, "is ready"),
        ("drain", {}, [DRAIN | {"in_flight": 2}, {"in_flight": 1}, {"in_flight": 0}], 0, "is drained"),
        ("drain", {}, [DRAIN | {"in_flight": 2}, READY], 1, "is ready: drain did not succeed"),
        ("drain", STOPPED, [], 1, "is stopped: drain did not succeed"),
        ("drain", {}, [DRAIN | {"in_flight": 2}, {"intent": "hold"}], 1, "is draining: drain did not succeed"),
        ("drain", {}, [{"state": "starting", "intent": "drain"}, DRAIN | {"in_flight": 0}], 0, "is drained"),
        ("resume", DRAIN, [READY], 0, "is ready"),
        ("resume", STOPPED, [], 1, "is stopped: resume did not succeed"),
        ("stop", {}, [DRAIN | {"intent": "stop"}, {"state": "stopping"}, STOPPED], 0, "is stopped"),
        ("stop", {}, [DRAIN | {"intent": "stop"}, READY], 1, "is ready: stop did not succeed"),
        ("hold", {}, [DRAIN | {"intent": "hold"}, {"state": "stopping"}, {"state": "held"}], 0, "is held"),
        ("quarantine", {}, [DRAIN | {"intent": "quarantine", "in_flight": 1}], 0, "is in quarantine"),
        ("release", {"state": "held", "intent": "hold"}, [STARTING | {"intent": "run"}, READY], 0, "is ready"),
        ("release", {}, [], 0, "is ready"),
    ],
)  # fmt: skip
def test_a_verb_waits_until_it_is_so(  # noqa: PLR0917
    daemon: Backstage, operations: FakeOperations, capsys: pytest.CaptureFixture[str], verb: str,
    before: dict[str, Any], after: list[dict[str, Any]], code: int, said: str,
) -> None:  # fmt: skip
    operations.slots[1] = slot_status(1, **before)
    operations.after = after
    assert main([verb, "1"]) == code
    assert operations.asked == [(1, SlotCommand(verb))]
    assert operations.after == [], "it looked until the end"
    out, err = capsys.readouterr()
    assert out.strip() == f"slot 1 {said}"
    assert err.startswith("slot 1: ")
    hint = "why 1" if "failed" in said else "events --audit --slot 1"
    assert err.endswith(f"see `numa-launcher {hint}`\n") == bool(code)


def test_drain_counts_down(
    daemon: Backstage, operations: FakeOperations, capsys: pytest.CaptureFixture[str]
) -> None:
    operations.after = [{"state": "draining", "intent": "drain", "in_flight": n} for n in (2, 2, 1, 0)]
    assert main(["drain", "0"]) == 0
    assert capsys.readouterr().err.splitlines() == [f"slot 0: draining, {n} in flight" for n in (2, 1, 0)]


def test_no_wait(daemon: Backstage, operations: FakeOperations, capsys: pytest.CaptureFixture[str]) -> None:
    operations.after = [{"state": "draining", "intent": "stop"}, {"state": "stopped"}]
    assert main(["stop", "0", "--no-wait", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "draining"
    assert len(operations.after) == 1


def test_patience_ends(
    daemon: Backstage, operations: FakeOperations, capsys: pytest.CaptureFixture[str]
) -> None:
    operations.after = [{"state": "draining", "intent": "stop"}]
    assert main(["stop", "0", "--timeout", "0.02", "--json"]) == 3
    assert two_lines(capsys)[0] == "cannot wait longer for slot 0: it is still draining"


def test_a_slot_that_a_reload_takes_away_meanwhile(
    daemon: Backstage, operations: FakeOperations, capsys: pytest.CaptureFixture[str]
) -> None:
    operations.after = [{"state": "draining", "intent": "stop"}, {"slot": 9, "state": "stopped"}]
    assert main(["stop", "1", "--timeout", "5", "--json"]) == 2
    assert two_lines(capsys) == [
        "cannot wait longer for slot 1: it no longer exists",
        "a reload removed it: see numa-launcher reload --show",
    ]


def test_unknown_slot(daemon: Backstage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "7"]) == 2
    assert two_lines(capsys) == ["cannot use slot '7': no such slot", "slots are 0, 1"]


# --- logs and verify --------------------------------------------------------------------------------


def test_logs(daemon: Backstage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "0", "-n", "2"]) == 0
    assert [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()] == [
        "g1 | two",
        "g1 | three",
    ]
    assert main(["logs", "0", "-n", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "three"


def test_logs_since(
    daemon: Backstage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.cli.logs.time.time", lambda: 90.0)  # the lines are of the time 0
    assert main(["logs", "0", "--since", "2m"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["logs", "0", "--since", "2m", "-n", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main(["logs", "0", "--since", "89s"]) == 0
    assert capsys.readouterr().out == ""
    assert [options.since(text) for text in ("90s", "10m", "2h", "1d")] == [90.0, 600.0, 7200.0, 86400.0]


def test_logs_follow(daemon: Backstage) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "launcher", "logs", "0", "-f", "-n", "1"], stdout=subprocess.PIPE, text=True
    ) as logs:
        assert logs.stdout is not None
        assert logs.stdout.readline().endswith("| three\n")
        daemon.say("four")
        assert logs.stdout.readline().endswith("| four\n")
        daemon.close()
        daemon.operations.printed_at = 1.0
        with Backstage(daemon.path, daemon.operations) as following:
            # What the next daemon has of before is not shown again, but that its clock says that it is new.
            assert [logs.stdout.readline().split(" | ")[1] for _ in range(3)] == ["one\n", "two\n", "three\n"]
            following.say("five")
            assert logs.stdout.readline().endswith("| five\n")
        logs.send_signal(signal.SIGINT)
        assert logs.communicate(timeout=SOON_S) == ("", None)
    assert logs.returncode == 130


def test_lines_that_were_shown_are_not_shown_again_after_a_restart(
    daemon: Backstage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    answers = iter([
        [{"time": 1.0, "text": "a"}, {"time": 2.0, "text": "b"}],
        UnreachableError("cannot reach it", "wait"),
        [{"time": 1.0, "text": "a"}, {"time": 2.0, "text": "b"}, {"time": 3.0, "text": "c"}],
    ])  # fmt: skip

    def lines(_client: ControlClient, path: str) -> list[dict[str, Any]]:
        asked.append(path)
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return [line | {"generation": 1} for line in answer]

    asked: list[str] = []
    monkeypatch.setattr("launcher.cli.logs.time.sleep", nap)
    monkeypatch.setattr(ControlClient, "lines", lines)
    assert main(["logs", "0", "-f", "-n", "5"]) == 130
    out, err = capsys.readouterr()
    assert [line.split(" | ")[1] for line in out.splitlines()] == ["a", "b", "c"]
    assert err.splitlines()[0] == "cannot reach it; waiting for the daemon"
    assert asked == ["/slots/0/logs?tail=5&follow=1", *["/slots/0/logs?tail=100000&follow=1"] * 2]


def test_events_go_on_with_the_next_daemon(
    daemon: Backstage,
    operations: FakeOperations,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 1:
            daemon.close()
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("launcher.cli.logs.time.sleep", nap)
    assert main(["events", "-f", "-n", "1"]) == 130
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1
    assert err.count("waiting for the daemon") == 1, "said once"


def test_following_nobody_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["logs", "0", "-f"], ["events", "-f"]):
        assert main([*words, "--socket", str(tmp_path / "none")]) == 2
        assert "no such socket" in capsys.readouterr().err


def test_verify(daemon: Backstage, operations: FakeOperations, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify"]) == 0
    assert operations.verified == [0, 1]
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(
        "slot 0: verified: 9 threads of 2 processes on cpus 0-3 (planned 0-3), memory bind:0"
    )
    assert main(["verify", "1", "--json"]) == 0
    assert [slot["slot"] for slot in json.loads(capsys.readouterr().out)["slots"]] == [1]


# --- offline ------------------------------------------------------------------------------------------


def test_topology(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology"]) == 0
    assert capsys.readouterr().out
    assert main(["topology", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


# --- why, events, options -------------------------------------------------------------------------


def test_why(daemon: Backstage, operations: FakeOperations, capsys: pytest.CaptureFixture[str]) -> None:
    died = {"last_cause": CAUSE, "last_cause_at": 100.0, "last_cause_generation": 1}
    operations.slots = {0: slot_status(0, state="failed", **died), 1: slot_status(1)}
    assert main(["why", "0", "-n", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("slot 0, generation 1, ")
    assert lines[0].endswith("ago: oom: it died")
    assert lines[1] == "  remedy:  buy memory"
    assert lines[2].startswith("  policy:  restart back-off; slot 0 has been in state failed for ")
    assert lines[2].endswith("`numa-launcher start 0` tries again")
    assert lines[3:] == [
        "  evidence:",
        "    | last words",
        "  last 2 lines:",
        "    | two",
        "    | <redacted>",
    ]
    assert main(["why", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["cause"]["name"], found["of_generation"], len(found["lines"])) == ("oom", 1, 3)
    assert main(["why", "1"]) == 1
    assert "none of its instances has failed" in capsys.readouterr().out
    assert main(["why", "7"]) == 2
    assert "slots are 0, 1" in capsys.readouterr().err


def test_why_of_a_request(
    daemon: Backstage, operations: FakeOperations, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = EndedRequest(
        ended_at=9.0, request_id="a/b?c", path="/v1/completions", outcome="rejected", status=429
    )
    operations.timelines = {"a/b?c": timeline_of(msgspec.structs.replace(entry, reason="the queue is full"))}
    assert main(["why", "a/b?c"]) == 0
    assert "outcome: refused by the proxy, status 429: the queue is full" in capsys.readouterr().out
    assert main(["why", "a/b?c", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"][-1]["what"] == "ended"
    assert main(["why", "12345678"]) == 2
    assert "cannot show request '12345678'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["why", "two words"])
    assert "'two words' is not a slot's number or a request's id" in capsys.readouterr().err


def test_why_says_when_it_starts_again(operations: FakeOperations) -> None:
    slot = msgspec.to_builtins(
        slot_status(
            state="backoff", next_start=170.0, last_cause=CAUSE, last_cause_at=150.0, last_cause_generation=3
        )
    )
    assert ", next start in 10 s" in why.to_text(slot, [], now=160.0)
    slot |= {"state": "held", "next_start": None}
    assert "`numa-launcher release 0` starts it" in why.to_text(slot, [], now=160.0)


def test_events(daemon: Backstage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "-n", "2"]) == 0
    assert [line.split(maxsplit=2)[2] for line in capsys.readouterr().out.splitlines()] == [
        "info    event 1", "info    event 2",
    ]  # fmt: skip
    assert main(["events", "--json", "-n", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["number"] == 1
    assert main(["events", "--audit"]) == main(["events", "--slot", "0"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("words", [["start", "0", "--force"], ["stop", "0", "--deadline", "3"]])
def test_an_option_of_another_verb_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert f"unknown argument '{words[2]}'" in capsys.readouterr().err


def test_options_reach_the_daemon(daemon: Backstage, operations: FakeOperations) -> None:
    assert main(["drain", "0", "--force", "--deadline", "3", "--no-wait"]) == 0
    assert operations.requests == [Request(SlotCommand.DRAIN, force=True, deadline_s=3.0)]


def test_a_refusal_is_two_lines(
    daemon: Backstage, operations: FakeOperations, capsys: pytest.CaptureFixture[str]
) -> None:
    operations.refused = True
    assert main(["restart", "0"]) == 2
    assert two_lines(capsys) == ["cannot restart slot '0': too few are left", "add --force"]


CHANGES: dict[str, Any] = {
    "slots": [
        {"slot": 0, "step": "restart", "reasons": ["cpus 0-3 become 0-1"]},
        {"slot": 1, "step": "nothing", "reasons": []},
    ],
    "live": ["supervision.probe_interval_s"],
    "needs_restart": [],
}


def rollout(stage: str, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "changes": CHANGES, "done": [], "doing": "", "error": "", "remedy": ""} | more


def test_reload(
    daemon: Backstage,
    operations: FakeOperations,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("launcher.cli.reload.POLL_S", 0.001)
    assert main(["reload", "--show"]) == 0
    assert "no reload since" in capsys.readouterr().out
    operations.rollouts = [rollout("running", doing="restart slot 0"), rollout("running"), rollout("done")]
    assert main(["reload", "--set", "layout.use_smt=true"]) == 0
    out, err = capsys.readouterr()
    assert err == "running: restart slot 0\n"
    assert out.splitlines() == [
        "slot 0: restart", "  cpus 0-3 become 0-1", "slot 1: unchanged",
        "applied at once: supervision.probe_interval_s", "done",
    ]  # fmt: skip
    operations.rollouts = [rollout("running", doing="restart slot 0: waits for slot 1")]
    assert main(["reload", "--no-wait"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "running: restart slot 0: waits for slot 1"
    operations.rollouts = [rollout("rolled back", error="cannot reload: slot 0 is slow", remedy="look")]
    assert main(["scale", "3", "--force"]) == 1
    assert capsys.readouterr().out.endswith("rolled back\n  cannot reload: slot 0 is slow\n  look\n")
    assert main(["reload", "--dry-run", "--json"]) == 1
    assert operations.reloads == [
        (["layout.use_smt=true"], False, False), ([], False, False),
        (["layout.instances_per_socket=3"], False, True), ([], True, False),
    ]  # fmt: skip


def test_quickstart_on_a_taken_port_names_its_own_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("quickstart", "--model", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*words, "--port", str(port), "--state-dir", str(tmp_path / "q")]) == 2
    why, remedy = capsys.readouterr().err.splitlines()
    assert why == f"cannot listen on '127.0.0.1:{port}': address already in use"
    assert "choose another port with --port" in remedy
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    ("length", "more", "written"),
    [(131_072, [], 8192), (4096, [], None), (131_072, ["--demo"], 2048)],
)
def test_quickstart_shortens_a_long_context(
    length: int, more: list[str], written: int | None, tmp_path: Path, run_without_program: Run
) -> None:
    size = entry("llama.context_length", 10, struct.pack("<Q", length))
    write_gguf(tmp_path / "m.gguf", ("token_embd.weight", (256, 2), 1), extra=(size,))
    out = run_without_program("--model", str(tmp_path / "m.gguf"), "--state-dir", str(tmp_path), *more)
    config = tmp_path / "config.toml"
    assert load_config(config, environ={}).models[0].max_model_len == written
    lines = [line for line in out.splitlines() if "max_model_len" in line]
    assert len(lines) == (written == 8192)
    for line in lines:
        assert line.startswith(
            f"   max_model_len = 8192; the model takes 131072: raise it in {config}, and start "
        )
        assert line.endswith(f"numa-launcher serve -c {config}`")


@pytest.fixture
def run_without_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`quickstart` with llama.cpp, which ends at the plan; its output."""
    monkeypatch.setenv("NUMA_LAUNCHER_ENGINE__COMMAND", '["/nowhere/llama-server"]')

    def run(*words: str) -> str:
        assert main(["quickstart", "--engine", "llama.cpp", "--port", str(free_port()), *words]) == 2
        said = capsys.readouterr()
        assert said.err.startswith("cannot plan: cannot find llama.cpp's server")
        return said.out

    return run
