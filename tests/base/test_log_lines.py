"""What journald is sent. The journal itself (/run/systemd/journal/socket) is tested in a virtual host only."""

from __future__ import annotations

import io
import logging
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon_logs import FakeJournal
from support.daemon_process import eventually
from support.fakes import SOON_S

from launcher.base import log_lines


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, put back afterwards."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    quiet = {name: logging.getLogger(name).level for name in ("aiohttp.access", "asyncio")}
    access = logging.getLogger(log_lines.ACCESS)
    yield root
    for handler in root.handlers:
        handler.close()
    access.handlers[:], access.propagate = [], True
    root.handlers[:] = before
    root.setLevel(level)
    for name, was in quiet.items():
        logging.getLogger(name).setLevel(was)


@pytest.fixture
def fake() -> Iterator[FakeJournal]:
    made = FakeJournal()
    yield made
    made.close()


def logger(fake: FakeJournal) -> logging.Logger:
    log = logging.Logger("launcher.test")  # noqa: LOG001  one of its own
    log.addHandler(fake.handler)
    return log


def test_an_event_and_its_fields(fake: FakeJournal) -> None:
    logger(fake).warning("slot %d: %s", 3, "gone", extra={"slot": 3, "generation": 2, "request_id": "r"})
    (entry,) = fake.entries
    assert entry["MESSAGE"] == "slot 3: gone"
    assert entry["PRIORITY"] == "4"
    assert (entry["LOGGER"], entry["SYSLOG_IDENTIFIER"]) == ("launcher.test", "numa-launcher")
    assert entry["CODE_FILE"].endswith("test_log_lines.py")
    fields = {name: value for name, value in entry.items() if name.startswith("NUMA_LAUNCHER_")}
    assert fields == {
        "NUMA_LAUNCHER_SLOT": "3",
        "NUMA_LAUNCHER_GENERATION": "2",
        "NUMA_LAUNCHER_REQUEST_ID": "r",
    }


class Writes(io.StringIO):
    """A stream that keeps each call's text."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def write(self, text: str) -> int:
        self.texts.append(text)
        return len(text)

    def wait_for(self, calls: int) -> list[str]:
        """The lines of the last one, once there were so many."""
        eventually(lambda: len(self.texts) == calls, what=f"{calls} writes")
        return self.texts[-1].splitlines()


def test_lines_that_come_after_another_wait_to_be_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "_PAUSE_S", 3600.0)
    stream = Writes()
    handler = log_lines.LineHandler(stream)
    log = logging.Logger("launcher.test")  # noqa: LOG001  one of its own
    log.addHandler(handler)
    log.info("at once")
    assert len(stream.wait_for(1)) == 1
    for number in range(3):
        log.info("line %d", number)
    log.warning("not later")
    assert [line.split()[-1] for line in stream.wait_for(2)] == ["0", "1", "2", "later"]
    log.info("a little")
    while len(stream.texts) == 2 and handler._bytes < log_lines._PIECE_BYTES:
        log.info("x" * 8000)
    assert len(stream.wait_for(3)) > 5, "much of it"
    log.info("the last")
    assert handler.drained(SOON_S)
    assert len(stream.wait_for(4)) == 1
    handler.close()


def test_many_lines_are_written_with_one_call() -> None:
    stream = Writes()
    handler = log_lines.LineHandler(stream)
    handler.write_lines("launcher.access", [(20, "GET /a 200", {}), (10, "GET /\x1bb" + "c" * 9000, {})])
    handler.flush()
    (text,) = stream.texts
    first, second, rest = text.split("\n")
    assert first[8:] == " INFO    GET /a 200"
    assert second[8:].startswith(" DEBUG   GET /\\x1bbccc")
    assert len(second) < 8300
    assert rest == ""


def test_many_events_each_have_their_fields(fake: FakeJournal) -> None:
    lines = [(20, "one", {"status": 200}), (10, "t\nwo", {"slot": None, "path": "\n="})]
    fake.handler.write_lines("launcher.access", lines)
    one, two = fake.entries
    assert (one["MESSAGE"], one["PRIORITY"], one["NUMA_LAUNCHER_STATUS"]) == ("one", "6", "200")
    assert (one["LOGGER"], one["SYSLOG_IDENTIFIER"]) == ("launcher.access", "numa-launcher")
    assert (two["MESSAGE"], two["PRIORITY"]) == ("t\\nwo", "7")
    assert (two["NUMA_LAUNCHER_SLOT"], two["NUMA_LAUNCHER_PATH"]) == ("None", "\\n=")


def test_lines_that_cannot_be_written_end_nothing_and_are_counted(tmp_path: Path) -> None:
    stream = (tmp_path / "log").open("w")
    handler = log_lines.LineHandler(stream)
    stream.close()
    handler.write_lines("launcher.access", [(20, "x", {})])
    assert handler.drained(SOON_S)
    assert handler.dropped == 1
    handler.close()
    without = log_lines.FieldsHandler(str(tmp_path / "no journal"))
    without.write_lines("launcher.access", [(20, "x", {})])
    assert without.drained(SOON_S)
    without.close()


def test_a_stderr_that_does_not_block_loses_no_line() -> None:
    """Whoever shares the terminal may have set O_NONBLOCK."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    most, data = 10_000, b""  # more than a pipe holds
    with os.fdopen(reading, "rb", buffering=0) as reader, os.fdopen(writing, "w") as stream:
        handler = log_lines.LineHandler(stream)
        handler.write_lines("launcher.access", [(20, f"line {number}", {}) for number in range(most)])
        written = False
        while not written:
            written = handler.drained(0.001)
            data += reader.read(1 << 20) or b""
        handler.close()
    assert [int(line.split()[-1]) for line in data.splitlines()] == list(range(most))
    assert handler.dropped == 0


