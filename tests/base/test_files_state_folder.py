from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from launcher.base.errors import LauncherError
from launcher.base.files import make_folder, state_folder

HOME = {"HOME": "/home/ada"}


@pytest.mark.parametrize(
    ("environ", "uid", "folder"),
    [
        ({}, 0, "/var/lib/numa-launcher"),
        (HOME, 1000, "/home/ada/.local/state/numa-launcher"),
        ({**HOME, "XDG_STATE_HOME": "/data/state"}, 1000, "/data/state/numa-launcher"),
        ({**HOME, "XDG_STATE_HOME": "relative"}, 1000, "/home/ada/.local/state/numa-launcher"),
        ({**HOME, "XDG_STATE_HOME": "/data/state"}, 0, "/var/lib/numa-launcher"),
        ({"STATE_DIRECTORY": "/var/lib/other"}, 0, "/var/lib/other"),
        ({"STATE_DIRECTORY": "/var/lib/a:/var/lib/b"}, 1000, "/var/lib/a"),
    ],
)
def test_where_it_is(environ: dict[str, str], uid: int, folder: str) -> None:
    assert state_folder(None, environ, uid) == Path(folder)


def test_a_chosen_folder_has_precedence() -> None:
    assert state_folder(Path("/tmp/x"), {"STATE_DIRECTORY": "/var/lib/other"}, 0) == Path("/tmp/x")
    assert state_folder(Path("x"), {}, 0) == Path.cwd() / "x"


def test_the_home_folder_of_the_password_file() -> None:
    assert state_folder(None, {}, 1) == Path("/usr/sbin/.local/state/numa-launcher")  # daemon's on Debian


def test_a_user_without_a_home_folder() -> None:
    with pytest.raises(LauncherError, match="user 4242424 has no home folder") as caught:
        state_folder(None, {}, 4242424)
    assert caught.value.remedy == "name a folder with --state-dir DIR"


def test_a_new_folder_is_for_others_to_read(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        folder = make_folder(tmp_path / "state" / "bench")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert make_folder(folder) == folder


def test_where_others_may_replace_results_nothing_is_kept(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "bench")
    folder.chmod(0o775)
    with pytest.raises(LauncherError, match="users other than its owner may write there"):
        make_folder(folder)


def test_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "bench").write_text("")
    with pytest.raises(LauncherError, match=r"cannot keep results in .*: file exists"):
        make_folder(tmp_path / "bench")
