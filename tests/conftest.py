"""For all tests: none may leave a child process or an asyncio task behind."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator

import hypothesis
import psutil
import pytest

# How fast a machine draws examples says nothing of the code, and others may have its cpus. CI draws the same ones each
# time, so that it judges the change; everybody else draws new ones.
hypothesis.settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
hypothesis.settings.load_profile("any machine")

# A shell has what it starts in the background ignore these, nohup the first; what tests start would inherit that.
for _name in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_name) is signal.SIG_IGN:
        signal.signal(_name, signal.default_int_handler if _name == signal.SIGINT else signal.SIG_DFL)

# For what a test has ended to be gone; generous, because other jobs may have the cpus.
LEAVE_S = 60.0


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a child process; those of wider fixtures, and what they start, were there before."""
    here = psutil.Process()
    before = set(here.children(recursive=True))
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_no_task_left")
    yield
    deadline = time.monotonic() + LEAVE_S
    while left := [child for child in here.children(recursive=True) if _is_new(child, before)]:
        if time.monotonic() > deadline:
            for child in left:
                child.kill()
            pytest.fail(f"child processes left behind: {left}")
        time.sleep(0.01)


def _is_new(child: psutil.Process, before: set[psutil.Process]) -> bool:
    """It runs, and neither it nor one that it descends from was there before."""
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
