"""What journald is sent. The journal itself (/run/systemd/journal/socket) is tested in a virtual host only."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.host import journal


class FakeJournal:
    """Takes what systemd.journal.send takes: a message, and fields that are text but for CODE_LINE."""

    def __init__(self) -> None:
        self.entries: list[dict[str, str]] = []

    def send(self, message: str, **fields: str) -> None:
        assert isinstance(fields.get("CODE_LINE", 0), int)
        assert all(isinstance(value, str) for name, value in fields.items() if name != "CODE_LINE"), fields
        assert all(name == name.upper() and not name.startswith("_") for name in fields), fields
        self.entries.append({"MESSAGE": message, **fields})


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, put back afterwards."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    quiet = {name: logging.getLogger(name).level for name in ("aiohttp.access", "asyncio")}
    access = logging.getLogger(journal.ACCESS)
    yield root
    access.handlers[:], access.propagate = [], True
    root.handlers[:] = before
    root.setLevel(level)
    for name, was in quiet.items():
        logging.getLogger(name).setLevel(was)


def logger(fake: FakeJournal) -> logging.Logger:
    log = logging.Logger("launcher.test")  # noqa: LOG001  one of its own
    handler = journal.FieldsHandler(sender_function=fake.send)
    handler.setFormatter(logging.Formatter())
    log.addHandler(handler)
    return log


def test_an_event_and_its_fields() -> None:
    fake = FakeJournal()
    logger(fake).warning("slot %d: %s", 3, "gone", extra={"slot": 3, "generation": 2, "request_id": "r"})
    (entry,) = fake.entries
    assert entry["MESSAGE"] == "slot 3: gone"
    assert entry["PRIORITY"] == "4"
    assert (entry["LOGGER"], entry["SYSLOG_IDENTIFIER"]) == ("launcher.test", "numa-launcher")
    assert entry["CODE_FILE"].endswith("test_journal.py")
    fields = {name: value for name, value in entry.items() if name.startswith("NUMA_LAUNCHER_")}
    assert fields == {
        "NUMA_LAUNCHER_SLOT": "3",
        "NUMA_LAUNCHER_GENERATION": "2",
        "NUMA_LAUNCHER_REQUEST_ID": "r",
    }


def test_many_lines_are_written_with_one_call() -> None:
    writes: list[str] = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    handler = journal.LineHandler(Stream())
    handler.write_lines("launcher.access", [(20, "GET /a 200", {}), (10, "GET /\x1bb" + "c" * 9000, {})])
    (text,) = writes
    first, second, rest = text.split("\n")
    assert first[8:] == " INFO    GET /a 200"
    assert second[8:].startswith(" DEBUG   GET /\\x1bbccc")
    assert len(second) < 8300
    assert rest == ""


def test_many_events_each_have_their_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[dict[str, str]] = []

    def sendv(*fields: str) -> None:
        entries.append(dict(field.split("=", 1) for field in fields))

    monkeypatch.setattr(journal.FieldsHandler, "sendv", staticmethod(sendv))
    lines = [(20, "one", {"status": 200}), (10, "t\nwo", {"slot": None, "path": "\n="})]
    journal.FieldsHandler().write_lines("launcher.access", lines)
    one, two = entries
    assert (one["MESSAGE"], one["PRIORITY"], one["NUMA_LAUNCHER_STATUS"]) == ("one", "6", "200")
    assert (one["LOGGER"], one["SYSLOG_IDENTIFIER"]) == ("launcher.access", "numa-launcher")
    assert (two["MESSAGE"], two["PRIORITY"]) == ("t\\nwo", "7")
    assert (two["NUMA_LAUNCHER_SLOT"], two["NUMA_LAUNCHER_PATH"]) == ("None", "\\n=")


def test_lines_that_cannot_be_written_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    closed = io.StringIO()
    closed.close()
    journal.LineHandler(closed).write_lines("launcher.access", [(20, "x", {})])

    def no_journal(*fields: str) -> None:
        raise OSError("no journal")

    monkeypatch.setattr(journal.FieldsHandler, "sendv", staticmethod(no_journal))
    journal.FieldsHandler().write_lines("launcher.access", [(20, "x", {})])


def test_an_exception_comes_along() -> None:
    fake = FakeJournal()
    try:
        raise ValueError("deep down")
    except ValueError:
        logger(fake).exception("it failed")
    (entry,) = fake.entries
    assert entry["MESSAGE"].startswith("it failed\nTraceback")
    assert "ValueError: deep down" in entry["MESSAGE"]
    assert entry["PRIORITY"] == "3"


def test_logging_never_ends_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FakeJournal):
        def send(self, message: str, **fields: str) -> None:
            raise OSError("no journal")

    monkeypatch.setattr(logging, "raiseExceptions", False)
    logger(Broken()).error("x")


def test_the_real_library_takes_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """It formats every field before it looks for a journal; without one the entry is dropped."""
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    log = logging.Logger("launcher.test")  # noqa: LOG001  one of its own
    log.addHandler(journal.FieldsHandler())
    log.warning("slot %d: %s", 3, "gone", extra={"slot": 3})
    journal.FieldsHandler().write_lines("launcher.test", [(20, "é", {"slot": 3})])
    assert stderr.getvalue() == ""


def test_only_extra_is_a_field() -> None:
    record = logging.makeLogRecord({"msg": "m", "args": (), "slot": 1})
    assert journal.fields_of(record) == {"slot": 1}
    logging.Formatter("%(asctime)s %(message)s").format(record)  # adds message and asctime
    assert journal.fields_of(record) == {"slot": 1}


def test_what_a_library_adds_to_every_record_is_no_field() -> None:
    """Ray does, in a process that imports it."""
    record = logging.makeLogRecord({"msg": "m", "args": (), "slot": 1, "_of_a_library": 5})
    assert journal.fields_of(record) == {"slot": 1}
    fake = FakeJournal()
    logger(fake).error("m", extra={"slot": 1, "_of_a_library": 5})
    assert "NUMA_LAUNCHER_SLOT" in fake.entries[0]
    assert not [name for name in fake.entries[0] if "LIBRARY" in name]


def test_lines_of_evidence_are_a_list_and_one_field_of_the_journal() -> None:
    record = logging.makeLogRecord({"msg": "m", "args": (), "evidence": ("a\x1b[2J", "b")})
    assert journal.fields_of(record) == {"evidence": ["a\\x1b[2J", "b"]}
    fake = FakeJournal()
    logger(fake).error("m", extra={"evidence": ("a\x1b[2J", "b")})
    assert fake.entries[0]["NUMA_LAUNCHER_EVIDENCE"] == "a\\x1b[2J; b"


def test_under_journal_is_what_systemd_says_of_stderr(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "stderr").open("w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        facts = os.fstat(stderr.fileno())
        monkeypatch.delenv("JOURNAL_STREAM", raising=False)
        assert not journal.under_journal()
        monkeypatch.setenv("JOURNAL_STREAM", f"{facts.st_dev}:{facts.st_ino}")
        assert journal.under_journal()
        monkeypatch.setenv("JOURNAL_STREAM", f"{facts.st_dev}:{facts.st_ino + 1}")  # stderr was redirected
        assert not journal.under_journal()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not journal.under_journal()


def test_set_up(root: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    journal.set_up("info", "auto")
    (handler,) = root.handlers
    assert not isinstance(handler, journal.FieldsHandler)
    logging.getLogger("launcher.x").info("hello %d", 7, extra={"slot": 1})
    logging.getLogger("launcher.x").debug("unheard")
    assert stderr.getvalue().endswith("INFO    hello 7\n")
    assert "unheard" not in stderr.getvalue()
    journal.set_up("debug", "journal")
    (handler,) = root.handlers
    assert isinstance(handler, journal.FieldsHandler)
    assert root.level == logging.DEBUG
    access = logging.getLogger("launcher.access")
    assert (access.handlers, access.propagate) == ([handler], False)
