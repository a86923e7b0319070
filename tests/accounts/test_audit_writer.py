"""The writer of an audit trail: files by day and size, what a crash leaves, folders that others change."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.audit_trails import DAY_S, Clock, a_writer, an_entry, last_file, stop, write

from launcher.accounts import audit_verify
from launcher.accounts.audit_chain import FileName
from launcher.accounts.audit_verify import verify

KILLED = """
import sys, time
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from support.audit_trails import an_entry
from launcher.config.usage_schema import Audit
from launcher.accounts.audit import AuditTrail
from launcher.accounts import audit
from launcher.base.writer import Writer
audit.TURN_S = 0.01
folder = Path(sys.argv[1])
trail = AuditTrail(folder, Audit(path=str(folder), max_bytes=200_000), "1.0")
Writer("audit", trail).start()
assert trail.flush(60), trail.problem
print("began", flush=True)
number = 0
while True:
    for number in range(number, number + 40):
        trail.put(an_entry(number, time.time()))
    time.sleep(0.002)
"""


def numbers(folder: Path) -> list[int]:
    return [name.number for name in audit_verify.files_in(folder)]


def test_a_restart_continues_the_file_and_the_chain(tmp_path: Path) -> None:
    clock = Clock()
    for turn in range(3):
        writer = a_writer(tmp_path / "trail", clock)
        write(writer, range(turn))
        stop(writer)
    report = verify(tmp_path / "trail")
    assert report.wrong is None
    assert report.kinds == {"file": 1, "start": 3, "request": 3, "stop": 3}
    assert report.crashes == 0


def test_a_day_and_a_size_begin_a_new_file(tmp_path: Path) -> None:
    clock = Clock()
    writer = a_writer(tmp_path / "trail", clock, max_bytes=2000)
    write(writer, range(10))
    write(writer, range(1))
    assert numbers(tmp_path / "trail") == [1, 2]
    clock.now += DAY_S
    write(writer, range(1))
    stop(writer)
    assert [str(name) for name in audit_verify.files_in(tmp_path / "trail")] == [
        "audit-2026-09-21-000001.jsonl", "audit-2026-09-21-000002.jsonl", "audit-2026-09-22-000003.jsonl",
    ]  # fmt: skip
    assert verify(tmp_path / "trail").wrong is None


def test_a_clock_that_is_set_back_begins_a_file_of_its_day(tmp_path: Path) -> None:
    clock = Clock()
    writer = a_writer(tmp_path / "trail", clock)
    clock.now -= 3 * DAY_S
    write(writer, range(2))
    stop(writer)
    assert numbers(tmp_path / "trail") == [1, 2]
    assert verify(tmp_path / "trail").wrong is None


def test_old_files_go_on_the_first_turn_after_days_without_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All files but the new one are past keep_days: the record of their removal names the new file's first line."""
    clock = Clock()
    writer = a_writer(tmp_path / "trail", clock, keep_days=2)
    write(writer, range(3))
    clock.now += 5 * DAY_S
    write(writer, range(3))
    assert numbers(tmp_path / "trail") == [2]
    assert caplog.messages == []
    stop(writer)
    report = verify(tmp_path / "trail")
    assert (report.wrong, report.kinds["pruned"]) == (None, 1)


def test_permissions(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        a_writer(tmp_path / "trail", Clock()).close()
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "trail").stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "trail").iterdir()} == {0o640}


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trail").mkdir()
    (tmp_path / "trail").chmod(0o777)
    with pytest.raises(PermissionError, match="other users"):
        a_writer(tmp_path / "trail", Clock())


def test_one_process_writes_a_trail(tmp_path: Path) -> None:
    first, clock = a_writer(tmp_path / "trail", Clock()), Clock()
    second = a_writer(tmp_path / "trail", clock, opened=False)
    with pytest.raises(BlockingIOError, match="another process"):
        second.open()
    stop(first)
    second.open()
    stop(second)
    assert verify(tmp_path / "trail").wrong is None


def test_a_file_removed_below_the_writer_is_followed_by_a_new_one(tmp_path: Path) -> None:
    writer = a_writer(tmp_path / "trail", Clock())
    write(writer, range(3))
    last_file(tmp_path / "trail").unlink()
    write(writer, range(3))
    stop(writer)
    assert numbers(tmp_path / "trail") == [2]
    assert verify(tmp_path / "trail").wrong is not None


def test_a_file_cut_below_the_writer_is_named(tmp_path: Path) -> None:
    writer = a_writer(tmp_path / "trail", Clock())
    write(writer, range(3))
    path = last_file(tmp_path / "trail")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    write(writer, range(3))
    stop(writer)
    report = verify(tmp_path / "trail")
    assert report.wrong is not None
    assert str(report.wrong.place) == f"{path.name}:4"


