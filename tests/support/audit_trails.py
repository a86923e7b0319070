"""Audit trails for tests, written by the real writer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from launcher.accounts.audit import TrailFile
from launcher.accounts.audit_chain import ControlEntry
from launcher.accounts.ended_request import EndedRequest
from launcher.base import clock as clock_module
from launcher.config.usage_schema import Audit

BEGAN = 1_790_000_000.0  # 2026-09-21 14:13:20 UTC
DAY_S = 86400.0


def an_entry(number: int, at: float = BEGAN) -> EndedRequest:
    return EndedRequest(
        ended_at=at, request_id=f"request-{number}", key="team-a", model="tiny", path="/v1/completions", status=200,
        outcome="completed", slot=0, duration_s=0.25, prompt_tokens=12, output_tokens=number,
    )  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = BEGAN

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def a_writer(
    folder: Path, clock: Clock, *, keep_days: int = 0, max_bytes: int = 1 << 30, opened: bool = True
) -> TrailFile:
    settings = Audit(path=str(folder), keep_days=keep_days, max_bytes=max_bytes)
    writer = TrailFile(folder, settings, "1.0", clock_module.Clock(clock, clock))
    if opened:
        writer.open()
    return writer


def write(writer: TrailFile, numbers: Iterable[int]) -> None:
    writer.turn()
    writer.add(an_entry(number) for number in numbers)
    writer.store()


def stop(writer: TrailFile) -> None:
    writer.stopped()
    writer.store()
    writer.close()


def write_trail(folder: Path, days: int = 3, requests: int = 4) -> None:
    """A file for each day, with requests and a control action; the daemon was restarted on the second day, and killed."""
    clock = Clock()
    writer = a_writer(folder, clock)
    for day in range(days):
        if day:
            clock.now += DAY_S
        if day == 1:
            stop(writer)
            writer = a_writer(folder, clock)
        write(writer, range(requests))
        writer.add([ControlEntry(at=clock(), verb="drain", slot="1", user="ada", uid=1000, gid=1000, pid=77)])
        writer.store()
    writer.close()


def last_file(folder: Path) -> Path:
    return max(folder.glob("audit-*.jsonl"), key=lambda path: path.name[-12:])
