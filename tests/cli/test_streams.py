"""Standard output that takes nothing, or not every character: every verb, as a process of its own."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_operations import Backstage, FakeOperations, slot_status
from support.terminal import WITHIN_S, Terminal

from launcher.cli import VERBS, build_parser
from launcher.cli.options import Parser
from launcher.cli.streams import READER_GONE, UNWRITTEN, substitute

# A model's name and a line of an instance as operators have them.
NAME, LINE = "żółw-日本", "načítám … ✓"
ASCII = {"PYTHONIOENCODING": "ascii"}
# What a verb needs besides the daemon to print something; nothing here starts anything or changes the machine.
WORDS: dict[str, list[str]] = {
    "plan": ["--help"],
    "topology": ["--machine", "epyc-9755-2p"],
    "why": ["0"],
    "logs": ["0"],
    "scale": ["2", "--dry-run"],
    "usage": ["--file", "missing"],
    "bench": ["compare", "--help"],
    "cost": ["--help"],
    "key": ["list", "--file", "keys"],
    "audit": ["verify", "--file", "missing"],
    "fleet": ["status", "--help"],
    "bundle": ["--help"],
    "doctor": ["--help"],
    "tune": ["--help"],
    "quickstart": ["--help"],
    "serve": ["--help"],
    "dashboard": ["--help"],
}


# They find nothing here, and say so on standard error.
SILENT = {"top", "usage", "audit"}


def words_of(verb: str) -> list[str]:
    slot = ["0", "--no-wait"] if VERBS[verb][0] == "slot_verbs" else []
    return [verb, *WORDS.get(verb, slot)]


def leaves(parser: Parser, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every verb and every verb of a verb, from the parser's own tables."""
    yield path
    branch = parser._choice()
    for name, inner in {} if branch is None else branch.choices.items():
        yield from leaves(inner, (*path, name))


LEAVES = sorted(set(leaves(build_parser())))
# Verbs of which another one has the same code, or that print their help here: two of the ways are enough for them.
ALIKE = {verb for verb, (module, _) in VERBS.items() if module == "slot_verbs" and verb != "drain"} | {
    verb for verb, words in WORDS.items() if words[-1] == "--help" and verb != "plan"
}
WAYS = ("file", "full", "closed", "nobody", "ascii")


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backstage]:
    operations = FakeOperations(
        slots={0: slot_status(0, model=NAME), 1: slot_status(1, state="failed")},
        lines=[LINE],
        rollouts=[
            {"stage": "dry run", "doing": "", "changes": {"slots": [], "live": ["x"], "needs_restart": []}}
        ],
    )
    with Backstage(str(tmp_path / "c.sock"), operations) as daemon:
        monkeypatch.setenv("NUMA_LAUNCHER_SOCKET", daemon.path)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "keys").touch(0o600)
        yield daemon


def run(words: list[str], *, more: dict[str, str] | None = None, **how: Any) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *words], check=False, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        env=os.environ | (more or {}), timeout=WITHIN_S, **how,
    )  # fmt: skip
    return done.returncode, done.stderr.decode(errors="surrogateescape")


def to_full(words: list[str]) -> tuple[int, str]:
    with Path("/dev/full").open("wb") as full:
        return run(words, stdout=full)


def to_closed(words: list[str]) -> tuple[int, str]:
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -m launcher "$@" >&-', sys.executable, *words], check=False, stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL, timeout=WITHIN_S,
    )  # fmt: skip
    return done.returncode, done.stderr.decode()


def to_nobody(words: list[str]) -> tuple[int, str]:
    """A pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return run(words, stdout=writer)
    finally:
        os.close(writer)


def as_file(words: list[str], path: Path, **more: str) -> tuple[int, bytes]:
    with path.open("wb") as file:
        code, err = run(words, stdout=file, more=more)
    assert "Traceback" not in err, err
    return code, path.read_bytes()


# Each case in a process that is as the interpreter begins one; they share what is imported.
RUNNER = """
import gc, importlib, io, json, os, signal, sys
import launcher.cli

for module, _ in launcher.cli.VERBS.values():
    importlib.import_module("launcher.cli." + module)
gc.freeze()  # what is imported is not looked through at the end of each case

def take(number, descriptor):
    os.dup2(descriptor, number)
    os.close(descriptor)

def child(words, to, out, err):
    signal.alarm(60)
    take(2, os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    encoding = "ascii" if to == "ascii" else "utf-8"
    if to == "closed":
        os.close(1)
    elif to == "full":
        take(1, os.open("/dev/full", os.O_WRONLY))
    elif to == "nobody":
        reader, writer = os.pipe()
        os.close(reader)
        take(1, writer)
    else:
        take(1, os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    sys.stdout = sys.__stdout__ = None if to == "closed" else io.TextIOWrapper(io.FileIO(1, "wb", closefd=False), encoding)
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(io.FileIO(2, "wb", closefd=False), encoding, "backslashreplace")
    sys.exit(launcher.cli.main(words))

for number, (words, to) in enumerate(json.loads(sys.argv[1])):
    if not (pid := os.fork()):
        child(words, to, f"{number}.out", f"{number}.err")
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def outcomes(cases: list[tuple[list[str], str]]) -> list[tuple[int, bytes, str]]:
    """Exit code, standard output and standard error of each."""
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, json.dumps(cases)], check=True, stdout=subprocess.PIPE, text=True, timeout=600
    )  # fmt: skip
    out = [Path(f"{number}.out") for number in range(len(cases))]
    return [
        (int(code), path.read_bytes() if path.exists() else b"", path.with_suffix(".err").read_text())
        for code, path in zip(done.stdout.split(), out, strict=True)
    ]