def test_a_record_that_cannot_be_formatted_is_a_line_of_its_own(fake: FakeJournal) -> None:
    logger(fake).error("%d", "no number")
    (entry,) = fake.entries
    assert entry["MESSAGE"].startswith("cannot write a log line: TypeError: ")


def test_an_exception_comes_along(fake: FakeJournal) -> None:
    try:
        raise ValueError("deep down")
    except ValueError:
        logger(fake).exception("it failed")
    (entry,) = fake.entries
    assert entry["MESSAGE"].startswith("it failed\nTraceback")
    assert "ValueError: deep down" in entry["MESSAGE"]
    assert entry["PRIORITY"] == "3"


def test_an_entry_that_no_datagram_can_carry_arrives_too(fake: FakeJournal) -> None:
    logger(fake).error("x", extra={f"field_{number}": "y" * 8000 for number in range(100)})
    (entry,) = fake.entries
    assert entry["NUMA_LAUNCHER_FIELD_99"] == "y" * 8000


def test_a_journal_that_takes_nothing_stops_nobody(fake: FakeJournal) -> None:
    log = logger(fake)
    lines = 2 * log_lines.MOST_BYTES // 1000
    for number in range(lines):
        log.info("%s", "x" * 1000, extra={"number": number})
    (warning,) = fake.handler.warnings()
    assert "log lines were dropped: the journal was not read for" in warning
    *kept, dropped = fake.entries
    assert [int(entry["NUMA_LAUNCHER_NUMBER"]) for entry in kept] == list(range(len(kept)))
    assert len(kept) > lines / 4
    assert dropped["MESSAGE"].startswith(f"{lines - len(kept)} log lines were dropped: the journal was not")
    assert dropped["PRIORITY"] == "4"
    assert fake.handler.warnings() == ()


def test_only_extra_is_a_field() -> None:
    record = logging.makeLogRecord({"msg": "m", "args": (), "slot": 1})
    assert log_lines.fields_of(record) == {"slot": 1}
    logging.Formatter("%(asctime)s %(message)s").format(record)  # adds message and asctime
    assert log_lines.fields_of(record) == {"slot": 1}


def test_what_a_library_adds_to_every_record_is_no_field(fake: FakeJournal) -> None:
    """Ray does, in a process that imports it."""
    record = logging.makeLogRecord({"msg": "m", "args": (), "slot": 1, "_of_a_library": 5})
    assert log_lines.fields_of(record) == {"slot": 1}
    logger(fake).error("m", extra={"slot": 1, "_of_a_library": 5})
    assert "NUMA_LAUNCHER_SLOT" in fake.entries[0]
    assert not [name for name in fake.entries[0] if "LIBRARY" in name]


