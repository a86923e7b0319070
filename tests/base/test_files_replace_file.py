from __future__ import annotations

import stat
from pathlib import Path

import pytest

from launcher.base.files import replace_file


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_by_default_only_this_user_may_read_file_and_folder(tmp_path: Path) -> None:
    replace_file(tmp_path / "new" / "file", b"x")
    assert (mode(tmp_path / "new"), mode(tmp_path / "new" / "file")) == (0o700, 0o600)


def test_wider_modes_on_request(tmp_path: Path) -> None:
    replace_file(tmp_path / "new" / "file", b"x", mode=0o644, folder_mode=0o755)
    assert (mode(tmp_path / "new"), mode(tmp_path / "new" / "file")) == (0o755, 0o644)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")
    (tmp_path / ".file.new").mkdir()
    with pytest.raises(OSError, match=r"file\.new"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"


def test_nothing_is_written_where_everybody_may_replace_it(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="other users may write there"):
        replace_file(folder / "file", b"x")
    assert list(folder.iterdir()) == []
    folder.chmod(0o1777)
    replace_file(folder / "file", b"x")
