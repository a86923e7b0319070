"""A real daemon with small fake engines: real processes, sockets and numactl."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.daemon_process import DaemonProcess, fake_config


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons; each is stopped at the end and must leave no process."""
    running: list[DaemonProcess] = []

    def begin(
        *arguments: str,
        instances: int = 2,
        more: str = "",
        where: str = "--uds",
        environ: dict[str, str] | None = None,
        max_num_seqs: int = 64,
    ) -> DaemonProcess:
        folder = tmp_path / f"d{len(running)}"
        folder.mkdir()
        daemon = DaemonProcess(
            folder,
            fake_config(*arguments, instances=instances, more=more, where=where, max_num_seqs=max_num_seqs),
            environ,
        )
        running.append(daemon)
        return daemon

    yield begin
    for daemon in running:
        daemon.end()
