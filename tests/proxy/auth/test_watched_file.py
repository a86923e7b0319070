"""When a file counts as changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.proxy.auth.watched_file import WatchedFile, excess_mode


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "f"
    made.write_text("one")
    return made


def test_a_change_is_told_once(path: Path) -> None:
    file = WatchedFile(str(path))
    assert file.look()  # the first look
    assert not file.changed(1.0)
    path.write_text("three")
    assert not file.changed(1.9)  # once a second
    assert file.changed(2.0)
    assert not file.changed(4.0)


def test_a_replaced_file_of_the_same_size_and_time(path: Path) -> None:
    file = WatchedFile(str(path))
    file.look()
    times = path.stat()
    fresh = path.with_name("fresh")
    fresh.write_text("two")
    os.utime(fresh, ns=(times.st_atime_ns, times.st_mtime_ns))
    fresh.replace(path)
    assert file.look()


def test_coming_and_going(path: Path) -> None:
    file = WatchedFile(str(path))
    file.look()
    path.unlink()
    assert file.look()
    assert not file.look()
    path.write_text("one")
    assert file.look()


def test_a_symlink_that_moves(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("one")
    link = tmp_path / "link"
    link.symlink_to(path)
    file = WatchedFile(str(link))
    file.look()
    link.unlink()
    link.symlink_to(other)
    assert file.look()


def test_modes(path: Path) -> None:
    path.chmod(0o640)
    assert excess_mode(path.stat(), 0o640) is None
    path.chmod(0o604)
    assert excess_mode(path.stat(), 0o640) == "0604"
