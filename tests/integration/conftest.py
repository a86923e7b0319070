"""A real daemon with small fake engines: real processes, sockets and numactl."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.daemon_process import DaemonProcess, fake_config


@contextmanager
def starting(within: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons, each in a folder of its own; each is stopped at the end and must leave no process."""
    running: list[DaemonProcess] = []

    def begin(
        *arguments: str,
        instances: int = 2,
        more: str = "",
        where: str = "--uds",
        environ: dict[str, str] | None = None,
        max_num_seqs: int = 64,
    ) -> DaemonProcess:
        folder = within / f"d{len(running)}"
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


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons that end with the test."""
    with starting(tmp_path) as begin:
        yield begin


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons that end with the module."""
    with starting(tmp_path_factory.mktemp("s")) as begin:
        yield begin