def test_a_folder_removed_below_the_writer_comes_back(tmp_path: Path) -> None:
    writer = a_writer(tmp_path / "trail", Clock())
    write(writer, range(3))
    for path in (tmp_path / "trail").iterdir():
        path.unlink()
    (tmp_path / "trail").rmdir()
    write(writer, range(3))
    stop(writer)
    report = verify(tmp_path / "trail")
    assert numbers(tmp_path / "trail") == [2]
    assert report.wrong is not None
    assert "no line records" in report.wrong.what


def test_an_empty_file_of_a_crash_gets_its_first_line(tmp_path: Path) -> None:
    clock = Clock()
    write(writer := a_writer(tmp_path / "trail", clock), range(3))
    writer.close()
    (tmp_path / "trail" / str(FileName(2, "2026-09-21"))).touch()
    write(writer := a_writer(tmp_path / "trail", clock), range(3))
    stop(writer)
    report = verify(tmp_path / "trail")
    assert report.wrong is None
    assert report.kinds["file"] == 2


def test_a_torn_first_line_is_marked(tmp_path: Path) -> None:
    clock = Clock()
    write(writer := a_writer(tmp_path / "trail", clock), range(3))
    writer.close()
    (tmp_path / "trail" / str(FileName(2, "2026-09-21"))).write_bytes(b'{"kind":"file","n":')
    stop(a_writer(tmp_path / "trail", clock))
    stop(a_writer(tmp_path / "trail", clock))
    report = verify(tmp_path / "trail")
    assert report.wrong is None
    assert (report.torn_bytes, report.kinds["file"]) == (19, 2)


@pytest.mark.parametrize("end", ["", "\n", '{"kind":"torn","n":9'])
def test_a_crash_while_torn_bytes_are_marked(tmp_path: Path, end: str) -> None:
    clock = Clock()
    write(writer := a_writer(tmp_path / "trail", clock), range(3))
    writer.close()
    with last_file(tmp_path / "trail").open("ab") as file:
        file.write(f'{{"kind":"req\n{end}'.encode())
    stop(a_writer(tmp_path / "trail", clock))
    assert verify(tmp_path / "trail").wrong is None


def test_whole_lines_behind_the_head_are_kept(tmp_path: Path) -> None:
    """The daemon was killed after a write and before the head's."""
    clock = Clock()
    writer = a_writer(tmp_path / "trail", clock)
    head = (tmp_path / "trail" / audit_verify.HEAD).read_bytes()
    write(writer, range(5))
    writer.close()
    (tmp_path / "trail" / audit_verify.HEAD).write_bytes(head)
    assert verify(tmp_path / "trail").wrong is None
    stop(a_writer(tmp_path / "trail", clock))
    report = verify(tmp_path / "trail")
    assert report.wrong is None
    assert (report.kinds["request"], report.torn_bytes) == (5, 0)


@pytest.mark.parametrize("size", [0, 511])
def test_a_write_that_fails_half_way_is_repeated_at_its_place(tmp_path: Path, size: int) -> None:
    """RLIMIT_FSIZE stands for a full disk."""
    resource = pytest.importorskip("resource")
    clock = Clock()
    writer = a_writer(tmp_path / "trail", clock)
    written = last_file(tmp_path / "trail").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (written + size, before[1]))
        writer.add([an_entry(1), an_entry(2)])
        for _ in range(3):
            with pytest.raises(OSError, match="File too large"):
                writer.turn()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert last_file(tmp_path / "trail").stat().st_size == written + size
    writer.turn()
    stop(writer)
    report = verify(tmp_path / "trail")
    assert report.wrong is None
    assert report.kinds == {"file": 1, "start": 1, "request": 2, "stop": 1}


def killed_once(folder: Path, after_bytes: int) -> None:
    """A process that writes is killed when it has written so many bytes of requests."""

    def size() -> int:
        return sum(file.stat().st_size for file in folder.iterdir())

    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder), *paths], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"began\n"
        begun = size()
        while size() < begun + after_bytes:
            time.sleep(0.001)
        process.kill()
        assert process.wait() == -signal.SIGKILL


def killed(folder: Path, times: int) -> None:
    """A writing process is killed somewhere; each time the trail is whole, and the next one continues it."""
    chance = random.Random(times)  # noqa: S311
    for turn in range(times):
        before = verify(folder).last.n if turn else 0
        killed_once(folder, chance.randrange(1, 100_000))
        report = verify(folder)
        assert report.wrong is None, report.wrong
        assert report.last.n > before
    writer = a_writer(folder, Clock())
    stop(writer)
    report = verify(folder)
    assert report.wrong is None
    assert (report.crashes, report.notes) == (times, ())


def test_sigkill(tmp_path: Path) -> None:
    killed(tmp_path / "trail", 5)


@pytest.mark.release
def test_sigkill_at_50_places(tmp_path: Path) -> None:
    killed(tmp_path / "trail", 50)
