"""When a file counts as changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.base.errors import LauncherError
from launcher.base.files import WatchedFile, excess_mode


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "f"
    made.write_text("one")
    return made


class Reader(WatchedFile[str]):
    """Counts how often its file is read."""

    def __init__(self, path: Path) -> None:
        self.reads = 0
        self._now = 0.0
        super().__init__("word", lambda: self._read_word(path), str(path))

    def _read_word(self, path: Path) -> str:
        self.reads += 1
        try:
            return path.read_text()
        except OSError as error:
            raise LauncherError(f"cannot read it: {error}", "write it") from None

    def later(self) -> str:
        self._now += 2.0
        return self.latest(self._now)


def test_a_change_is_read_once(path: Path) -> None:
    file = Reader(path)
    assert file.latest(1.0) == "one"
    path.write_text("three")
    assert file.latest(1.9) == "one"  # once a second
    assert file.latest(2.0) == file.latest(4.0) == "three"
    assert file.reads == 2


def test_a_replaced_file_of_the_same_size_and_time(path: Path) -> None:
    file = Reader(path)
    times = path.stat()
    fresh = path.with_name("fresh")
    fresh.write_text("two")
    os.utime(fresh, ns=(times.st_atime_ns, times.st_mtime_ns))
    fresh.replace(path)
    assert file.later() == "two"


def test_coming_and_going(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = Reader(path)
    path.unlink()
    assert file.later() == file.later() == "one"
    assert file.reads == 2
    assert not file.reload()
    assert caplog.text.count("keeping the word read before (write it)") == 1
    path.write_text("two")
    assert file.later() == "two"


def test_a_symlink_that_moves(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("two")
    link = tmp_path / "link"
    link.symlink_to(path)
    file = Reader(link)
    link.unlink()
    link.symlink_to(other)
    assert file.later() == "two"


def test_either_of_two_files(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    file = WatchedFile("words", lambda: [path.read_text(), other.exists()], str(path), str(other))
    other.write_text("two")
    assert file.latest(1.0) == ["one", True]


def test_modes(path: Path) -> None:
    path.chmod(0o640)
    assert excess_mode(path.stat(), 0o640) is None
    path.chmod(0o604)
    assert excess_mode(path.stat(), 0o640) == "0604"
