"""What the daemon's own children do beyond the contract of a Spawner (test_spawner_contract.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.fakes import SOON_S, until
from support.processes import TREE, Lines, still_running

from launcher.base.address import Address, TcpAddress, UnixAddress
from launcher.base.cpuset import CpuSet
from launcher.engines.base import Launch
from launcher.engines.vllm.launch import UNWANTED
from launcher.instances.ports import Exit
from launcher.instances.spawn_direct import (
    LINES_PER_TURN,
    DirectProcess,
    DirectSpawner,
    not_inherited,
    wanted,
)

ALLOWED = CpuSet(os.sched_getaffinity(0))
TCP = TcpAddress("127.0.0.1", 1)


def launch(*argv: str, env: dict[str, str] | None = None, address: Address = TCP) -> Launch:
    return Launch(argv=argv, env=env or {}, secrets=frozenset(), address=address, unwanted=UNWANTED)


async def start(what: Launch, lines: Lines, environ: dict[str, str] | None = None) -> DirectProcess:
    spawner = DirectSpawner({"PATH": os.environ["PATH"]} | (environ or {}), ALLOWED)
    return await spawner.spawn(0, 1, what, lines.hear)


async def ended(process: DirectProcess) -> Exit:
    async with asyncio.timeout(SOON_S):
        return await process.wait()


def open_fds() -> int:
    return psutil.Process().num_fds()


async def test_pid_is_the_main_process_in_a_session_of_its_own() -> None:
    lines = Lines()
    process = await start(launch("sh", "-c", "echo pid $$; exec sleep 1000"), lines)
    (main,) = await lines.pids(1)
    assert main.pid == process.pid
    assert os.getsid(main.pid) not in {os.getsid(0), main.pid}, "a terminal's Ctrl-C must not reach it"
    process.kill()
    await ended(process)


async def test_the_process_tree_ends_with_its_shim() -> None:
    lines = Lines()
    process = await start(launch(*TREE), lines)
    family = await lines.pids(3)
    shim = psutil.Process(process.pid).parent()
    assert shim is not None
    shim.kill()
    assert await ended(process) == Exit(None, signal.SIGKILL)
    assert not still_running(family)


async def test_the_shim_ignores_signals() -> None:
    lines = Lines()
    process = await start(launch("sh", "-c", "echo up; read x < /dev/zero; sleep 1000"), lines)
    await lines.until(lambda lines: "up" in lines)
    shim = psutil.Process(process.pid).parent()
    assert shim is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        shim.send_signal(number)
    process.terminate()
    assert await ended(process) == Exit(None, signal.SIGTERM), "and the daemon's word is still obeyed"


async def test_a_stopped_shim_is_killed_with_its_tree(caplog: pytest.LogCaptureFixture) -> None:
    """It reads no order: `stop` would wait for ever."""
    lines = Lines()
    process = await start(launch(*TREE), lines)
    family = await lines.pids(3)
    shim = psutil.Process(process.pid).parent()
    assert shim is not None
    shim.suspend()
    process.terminate()
    process.kill()
    try:
        assert await ended(process) == Exit(None, signal.SIGKILL)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            shim.kill()
    assert not still_running(family)
    (said,) = caplog.messages
    assert said.startswith(f"slot 0: its shim (process {shim.pid}) is stopped by a signal")


async def test_a_flood_of_lines_leaves_the_loop_time_and_the_diagnosis_its_last_lines() -> None:
    total, turn, per_turn, lines = 200_000, 0, Counter[int](), list[str]()

    async def turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def hear(line: str) -> None:
        per_turn[turn] += 1
        lines.append(line)

    flood = f"yes abcd | head -n {total}; echo out of memory; exit 3"
    counting = asyncio.create_task(turns())
    process = await DirectSpawner({"PATH": os.environ["PATH"]}, ALLOWED).spawn(
        0, 1, launch("sh", "-c", flood), hear
    )
    assert await ended(process) == Exit(3, None)
    counting.cancel()
    left_out = [
        int(line.split()[1])
        for line in lines
        if line.endswith("lines were left out here: more than 500 a second")
    ]
    assert sum(left_out) + len(lines) - len(left_out) == total + 1
    assert sum(left_out) > total / 2
    assert lines[-2:] == ["abcd", "out of memory"]
    assert max(per_turn.values()) <= LINES_PER_TURN + 1


SPAWNER = """
import asyncio, os, sys
from launcher.base.address import TcpAddress
from launcher.base.cpuset import CpuSet
from launcher.engines.base import Launch
from launcher.engines.vllm.launch import UNWANTED
from launcher.instances.spawn_direct import DirectSpawner

async def main():
    spawner = DirectSpawner(os.environ, CpuSet(os.sched_getaffinity(0)))
    launch = Launch(tuple(sys.argv[1:]), {}, frozenset(), TcpAddress("127.0.0.1", 1))
    process = await spawner.spawn(0, 1, launch, lambda line: print(line, flush=True))
    await process.wait()

