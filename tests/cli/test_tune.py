"""The configuration file after a reload that the daemon refused, or did not answer; signals at odd moments."""

from __future__ import annotations

import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from support.verdicts import BEST

from launcher.base.errors import LauncherError
from launcher.cli import tune
from launcher.cli.options import Output
from launcher.control.client import NoAnswerError


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

    monkeypatch.setattr(tune, "ControlClient", Daemon)
    file = tmp_path / "config.toml"
    file.write_text("[layout]\n")
    printed = StringIO()
    with pytest.raises(type(error)):
        tune.apply(BEST, "/nowhere", file, Output(printed))
    assert (f"{file}: restored" in printed.getvalue()) is not written
    assert ("interleaved" in file.read_text()) is written
    assert len(list(tmp_path.iterdir())) == 1 + written


def test_a_signal_during_a_finalizer_ends_the_run() -> None:
    """Python drops what is raised there, as in hooks of fork."""
    code = """
import os, signal, time
from launcher.cli.tune import _signals
from launcher.measure.tune.runner import StoppedError
class Finalizer:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000): pass
try:
    with _signals():
        Finalizer()
        time.sleep(20)
except StoppedError:
    print("stopped")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("stopped\n", "")
