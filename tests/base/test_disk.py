"""Work on a disk that may hang."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest
from support.fakes import SOON_S

from launcher.base.disk import OneRead, within
from launcher.base.errors import BusyError, LauncherError


def test_a_read_that_hangs_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hanging, other = tmp_path / "fifo", tmp_path / "other"
    os.mkfifo(hanging)
    other.write_text("x")
    assert within(SOON_S, "read it", other.read_text) == "x"
    assert caplog.messages == []
    assert within(0.1, "read it", hanging.read_text) is None
    assert caplog.messages == ["cannot read it: its disk does not answer within 0.1 s; going on without"]
    hanging.write_text("")  # the thread ends


def test_a_read_that_fails_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert within(SOON_S, "read it", (tmp_path / "missing").read_text) is None

    def refused() -> None:
        raise LauncherError("its mode is 0666", "chmod go-w it")

    assert within(SOON_S, "read it", refused) is None
    assert [(record.levelname, record.getMessage(), record.exc_info) for record in caplog.records] == [
        ("WARNING", "cannot read it: no such file or directory; going on without", None),
        ("WARNING", "cannot read it: its mode is 0666 (chmod go-w it); going on without", None),
    ]


def test_a_read_with_a_mistake_is_said_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    assert within(SOON_S, "read it", lambda: 1 // 0) is None
    [record] = caplog.records
    assert record.getMessage() == "cannot read it: integer division or modulo by zero; going on without"
    assert record.exc_info


async def test_one_thread_waits_however_many_ask() -> None:
    began, goes_on = [], threading.Event()

    def read() -> int:
        began.append(1)
        goes_on.wait(SOON_S)
        return len(began)

    one = OneRead(read, "test")
    for error in await asyncio.gather(one.result(0.01), one.result(0.01), return_exceptions=True):
        assert isinstance(error, TimeoutError)
    with pytest.raises(TimeoutError):
        await one.result(0.01)
    goes_on.set()
    assert await one.result(SOON_S) == 1
    assert await one.result(SOON_S) == 2


async def test_what_a_read_raises_reaches_all_that_wait() -> None:
    def read() -> int:
        raise LauncherError("its mode is 0666", "chmod go-w it")

    one = OneRead(read, "test")
    errors = await asyncio.gather(one.result(SOON_S), one.result(SOON_S), return_exceptions=True)
    assert [str(error) for error in errors] == ["its mode is 0666"] * 2


async def test_who_does_not_wait_any_more_takes_it_from_nobody() -> None:
    goes_on = threading.Event()
    one = OneRead(lambda: goes_on.wait(SOON_S), "test")
    impatient, patient = (asyncio.create_task(one.result(SOON_S)) for _ in range(2))
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.wait({impatient})
    goes_on.set()
    assert await patient


async def test_its_thread_is_no_hindrance_to_an_exit() -> None:
    goes_on = threading.Event()
    one = OneRead(lambda: goes_on.wait(SOON_S), "a read of this test")
    with pytest.raises(TimeoutError):
        await one.result(0.01)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "a read of this test"]
    assert thread.daemon
    goes_on.set()


async def test_a_read_without_a_thread_is_an_error_and_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TasksMax of the unit, or the limit of the user."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    one = OneRead(lambda: 1, "test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(BusyError, match="cannot read in a thread: can't start new thread"):
            await one.result(SOON_S)
    assert await one.result(SOON_S) == 1


async def test_a_read_that_hangs_already_is_not_waited_for_again() -> None:
    goes_on = threading.Event()
    one = OneRead(lambda: goes_on.wait(SOON_S), "test")
    with pytest.raises(TimeoutError):
        await one.result(0.05)
    began = time.monotonic()
    for _ in range(1000):
        with pytest.raises(TimeoutError):
            await one.result(0.05)
    assert time.monotonic() - began < SOON_S / 2  # 50 s, if each waited
    goes_on.set()
