"""The file of the history: made, found again, refused, moved aside, on a full disk."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.history_rows import NOON, row

from launcher.base.errors import LauncherError
from launcher.telemetry.history import History
from launcher.telemetry.history_file import FILE_BYTES, HistoryFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history" / "history.bin"


def put(path: Path, ms: int = NOON) -> None:
    with closing(HistoryFile(path)) as file:
        History(file, NOON).add([row(ms, queued=3)])


def newest(path: Path) -> int:
    with closing(HistoryFile(path)) as file:
        assert file.moved_to is None
        return History(file, NOON + 3000).find("1h", 0, NOON + 3000).until


def test_what_was_written_is_found_again(path: Path) -> None:
    put(path)
    assert newest(path) == NOON
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == FILE_BYTES


def test_all_of_its_space_is_allocated_at_once(path: Path) -> None:
    """So that a disk that fills up later does not matter."""
    with closing(HistoryFile(path)):
        assert path.stat().st_blocks * 512 >= FILE_BYTES


def test_one_daemon_at_a_time(path: Path) -> None:
    with closing(HistoryFile(path)):
        with pytest.raises(LauncherError, match="another daemon uses it") as caught:
            HistoryFile(path)
        assert "history_path" in caught.value.remedy
    assert newest(path) == 0


@pytest.mark.parametrize("damage", ["header", "short", "long", "text"])
def test_a_broken_file_is_moved_aside_and_a_new_one_begins(path: Path, damage: str) -> None:
    put(path)
    with path.open("r+b") as file:
        match damage:
            case "header":
                file.seek(100)
                file.write(b"#")
            case "short":
                file.truncate(FILE_BYTES - 1)
            case "long":
                file.truncate(FILE_BYTES + 1)
            case _:
                file.write(b"some text")
    before = path.read_bytes()
    with closing(HistoryFile(path)) as found:
        assert found.moved_to is not None
        assert found.moved_to.read_bytes() == before
    assert newest(path) == 0


def test_another_programs_file_of_another_name_is_not_touched(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[proxy]\n")
    with pytest.raises(LauncherError, match="another program's file"):
        HistoryFile(config)
    assert config.read_text() == "[proxy]\n"
    assert os.listdir(tmp_path) == ["config.toml"]  # noqa: PTH208


@pytest.mark.parametrize("size", [0, FILE_BYTES])
def test_a_process_that_was_killed_while_it_made_the_file(path: Path, size: int) -> None:
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(size)
    put(path)
    assert newest(path) == NOON


def test_what_is_no_regular_file_is_refused(path: Path) -> None:
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.raises(LauncherError, match="not a regular file"):
        HistoryFile(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(LauncherError, match="is a directory"):
        HistoryFile(path)
    path.rmdir()
    path.symlink_to(path.parent / "elsewhere")
    with pytest.raises(LauncherError, match="cannot keep the history"):
        HistoryFile(path)


def test_a_removed_file_is_noticed(path: Path) -> None:
    with closing(HistoryFile(path)) as file:
        assert not file.replaced
        path.unlink()
        assert file.replaced
        path.write_bytes(b"")
        assert file.replaced


def test_a_file_that_is_cut_off_while_it_is_used(path: Path) -> None:
    """With mmap this is a SIGBUS."""
    with closing(HistoryFile(path)) as file:
        history = History(file, NOON)
        history.add([row(NOON, queued=1)])
        os.truncate(path, 100)
        assert not list(history.every("1h"))
        history.add([row(NOON + 2000, queued=1)])
        assert [each.ms for each in history.every("1h")] == [NOON + 2000]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, too small for the file."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a file system; the limit on file sizes below stands for it")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_refused_at_once_and_gets_its_space_back(small_disk: Path) -> None:
    path = small_disk / "history.bin"
    with pytest.raises(LauncherError, match="no space left on device") as caught:
        HistoryFile(path)
    assert "8 MB" in caught.value.remedy
    assert path.stat().st_size == 0


LIMITED = """
import resource, sys
from pathlib import Path
from launcher.base.errors import LauncherError
from launcher.telemetry.history_file import HistoryFile
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
try:
    HistoryFile(Path(sys.argv[1]))
except LauncherError as error:
    print(error.message)
"""


def test_a_limit_on_file_sizes(path: Path) -> None:
    assert resource.RLIMIT_FSIZE
    done = subprocess.run([sys.executable, "-c", LIMITED, path], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) != (-signal.SIGXFSZ, "")
    assert "file too large" in done.stdout, done


def test_a_closed_file_reads_no_other(path: Path) -> None:
    file = HistoryFile(path)
    file.close()
    with path.open("rb"), pytest.raises(OSError, match="Bad file descriptor"):
        file.read(0, 10)
