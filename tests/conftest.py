"""For all tests: no test may leave a child process or an asyncio task."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib.util
import inspect
import os
import signal
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from support import forked_launcher, forked_run, tools
from support.examples import examples

# New examples are drawn by `scripts/test fuzz` alone: elsewhere a failure is the change's.
DRAWS = "NUMA_LAUNCHER_TEST_FUZZ" in os.environ

PROFILE = "any machine"


def pytest_addoption(parser: pytest.Parser) -> None:
    forked_run.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    return forked_run.run_tests(session)


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Sets up Hypothesis before the first module that uses it: lanes without one save its import, half a second each."""
    if b"hypothesis" in module_path.read_bytes():
        _set_up_hypothesis()


@functools.cache
def _set_up_hypothesis() -> None:
    import hypothesis  # noqa: PLC0415  heavy
    from hypothesis.internal.conjecture import providers  # noqa: PLC0415

    # The speed of drawing examples depends on the machine, not on the code.
    hypothesis.settings.register_profile(
        PROFILE,
        deadline=None,
        max_examples=examples(100),
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        derandomize=not DRAWS,
    )
    hypothesis.settings.load_profile(PROFILE)
    # Among the examples are constants of the modules that a process has imported so far: others in each worker, and in a run
    # of one test. Finding them parses all sources, too.
    assert hasattr(providers, "is_local_module_file")
    if not DRAWS:
        providers.is_local_module_file = lambda _path: False


# Shells start background jobs with these signals ignored, nohup with the first; children of tests would inherit that.
for _name in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_name) is signal.SIG_IGN:
        signal.signal(_name, signal.default_int_handler if _name == signal.SIGINT else signal.SIG_DFL)

# Between two collections of all objects; those of the tests and their modules stay, and are looked at once
# (pytest_collection_finish). By default a sixth of a run's time goes there.
gc.set_threshold(50_000, 20, 20)

# Longest wait for ended processes to disappear; generous, because other jobs may use the cpus.
LEAVE_S = 60.0


def pytest_collection_finish(session: pytest.Session) -> None:
    draws = any(item.get_closest_marker("hypothesis") for item in session.items)
    assert not draws or _set_up_hypothesis.cache_info().currsize, (
        "a test uses Hypothesis, whose module does not name it"
    )
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a child process; those of wider fixtures, and what they start, were there before."""
    before = set(_descendants())
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_no_task_left")
    yield
    deadline = time.monotonic() + LEAVE_S
    while left := [child for child in _descendants() if _is_new(child, before)]:
        if time.monotonic() > deadline:
            for child in left:
                child.kill()
            pytest.fail(f"child processes left behind: {left}")
        time.sleep(0.01)


# Variables of the user or the service manager that change what the launcher, an engine or a tool does. Left as they are:
# those that configure the tests.
FOREIGN = ("NUMA_LAUNCHER_", "XDG_", "HF_", "VLLM_", "OTEL_", "RAY_", "LISTEN_", "WATCHDOG_", "NOTIFY_SOCKET")
OURS = "NUMA_LAUNCHER_TEST_"
# Folders that no test may use: what was run on this machine before must not matter.
SERVICE = tuple(f"/{folder}/numa-launcher" for folder in ("etc", "opt", "run", "var/cache", "var/lib"))
OF_USER = (".local/state/numa-launcher", ".cache/huggingface", ".cache/vllm", ".ray")
# The copy of this file in a virtual host has none: the service is installed there.
GUARD = Path(__file__).parent / "support" / "guard" / "sitecustomize.py"


@pytest.fixture(autouse=True, scope="session")
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests and the processes they start have a home, a state folder, a configuration and a control socket of their own:
    no file, daemon or variable of this machine or of an earlier run reaches them."""
    machine = tmp_path_factory.mktemp("machine")
    for name in ("home", "state", "etc", "run"):
        (machine / name).mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name in tuple(os.environ):
            if name.startswith(FOREIGN) and not name.startswith(OURS):
                patch.delenv(name)
        patch.setenv("PIP_CACHE_DIR", str(tools.PIP_CACHE))
        patch.setenv("HOME", str(machine / "home"))
        patch.setenv("STATE_DIRECTORY", str(machine / "state"))
        patch.setenv("NUMA_LAUNCHER_CONFIG", str(machine / "etc" / "config.toml"))
        patch.setenv("NUMA_LAUNCHER_SOCKET", str(machine / "run" / "control.sock"))
        if GUARD.exists():
            _watch(patch, machine / "guard-notes")
        yield


# Tests that install or download, by their paths here.
ONLINE = ("clients", "engine", "fleet_hosts", "vm", "integration/test_install.py")


@pytest.fixture(scope="session")
def _authority(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """A file with the first of the system's certificates. None where OpenSSL has no file of them: it reads a file at once,
    but looks into a folder only when it needs a certificate."""
    file = ssl.get_default_verify_paths().cafile
    if file is None:
        return None
    first, end, _ = Path(file).read_text().partition("-----END CERTIFICATE-----\n")
    found = tmp_path_factory.mktemp("authority") / "first.pem"
    found.write_text(first + end)
    return found


@pytest.fixture(autouse=True, scope="module")
def _one_authority(request: pytest.FixtureRequest, _authority: Path | None) -> Iterator[None]:
    """aiohttp reads the system's 140 certificates when it is imported, in 0.05 s of CPU time. Some hundred processes of
    tests import it: they read one. An empty file would not do: httpx refuses it."""
    tests = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch:
        if _authority and not any(request.path.is_relative_to(tests / place) for place in ONLINE):
            patch.setenv("SSL_CERT_FILE", str(_authority))
        yield


def _watch(patch: pytest.MonkeyPatch, notes: Path) -> None:
    """Has this process and those that it starts note their uses of the machine's folders."""
    folders = (*SERVICE, *(str(tools.HOME / name) for name in OF_USER))
    notes.touch()
    notes.chmod(0o666)  # processes of other users, too
    patch.setenv("NUMA_LAUNCHER_TEST_GUARDED", ":".join(folders))
    patch.setenv("NUMA_LAUNCHER_TEST_GUARD_NOTES", str(notes))
    patch.setenv("PYTHONPATH", str(GUARD.parent), prepend=os.pathsep)
    spec = importlib.util.spec_from_file_location("guard", GUARD)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.fixture(autouse=True)
def _machine_unused(_own_folders: None) -> Iterator[None]:
    """Fails a test during which it, or a process that it or its fixtures started, used the machine's folders."""
    yield
    notes = os.environ.get("NUMA_LAUNCHER_TEST_GUARD_NOTES")
    if notes and Path(notes).stat().st_size:
        told = Path(notes).read_text()
        os.truncate(notes, 0)
        pytest.fail(f"the machine's own folders were used:\n{told}")


def _descendants() -> list[psutil.Process]:
    """psutil looks at every process of the machine, twice a test: only where this one has a child."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []
    return psutil.Process().children(recursive=True)


def _is_new(child: psutil.Process, before: set[psutil.Process]) -> bool:
    """Whether it runs, and neither it nor an ancestor existed before."""
    if forked_launcher.is_source(child.pid):
        return False
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