@pytest.mark.timeout(900)  # some 100 processes
@pytest.mark.usefixtures("daemon")
def test_output_that_cannot_be_written_or_lacks_characters() -> None:
    """Of every verb. Not written: one line, and an exit code that no result has. On a terminal that lacks characters: the
    same exit code, and nothing but what the terminal has."""
    ways = {verb: WAYS[: 2 if verb in ALIKE else None] for verb in VERBS}
    found = iter(outcomes([(words_of(verb), to) for verb in VERBS for to in ways[verb]]))
    printing = set()
    for verb in VERBS:
        (code, text, _), full, *others = (next(found) for _ in ways[verb])
        if text:
            printing.add(verb)
        unwritten = [
            (full, "no space left on device"),
            *((each, "bad file descriptor") for each in others[:1]),
        ]
        for (now, _, err), why in unwritten:
            said = [line for line in err.splitlines() if line.startswith("cannot write to")]
            assert (verb, now) == (verb, UNWRITTEN if text else code), err
            assert said == ([f"cannot write to standard output: {why}"] if text else []), err
            assert "Traceback" not in err, err
            assert "Exception ignored" not in err, err
        if not others:
            continue
        _, nobody, lacking = others
        assert (verb, nobody[0]) == (verb, READER_GONE if text else code), nobody[2]
        assert not any(said in nobody[2] for said in ("Traceback", "Exception ignored", "cannot write")), (
            nobody[2]
        )
        assert (verb, lacking[0]) == (verb, code), lacking[2]
        assert lacking[1].isascii()
        assert "Traceback" not in lacking[2]
    assert {verb for verb in VERBS if VERBS[verb][0] != "slot_verbs"} - printing == SILENT


def test_help_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each depth; every verb of a verb is read by the same class, or `leaves` would not find it."""
    monkeypatch.chdir(tmp_path)
    paths: list[tuple[str, ...]] = [
        (),
        ("fleet",),
        ("fleet", "key"),
        ("fleet", "key", "add"),
        ("usage", "restore"),
    ]
    assert set(paths) <= set(LEAVES)
    for path, found in zip(paths, outcomes([([*path, "--help"], "full") for path in paths]), strict=True):
        said = "cannot write to standard output: no space left on device\n"
        assert (path, *found) == (path, UNWRITTEN, b"", said)


@pytest.mark.usefixtures("daemon")
def test_characters_are_replaced_not_dropped(tmp_path: Path) -> None:
    _, text = as_file(["status"], tmp_path / "out", **ASCII)
    assert b"zo\\u0142w-\\u65e5\\u672c" in text
    _, text = as_file(["status"], tmp_path / "out", PYTHONIOENCODING="iso-8859-2")
    assert "żółw-".encode("iso-8859-2") in text
    _, text = as_file(["logs", "0"], tmp_path / "out", **ASCII)
    assert b"nacitam ~ \\u2713" in text
    _, text = as_file(["logs", "0"], tmp_path / "out", PYTHONIOENCODING="utf-8")
    assert "načítám … ✓" in text.decode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [("3 × 4", "3 x 4"), ("a → b", "a > b"), ("naïve", "naive"), ("│─┐", "|-+"), ("➤", "\\u27a4"), ("😀", "\\U0001f600")],
)  # fmt: skip
def test_substitutes(text: str, shown: str) -> None:
    assert substitute(text) == shown


def test_tables_keep_their_columns() -> None:
    for character in "…·→×–÷≤±µ─│┌█▁":
        assert len(substitute(character)) == 1


@pytest.mark.parametrize(
    "words", [["logs", "0", "-f"], ["events", "-f"], ["status", "--watch", "0.1"]], ids=" ".join
)
def test_a_follower_ends_with_its_output(words: list[str], daemon: Backstage) -> None:
    assert to_full(words) == (UNWRITTEN, "cannot write to standard output: no space left on device\n")
    assert to_nobody(words) == (READER_GONE, "")
    daemon.operations.lines = []


def test_top_on_a_terminal_that_lacks_characters(daemon: Backstage) -> None:
    with Terminal(
        (sys.executable, "-m", "launcher", "top", "--interval", "0.2"),
        100,
        30,
        ASCII | {"DAEMON": daemon.path},
    ) as terminal:
        terminal.shows("zo\\u0142w")
        terminal.type("q")
        assert terminal.ended() == 0
    assert terminal.raw.isascii()


def test_standard_error_that_takes_nothing() -> None:
    """The reason is lost; the exit code is not."""
    for to in ("2>/dev/full", "2>&-", ">&- 2>&-"):
        command = f'exec "$0" -m launcher status --socket /nowhere {to}'
        done = subprocess.run(["sh", "-c", command, sys.executable], check=False, capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (2, b"", b""), to


@pytest.mark.usefixtures("daemon")
def test_a_terminal_that_somebody_made_non_blocking() -> None:
    """More than it takes at once is written all the same."""
    master, slave = pty.openpty()
    os.set_blocking(slave, False)
    read = io.BytesIO()

    def drain() -> None:
        while b"that was all" not in read.getvalue():
            read.write(os.read(master, 65536))

    reader = threading.Thread(target=drain)
    reader.start()
    code, err = run(["topology", "--machine", "epyc-9755-2p", "--json"], stdout=slave)
    os.set_blocking(slave, True)
    os.write(slave, b"that was all")
    reader.join(60)
    os.close(master)
    os.close(slave)
    assert (code, err) == (0, "")
    assert len(read.getvalue()) > 20_000
