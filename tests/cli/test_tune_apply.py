"""The configuration file after a reload that the daemon refused, or did not answer."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from verdicts import BEST

from launcher.cli import tune_apply
from launcher.cli.screen_lines import Output
from launcher.control.client import NoAnswerError
from launcher.errors import LauncherError


@pytest.mark.parametrize(
    ("error", "written"),
    [
        (LauncherError("cannot reload: too few", "wait"), False),
        (NoAnswerError("no answer", "try again"), True),
    ],
)
def test_a_refused_reload_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: LauncherError, written: bool
) -> None:
    class Daemon:
        def __init__(self, _socket: str) -> None: ...

        def post(self, path: str, _timeout_s: float) -> dict[str, Any]:
            if "dry_run" in path:
                return {"changes": {"needs_restart": []}}
            raise error

    monkeypatch.setattr(tune_apply, "ControlClient", Daemon)
    file = tmp_path / "config.toml"
    file.write_text("[layout]\n")
    printed = StringIO()
    with pytest.raises(type(error)):
        tune_apply.apply(BEST, "/nowhere", file, Output(printed))
    assert (f"{file}: restored" in printed.getvalue()) is not written
    assert ("interleaved" in file.read_text()) is written
    assert len(list(tmp_path.iterdir())) == 1 + written
