"""The audit trail of a daemon: entries are taken at once, written within a second, and lost ones are counted."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.audit_trails import an_entry
from support.written import written

from launcher.accounts import audit
from launcher.accounts.audit import AuditTrail
from launcher.accounts.audit_chain import ControlEntry
from launcher.accounts.audit_verify import HEAD, verify
from launcher.base import writer
from launcher.config.usage_schema import Audit


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "TURN_S", 0.02)
    monkeypatch.setattr(writer, "RETRY_S", 0.02)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@contextmanager
def running(folder: Path, *, strict: bool = False) -> Iterator[AuditTrail]:
    with written(AuditTrail(folder, Audit(path=str(folder), strict=strict), "1.0")) as trail:
        trail.flush(60)
        yield trail


def lines(folder: Path, kind: str) -> list[dict[str, object]]:
    found = []
    for path in sorted(folder.glob("audit-*.jsonl")):
        found += [
            line for text in path.read_text().splitlines() if (line := json.loads(text))["kind"] == kind
        ]
    return found


def test_requests_and_control_actions_are_written_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "trail"
    with running(folder) as trail:
        assert trail.problem is None
        for number in range(200):
            trail.put(an_entry(number))
        trail.put(ControlEntry(at=time.time(), verb="drain", slot="1", user="ada", uid=1000))
        wait_until(lambda: trail.lines == 201)
        assert verify(folder).wrong is None
    assert [line["output_tokens"] for line in lines(folder, "request")] == list(range(200))
    assert lines(folder, "control")[0]["user"] == "ada"
    report = verify(folder)
    assert report.wrong is None
    assert report.kinds["stop"] == 1


def test_what_waits_is_written_at_the_end(tmp_path: Path) -> None:
    with running(tmp_path / "trail") as trail:
        for number in range(10_000):
            trail.put(an_entry(number))
    assert verify(tmp_path / "trail").kinds["request"] == 10_000


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A tmpfs of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount; RLIMIT_FSIZE stands for a full disk in test_audit_writer.py")
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=0755", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> Path:
    path = folder / "filler"
    with path.open("wb") as file:
        for size in (4096, 1):
            try:
                while True:
                    os.write(file.fileno(), b"x" * size)
            except OSError:
                continue
    return path


def test_a_full_disk_loses_nothing_while_memory_lasts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "launcher.audit")
    with small_disk(tmp_path / "disk") as disk, running(disk / "trail", strict=True) as trail:
        assert trail.refusal() is None
        filler = fill(disk)
        for number in range(50):
            trail.put(an_entry(number))
        wait_until(trail.refusal)
        assert trail.refusal() == "no space left on device"
        time.sleep(0.2)
        filler.unlink()
        wait_until(lambda: trail.refusal() is None)
        wait_until(lambda: trail.lines == 50)
        report = verify(disk / "trail")
        assert report.wrong is None
        assert (report.kinds["request"], report.lost) == (50, 0)
    said = [record.getMessage() for record in caplog.records if record.name == "launcher.audit"]
    assert len(said) == 2, said
    assert "no space left on device; requests are refused until" in said[0]
    assert said[1].endswith("is written again")


def test_what_memory_does_not_hold_is_counted_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "MAX_WAITING", 10)
    (tmp_path / "trail").mkdir(mode=0o777)
    (tmp_path / "trail").chmod(0o777)
    with running(tmp_path / "trail") as trail:
        assert "other users may write" in trail.problem.why
        assert trail.refusal() is None
        for number in range(25):
            trail.put(an_entry(number))
        assert trail.lost == 15
        (tmp_path / "trail").chmod(0o750)
        wait_until(lambda: trail.lines == 10)
        wait_until(lambda: lines(tmp_path / "trail", "lost"))
    (lost,) = lines(tmp_path / "trail", "lost")
    assert (lost["lost"], "other users may write" in str(lost["reason"])) == (15, True)
    report = verify(tmp_path / "trail")
    assert report.wrong is None
    assert report.lost == 15


def test_a_second_daemon_writes_when_the_first_has_ended(tmp_path: Path) -> None:
    with running(tmp_path / "trail") as first, running(tmp_path / "trail", strict=True) as second:
        assert second.refusal() == "another process writes this trail"
        second.put(an_entry(2))
        first.put(an_entry(1))
        first.writer.stop(20)
        wait_until(lambda: second.refusal() is None)
    assert [line["output_tokens"] for line in lines(tmp_path / "trail", "request")] == [1, 2]
    assert verify(tmp_path / "trail").wrong is None


def test_a_disk_that_hangs_is_a_reason_to_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "DISK_S", 0.05)
    hangs = threading.Event()
    goes_on = threading.Event()
    sync = os.fdatasync

    def slow(fd: int) -> None:
        hangs.set()
        goes_on.wait(20)
        sync(fd)

    with running(tmp_path / "trail", strict=True) as trail:
        monkeypatch.setattr(os, "fdatasync", slow)
        trail.put(an_entry(1))
        assert hangs.wait(20)
        wait_until(trail.refusal)
        assert "takes longer" in str(trail.refusal())
        goes_on.set()
        wait_until(lambda: trail.refusal() is None)


def test_an_entry_that_cannot_be_encoded_is_lost_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tmp_path / "trail", strict=True) as trail:
        trail.put(an_entry(1).__class__(ended_at=1e300, request_id="far away"))
        trail.put(an_entry(2))
        wait_until(lambda: trail.lines == 1)
        assert trail.refusal() is None
    assert "cannot be recorded" in caplog.text
    report = verify(tmp_path / "trail")
    assert report.wrong is None
    assert (report.kinds["request"], report.lost) == (1, 1)


def test_it_is_not_written_before_it_starts(tmp_path: Path) -> None:
    trail = AuditTrail(tmp_path / "trail", Audit(strict=True), "1.0")
    assert trail.refusal() == "it is not open yet"
    assert not (tmp_path / "trail" / HEAD).exists()
