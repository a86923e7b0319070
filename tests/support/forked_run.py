"""pytest --processes N: the tests are collected once, then run in N forked processes.

Processes that start anew would each import all tests again: 15 s of CPU time in the largest lane.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest
from _pytest.capture import CaptureManager
from _pytest.junitxml import LogXML
from _pytest.terminal import TerminalReporter

# A process takes tests of one file at once, at most this part of those that are left: towards the end shares become smaller,
# so that all processes end at about the same time. Fixtures of a module are set up anew for each share.
PART: Final = 1 / 128


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("processes")
    group.addoption(
        "--processes", type=int, default=0, metavar="N", help="run the tests in N processes; 0: in this one"
    )
    group.addoption("--whole-files", action="store_true", help="the tests of a file run in one process")


def run_tests(session: pytest.Session) -> bool | None:
    """Of the hook pytest_runtestloop. None: not in processes."""
    config = session.config
    if not config.option.processes or config.option.collectonly or not session.items:
        return None
    if session.testsfailed and not config.option.continue_on_collection_errors:
        return None  # pytest says so
    _Run(session).run()
    return True


@dataclass
class _Process:
    pid: int
    connection: Connection
    share: deque[int] = field(default_factory=deque)
    """Of the tests that it was given, by their places in `session.items`, those that have not ended."""


class _Run:
    """In the process that pytest was started in."""

    def __init__(self, session: pytest.Session) -> None:
        self._session, self._hook = session, session.config.hook
        self._shares = deque(_shares(session.items, whole_files=session.config.option.whole_files))
        # Each process has a folder in this one's.
        self._folder = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._processes: dict[Connection, _Process] = {}
        self._begun = 0

    def run(self) -> None:
        if terminal := self._session.config.pluginmanager.getplugin("terminalreporter"):
            terminal.showfspath = False  # files end in any order
        try:
            while len(self._processes) < self._session.config.option.processes and self._shares:
                self._begin()
            while self._processes:
                for connection in wait(list(self._processes)):
                    assert isinstance(connection, Connection)
                    self._hear(self._processes[connection])
        finally:
            for process in self._processes.values():
                os.kill(process.pid, 9)
                os.waitpid(process.pid, 0)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)

    def _begin(self) -> None:
        ours, its = multiprocessing.Pipe()
        self._begun += 1
        # A fork's standard streams would write again what has not left these.
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for process in self._processes.values():
                process.connection.close()
            _serve(self._session, its, self._folder / f"p{self._begun}")
        its.close()
        self._processes[ours] = process = _Process(pid, ours)
        self._give(process)

    def _give(self, process: _Process) -> None:
        ends = self._session.shouldfail or self._session.shouldstop or not self._shares
        process.share = deque(() if ends else self._shares.popleft())
        process.connection.send(tuple(process.share))

    def _hear(self, process: _Process) -> None:
        """A report of a test, the end of one, None for the end of a share; or it has ended."""
        try:
            said = process.connection.recv()
        except (EOFError, OSError):  # also in the middle of a report
            self._ended(process)
            return
        if said is None:
            self._give(process)
        elif isinstance(said, int):
            process.share.remove(said)
        else:
            report = self._hook.pytest_report_from_serializable(config=self._session.config, data=said)
            self._hook.pytest_runtest_logreport(report=report)

    def _ended(self, process: _Process) -> None:
        del self._processes[process.connection]
        process.connection.close()
        _, status = os.waitpid(process.pid, 0)
        if process.share:
            item = self._session.items[process.share.popleft()]
            self._fail(item, f"its process ended, exit code {os.waitstatus_to_exitcode(status)}")
            if process.share:
                self._shares.appendleft(tuple(process.share))
            if self._shares:
                self._begin()
        elif status:
            self._fail(
                self._session.items[0], f"a process ended with exit code {os.waitstatus_to_exitcode(status)}"
            )

    def _fail(self, item: pytest.Item, why: str) -> None:
        self._hook.pytest_runtest_logreport(
            report=pytest.TestReport(
                nodeid=item.nodeid,
                location=item.location,
                keywords={},
                outcome="failed",
                longrepr=why,
                when="call",
            )
        )


def _shares(items: Sequence[pytest.Item], *, whole_files: bool) -> Iterator[Sequence[int]]:
    """Places of tests that one process runs one after the other, in their order."""
    for _, of_file in groupby(range(len(items)), key=lambda place: items[place].path):
        places = tuple(of_file)
        begin = 0
        while begin < len(places):
            left = len(items) - places[begin]
            end = len(places) if whole_files else begin + max(1, int(left * PART))
            yield places[begin:end]
            begin = end


class _Reports:
    """Sends what is known of each test to the process that pytest was started in."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(data)


def _serve(session: pytest.Session, connection: Connection, folder: Path) -> NoReturn:
    """Runs shares of the tests until there are no more."""
    status = 1
    try:
        _be_another(session.config, folder)
        session.config.pluginmanager.register(_Reports(session.config, connection))
        while share := connection.recv():
            _run_share(session, share, connection)
            connection.send(None)
        session._setupstate.teardown_exact(None)
        status = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(status)


def _be_another(config: pytest.Config, folder: Path) -> None:
    """Nothing that a process has once is shared with the one it was forked from."""
    random.seed()
    folder.mkdir()
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp, factory._next_number = folder, {}
    plugins = config.pluginmanager
    for plugin in plugins.get_plugins():
        if isinstance(plugin, LogXML | TerminalReporter):
            plugins.unregister(plugin)
    captures = plugins.getplugin("capturemanager")
    assert isinstance(captures, CaptureManager)
    if captures.is_globally_capturing():
        captures.stop_global_capturing()
        captures.start_global_capturing()


def _run_share(session: pytest.Session, share: Sequence[int], connection: Connection) -> None:
    for place, following in zip(share, (*share[1:], None), strict=True):
        if session.shouldfail or session.shouldstop:
            return
        item = session.items[place]
        # Fixtures of the session outlive a share.
        then: Any = session if following is None else session.items[following]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=then)
        connection.send(place)
