"""The member list and its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.base.errors import LauncherError
from launcher.fleet.members import Member, MemberList, MemberState, read_members, write_members


def test_a_list_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    assert read_members(path) == MemberList()
    one = Member(host="a", address="10.0.0.1:8000", state=MemberState.DRAINING)
    members = MemberList(epoch=7, version=3, members=(one,))
    write_members(path, members)
    assert read_members(path) == members


def test_a_new_director_is_newer_whatever_it_has_counted() -> None:
    old = MemberList(epoch=1, version=100)
    assert MemberList(epoch=2).newer_than(old)
    assert not old.newer_than(old)
    assert MemberList(epoch=1, version=101).newer_than(old)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    path.write_text("{")
    with pytest.raises(LauncherError, match=f"cannot read {path}"):
        read_members(path)


def test_a_list_that_others_may_write_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    write_members(path, MemberList(epoch=7))
    path.chmod(0o666)
    with pytest.raises(LauncherError, match=f"cannot read {path}: other users may write to it"):
        read_members(path)