asyncio.run(main())
"""


async def test_the_tree_ends_with_a_killed_daemon() -> None:
    daemon = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SPAWNER, *TREE, stdout=asyncio.subprocess.PIPE
    )
    assert daemon.stdout is not None
    lines = Lines()
    async with asyncio.timeout(SOON_S):
        while sum(line.startswith("pid ") for line in lines) < 3:
            lines.hear((await daemon.stdout.readline()).decode())
    family = [*await lines.pids(3), *psutil.Process(daemon.pid).children()]
    daemon.kill()
    await daemon.wait()
    await until(
        lambda: not still_running(family), 0.01
    )  # their own end, which nobody can wait for: they are not our children


async def test_a_spawn_that_is_cancelled_leaves_nothing() -> None:
    await ended(await start(launch("true"), Lines()))  # what a loop opens once is open now
    before = open_fds()
    task = asyncio.create_task(start(launch(*TREE), Lines()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not psutil.Process().children(recursive=True) and open_fds() <= before, 0.01)


async def test_what_an_instance_inherits() -> None:
    """Our environment and the launch's, which wins; not what systemd tells the daemon; no descriptors of ours."""
    lines = Lines()
    environ = {"A": "ours", "B": "ours", "NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1"}
    script = "echo $A $B [$NOTIFY_SOCKET$WATCHDOG_USEC]; ls /proc/self/fd | tr '\\n' ' '"
    await ended(await start(launch("sh", "-c", script, env={"B": "its"}), lines, environ))
    assert lines == ["ours its []", "0 1 2 3"], "3 is the folder that ls reads"


async def test_cpus_that_are_offline_are_no_hindrance() -> None:
    """Of those that may come online, some are not yet: sched_setaffinity(2) takes what there is."""
    lines = Lines()
    spawner = DirectSpawner({"PATH": os.environ["PATH"]}, ALLOWED | CpuSet([max(ALLOWED) + 900]))
    process = await spawner.spawn(0, 1, launch("grep", "Cpus_allowed_list", "/proc/self/status"), lines.hear)
    assert (await ended(process)).code == 0
    assert CpuSet.parse(lines[0].split()[1]) == ALLOWED


async def test_short_instances_leak_no_descriptor() -> None:
    async def life() -> None:
        assert await ended(await start(launch("true"), Lines())) == Exit(0, None)

    await life()
    before = open_fds()
    for _ in range(2):
        async with asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(life())
    assert open_fds() <= before


def test_the_shim_needs_nothing_but_the_standard_library() -> None:
    """It runs with -I -S: an import of ours would fail there."""
    from launcher.instances import shim  # noqa: PLC0415

    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import runpy; runpy.run_path({shim.__file__!r})"], check=False
    )
    assert done.returncode == 0


async def test_a_port_that_kubernetes_made_a_uri_is_not_inherited_and_named() -> None:
    link = {"VLLM_PORT": "tcp://10.96.0.7:8000", "VLLM_PORT_8000_TCP": "tcp://10.96.0.7:8000"}
    lines = Lines()
    await ended(await start(launch("sh", "-c", "echo ${VLLM_PORT-none}"), lines, link))
    assert lines == ["none"]
    [warning] = not_inherited(link, UNWANTED)
    assert warning.startswith("VLLM_PORT=tcp://10.96.0.7:8000 is no port: ")
    assert "enableServiceLinks: false" in warning
    assert wanted({"VLLM_PORT": "29500"}, UNWANTED) == {"VLLM_PORT": "29500"}, "an operator's own"
    assert not_inherited({"VLLM_PORT": "29500"}, UNWANTED) == not_inherited({}, UNWANTED) == ()


async def test_what_the_plan_decides_is_not_inherited(tmp_path: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "3", "VLLM_CPU_KVCACHE_SPACE": "7", "HF_HOME": "/models"}
    lines: list[str] = []
    spawner = DirectSpawner(environ, CpuSet(os.sched_getaffinity(0)))
    address = UnixAddress(str(tmp_path / "s"))
    launch = Launch(("env",), {"VLLM_CPU_OMP_THREADS_BIND": "0"}, frozenset(), address, unwanted=UNWANTED)
    process = await spawner.spawn(0, 1, launch, lines.append)
    assert await process.wait() == Exit(code=0, signal=None)
    assert "HF_HOME=/models" in lines
    assert "VLLM_CPU_OMP_THREADS_BIND=0" in lines
    assert not [line for line in lines if line.startswith(("OMP_", "VLLM_CPU_KVCACHE"))]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Names of sockets fit into it, which they may not into pytest's own."""
    with tempfile.TemporaryDirectory(prefix="nl-") as folder:
        yield Path(folder)


async def test_temporary_files_go_with_the_instance(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed vLLM leaves files in the folder for temporary files; an operator's own folder stays as it is."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    leaver = ("sh", "-c", 'touch "$TMPDIR/vllm_dist_0"; echo "in $TMPDIR"; exec sleep 1000')
    scratch = str(tmp_path / "run" / "slot0")

    async def killed(env: dict[str, str]) -> Path:
        lines = Lines()
        process = await start(
            Launch(argv=leaver, env=env, secrets=frozenset(), address=TCP, scratch=scratch), lines
        )
        await lines.until(lambda lines: any(line.startswith("in ") for line in lines))
        folder = Path(next(line for line in lines if line.startswith("in ")).removeprefix("in "))
        assert (folder / "vllm_dist_0").exists()
        process.kill()
        await ended(process)
        return folder

    folder = await killed({})
    assert folder.parent == short_folder
    assert not os.listdir(short_folder)  # noqa: PTH208

    folder.mkdir()  # of a daemon that was killed with its instances
    (folder / "vllm_dist_1").touch()
    await killed({})
    assert not os.listdir(short_folder)  # noqa: PTH208

    own = tmp_path / "own"
    own.mkdir()
    assert await killed({"TMPDIR": str(own)}) == own
    assert (own / "vllm_dist_0").exists()


async def test_names_of_sockets_fit_into_the_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the usual folder is long already, it is used itself."""
    usual = tmp_path / ("x" * 60)
    usual.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(usual))
    lines = Lines()
    scratch = str(tmp_path / "slot0")
    told = ("sh", "-c", 'echo "TMPDIR=$TMPDIR"')
    process = await start(Launch(argv=told, env={}, secrets=frozenset(), address=TCP, scratch=scratch), lines)
    await ended(process)
    assert lines == ["TMPDIR="]
    assert not list(usual.iterdir())
