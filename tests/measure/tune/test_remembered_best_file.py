"""best.json: what one `tune` writes, the daemon and the command line read."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.verdicts import BEST, FINGERPRINT, MODEL

from launcher.base.errors import LauncherError
from launcher.measure.tune.remembered import MAX_BYTES, best_file, recall, remember

OTHER = replace(BEST, fingerprint=replace(FINGERPRINT, models=(replace(MODEL, path="/m"),)))


def test_what_was_remembered_is_recalled(tmp_path: Path) -> None:
    file = remember(tmp_path, BEST)
    assert file == best_file(tmp_path)
    assert recall(tmp_path) == (BEST,)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644, "the daemon may be another user"


def test_each_set_of_models_has_its_own(tmp_path: Path) -> None:
    later = replace(BEST, measured_at="2026-11-21T00:00:00+00:00")
    for best in (BEST, OTHER, later):
        remember(tmp_path, best)
    assert recall(tmp_path) == (OTHER, later)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 2, "layouts": []}', '{"version": 1, "layouts": [{}]}']
)
def test_another_file_is_no_measurement(tmp_path: Path, text: str) -> None:
    remember(tmp_path, BEST)
    best_file(tmp_path).write_text(text)
    assert recall(tmp_path) == ()
    remember(tmp_path, BEST)
    assert recall(tmp_path) == (BEST,)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    file = remember(tmp_path, BEST)
    file.write_bytes(file.read_bytes() + b" " * MAX_BYTES + b"x")
    assert len(recall(tmp_path)) == 1, "the rest is not looked at"


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    file = remember(tmp_path, BEST)
    tree = json.loads(file.read_text())
    tree["layouts"][0]["colour"] = "blue"
    file.write_text(json.dumps(tree))
    assert recall(tmp_path) == (BEST,)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "tuning").write_text("")
    with pytest.raises(LauncherError, match="cannot keep results in"):
        remember(tmp_path, BEST)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(tmp_path, BEST)

    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        LauncherError, match=r"cannot remember the measured layout in .*: no space left"
    ) as caught:
        remember(tmp_path, OTHER)
    assert "the verdict above holds" in caught.value.remedy
    assert recall(tmp_path) == (BEST,)