def test_lines_of_evidence_are_a_list_and_one_field_of_the_journal(fake: FakeJournal) -> None:
    record = logging.makeLogRecord({"msg": "m", "args": (), "evidence": ("a\x1b[2J", "b")})
    assert log_lines.fields_of(record) == {"evidence": ["a\\x1b[2J", "b"]}
    logger(fake).error("m", extra={"evidence": ("a\x1b[2J", "b")})
    assert fake.entries[0]["NUMA_LAUNCHER_EVIDENCE"] == "a\\x1b[2J; b"


def test_under_journal_is_what_systemd_says_of_stderr(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "stderr").open("w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        facts = os.fstat(stderr.fileno())
        monkeypatch.delenv("JOURNAL_STREAM", raising=False)
        assert not log_lines.under_journal()
        monkeypatch.setenv("JOURNAL_STREAM", f"{facts.st_dev}:{facts.st_ino}")
        assert log_lines.under_journal()
        monkeypatch.setenv("JOURNAL_STREAM", f"{facts.st_dev}:{facts.st_ino + 1}")  # stderr was redirected
        assert not log_lines.under_journal()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not log_lines.under_journal()


def test_set_up(root: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    log_lines.set_up("info", "auto")
    (handler,) = root.handlers
    assert not isinstance(handler, log_lines.FieldsHandler)
    logging.getLogger("launcher.x").info("hello %d", 7, extra={"slot": 1})
    logging.getLogger("launcher.x").debug("unheard")
    handler.flush()
    assert stderr.getvalue().endswith("INFO    hello 7\n")
    assert "unheard" not in stderr.getvalue()
    log_lines.set_up("debug", "journal")
    (handler,) = root.handlers
    assert isinstance(handler, log_lines.FieldsHandler)
    assert log_lines.dropped() == 0
    handler.dropped = 3
    assert log_lines.dropped() == 3
    assert root.level == logging.DEBUG
    access = logging.getLogger("launcher.access")
    assert (access.handlers, access.propagate) == ([handler], False)


STALLED = """
import logging, sys
from launcher.base import log_lines
log_lines.set_up("info", "text")
log = logging.getLogger("launcher.test")
for number in range(int(sys.argv[1])):
    log.info("line %d %s", number, "x" * 1000)
print("went on", flush=True)
sys.stdin.readline()
log.info("the last line")
"""


def began(lines: int) -> subprocess.Popen[bytes]:
    """A process that has logged so many lines to a stderr that nobody reads."""
    pipe = subprocess.PIPE
    made = subprocess.Popen([sys.executable, "-c", STALLED, str(lines)], stdin=pipe, stdout=pipe, stderr=pipe)
    assert made.stdout is not None
    found, _, _ = select.select([made.stdout], [], [], SOON_S)
    if not found:
        made.kill()
        made.communicate()
        pytest.fail("a stderr that nobody reads stops who logs")
    assert made.stdout.readline() == b"went on\n"
    return made


def test_a_reader_of_stderr_that_stops_stops_nobody_and_gets_what_is_kept() -> None:
    lines = 2 * log_lines.MOST_BYTES // 1000
    with began(lines) as made:
        assert made.stdin is not None
        assert made.stderr is not None
        kept: list[str] = []
        while " INFO    line " in (said := made.stderr.readline().decode()):
            kept.append(said)
        made.stdin.write(b"\n")
        made.stdin.close()
        assert f" WARNING {lines - len(kept)} log lines were dropped: stderr was not read for " in said
        assert [int(line.split()[3]) for line in kept] == list(range(len(kept)))
        assert len(kept) > lines / 4
        assert made.stderr.read().decode().endswith("INFO    the last line\n")


def test_a_reader_of_stderr_that_stops_for_good_does_not_hold_up_the_exit() -> None:
    with began(1000) as made:
        assert made.stdin is not None
        made.stdin.close()
        assert made.wait(SOON_S) == 0
