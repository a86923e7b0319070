"""What `tune` remembered, as a running daemon reports it: read at its start and at each reload."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from support.daemon_process import DaemonProcess, eventually
from support.verdicts import BEST

from launcher.config.loading import load_config
from launcher.daemon.deployment import build_deployment
from launcher.daemon.measured import fingerprint_of
from launcher.measure.tune.remembered import best_file, cpus_of, remember


def test_from_the_state_folder_to_status(start: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """A file that hangs does not stop the start."""
    state = tmp_path / "state"
    file = best_file(state)
    file.parent.mkdir(parents=True)
    os.mkfifo(file)
    daemon = start(environ={"STATE_DIRECTORY": str(state)})
    assert daemon.wait_ready(2)["measured_layout"] is None
    assert f"cannot read the measured layout '{file}'" in daemon.log.read_text()
    file.unlink()
    deployment = build_deployment(load_config(daemon.config, environ=os.environ))
    best = replace(BEST, fingerprint=fingerprint_of(deployment), cpus=cpus_of(deployment.to_json()))
    remember(state, best)

    def reported() -> Any:
        return daemon.status()["measured_layout"]

    assert reported() is None, "no file is read for each status"
    assert daemon.cli("reload").returncode == 0
    found = eventually(reported)
    assert (found["in_use"], found["stale"], found["ratio_to_default"]) == (True, [], 1.312)
    assert (
        "layout measured best here on 2026-11-20, 1.31 (1.27–1.36) × the default\n"
        in daemon.cli("status").stdout
    )
    remember(state, replace(best, cpus=("0",)))
    assert daemon.cli("reload").returncode == 0
    eventually(lambda: not reported()["in_use"])
    assert "not the layout in use: numa-launcher tune --apply" in daemon.cli("status").stdout
