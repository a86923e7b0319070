"""What root believes, and what it moves aside. Only root can make files of another user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.base.files import own_folder, read_own

OTHER = 4242
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can make files of another user: run it as root"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "fleet"
    found.mkdir(mode=0o700)
    (found / "members.json").write_bytes(b"mine")
    (found / "members.json").chmod(0o600)
    return found


def test_an_own_file_is_read(folder: Path) -> None:
    assert read_own(folder / "members.json") == b"mine"
    with pytest.raises(FileNotFoundError):
        read_own(folder / "other")
    with pytest.raises(FileNotFoundError):
        read_own(folder / "other" / "file")


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        (lambda it: (it / "members.json").chmod(0o660), "other users may write to it"),
        (lambda it: (it / "members.json").chmod(0o606), "other users may write to it"),
        (lambda it: it.chmod(0o770), "other users may write to it"),
        (lambda it: it.chmod(0o1777), "other users may write to it"),
        (lambda it: os.chown(it / "members.json", OTHER, OTHER), "user 4242 owns it"),
        (lambda it: os.chown(it, OTHER, OTHER), "user 4242 owns it"),
        (lambda it: ((it / "members.json").rename(it / "b"), (it / "members.json").symlink_to("b")), "symbolic link"),
        (lambda it: (it.rename(it.with_name("b")), it.symlink_to("b")), "symbolic link"),
        (lambda it: ((it / "members.json").unlink(), os.mkfifo(it / "members.json", 0o600)), "it is no file"),
    ],
)  # fmt: skip
def test_what_others_may_have_written_is_refused(folder: Path, attack: object, why: str) -> None:
    attack(folder)  # type: ignore[operator]
    with pytest.raises(PermissionError, match=why):
        read_own(folder / "members.json")


def test_a_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    assert own_folder(tmp_path / "state" / "fleet") == []
    assert (tmp_path / "state" / "fleet").stat().st_mode & 0o777 == 0o700
    assert own_folder(tmp_path / "state" / "fleet") == []


def test_a_planted_folder_is_moved_aside(folder: Path) -> None:
    os.chown(folder, OTHER, OTHER)
    moved = own_folder(folder)
    assert moved == [f"{folder}.foreign-1"]
    assert list(folder.iterdir()) == []
    assert Path(moved[0], "members.json").read_bytes() == b"mine"
    assert own_folder(folder) == moved  # said until it is removed


def test_a_planted_link_is_moved_aside_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "fleet").symlink_to("secrets")
    os.chown(tmp_path / "fleet", OTHER, OTHER, follow_symlinks=False)
    own_folder(tmp_path / "fleet")
    assert not (tmp_path / "fleet").is_symlink()
    assert list((tmp_path / "secrets").iterdir()) == []


def test_planted_files_in_a_folder_that_is_roots_by_now_are_moved_aside(folder: Path) -> None:
    """As tmpfiles leaves a planted folder: it changes the owner of the folder, and of nothing in it."""
    (folder / "haproxy.cfg").symlink_to("/etc/passwd")
    for name in ("haproxy.cfg", "members.json"):
        os.chown(folder / name, OTHER, OTHER, follow_symlinks=False)
    (folder / "upgrade.json").write_text("{}")
    shared = folder.with_name("shared")  # root's, and the instances' group may write to it: so it may link it
    shared.write_text("planted")
    shared.chmod(0o660)
    (folder / "MANIFEST").hardlink_to(shared)
    folder.chmod(0o3770)
    assert [Path(path).name for path in own_folder(folder)] == [
        "MANIFEST.foreign-1",
        "haproxy.cfg.foreign-1",
        "members.json.foreign-1",
    ]
    assert (folder / "upgrade.json").exists()
    assert folder.stat().st_mode & 0o022 == 0


def test_as_a_program_before_one_that_is_not_ours(folder: Path) -> None:
    os.chown(folder, OTHER, OTHER)
    line = [sys.executable, "-m", "launcher.base.files"]
    done = subprocess.run([*line, str(folder)], check=False, capture_output=True, text=True)
    assert done.returncode == 0
    assert f"another user had made '{folder}.foreign-1'" in done.stderr
    done = subprocess.run([*line, "/dev/null"], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "cannot use '/dev/null': file exists\n")
