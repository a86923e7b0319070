"""What is kept for the next daemon, also where nothing can be written."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from launcher.instances.state_file import Record, StateFile, StateFolder

ONE = Record(slot=0, generation=2, unit="numa-launcher-slot0.service", digest="d", socket="/run/s", pid=7)
TWO = Record(slot=1, generation=1, unit="numa-launcher-slot1.service", digest="e", port=4000)


def test_the_next_daemon_knows_what_runs(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    folder.remember(ONE)
    folder.remember(TWO)
    folder.forget(1)
    folder.forget(1)
    assert StateFolder(tmp_path / "state").records == {0: ONE}


def test_a_full_disk_keeps_nothing_from_starting_and_is_made_good_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = StateFolder(tmp_path / "state")
    folder.remember(ONE)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("launcher.instances.state_file.replace_file", full)
        folder.remember(TWO)
        folder.forget(0)
    path = tmp_path / "state" / "instances.json"
    assert caplog.messages == [
        f"cannot write '{path}': no space left on device; a daemon that starts now would restart slot 1",
        f"cannot write '{path}': no space left on device",
    ]
    assert StateFile(path).records == {0: ONE}
    folder.remember(TWO)
    assert StateFile(path).records == {1: TWO}


def test_secrets_are_there_for_root_alone_and_only_until_the_unit_has_started(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    with folder.secrets(3, {"HF_TOKEN": "x"}) as path:
        assert path is not None
        assert Path(path).read_text() == 'HF_TOKEN="x"\n'
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
    assert not Path(path).exists()
    with folder.secrets(3, {}) as nothing:
        assert nothing is None


def test_of_a_start_that_fails_no_secret_stays(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    with pytest.raises(ZeroDivisionError), folder.secrets(3, {"HF_TOKEN": "x"}):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
