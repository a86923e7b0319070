"""For all tests: no test may leave a child process or an asyncio task."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

# The speed of drawing examples depends on the machine, not on the code. CI draws the same examples each
# time, so that it judges the change; other runs draw new ones.
hypothesis.settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
hypothesis.settings.load_profile("any machine")

# Shells start background jobs with these signals ignored, nohup with the first; children of tests would inherit that.
for _name in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_name) is signal.SIG_IGN:
        signal.signal(_name, signal.default_int_handler if _name == signal.SIGINT else signal.SIG_DFL)

# Longest wait for ended processes to disappear; generous, because other jobs may use the cpus.
LEAVE_S = 60.0


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a child process; those of wider fixtures, and what they start, were there before."""
    here = psutil.Process()
    before = set(_descendants(here))
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_no_task_left")
    yield
    deadline = time.monotonic() + LEAVE_S
    while left := [child for child in _descendants(here) if _is_new(child, before)]:
        if time.monotonic() > deadline:
            for child in left:
                child.kill()
            pytest.fail(f"child processes left behind: {left}")
        time.sleep(0.01)


@pytest.fixture(autouse=True, scope="session")
def _state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Daemons of tests keep their usage ledgers there, never in the state folder of this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STATE_DIRECTORY", str(tmp_path_factory.mktemp("state")))
        yield


def _descendants(here: psutil.Process) -> list[psutil.Process]:
    """psutil looks at every process of the machine, twice a test: only where the kernel tells of a child."""
    told = list(Path("/proc/self/task").glob("*/children"))  # none without CONFIG_PROC_CHILDREN
    with contextlib.suppress(FileNotFoundError):  # a thread ended
        if told and not any(path.read_bytes() for path in told):
            return []
    return here.children(recursive=True)


def _is_new(child: psutil.Process, before: set[psutil.Process]) -> bool:
    """Whether it runs, and neither it nor an ancestor existed before."""
    try:
        return child.status() != psutil.STATUS_ZOMBIE and before.isdisjoint({child, *child.parents()})
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
async def _no_task_left() -> AsyncIterator[None]:
    """Fails a test that leaves an asyncio task behind."""
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        await asyncio.wait(left, timeout=LEAVE_S)
    assert not [task for task in left if not task.done()]
