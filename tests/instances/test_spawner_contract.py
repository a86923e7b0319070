"""What every Spawner does, with real processes. Each test's tree is real, and nothing of it may stay.

Here the daemon's children are tested. With NUMA_LAUNCHER_TEST_SPAWNER=systemd, as root on a host with systemd,
the very same tests hold systemd's units to it: tests/vm/test_oncall.py runs them so in a virtual host.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Protocol

import pytest
from msgspec.structs import replace
from support.fakes import SOON_S
from support.processes import TREE, Lines, still_running

from launcher.base.address import Address, TcpAddress, UnixAddress
from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.engines.base import Launch
from launcher.instances.ports import Exit, Process, Spawner
from launcher.instances.spawn_direct import MAX_LINE_BYTES, DirectSpawner
from launcher.instances.spawn_systemd import SystemdSpawner
from launcher.instances.unit import Frame

KIND = os.environ.get("NUMA_LAUNCHER_TEST_SPAWNER", "direct")
ALLOWED = CpuSet(os.sched_getaffinity(0))
TCP = TcpAddress("127.0.0.1", 1)
FRAME = Frame(daemon_unit="contract.service", slice="contract.slice", stop_s=5.0)


def launch(*argv: str, env: dict[str, str] | None = None, address: Address = TCP) -> Launch:
    return Launch(argv=argv, env=env or {}, secrets=frozenset({"SECRET"}), address=address)


class Start(Protocol):
    """Start one instance in slot 0."""

    def __call__(
        self, what: Launch, lines: Lines, environ: dict[str, str] | None = None, generation: int = 1
    ) -> Awaitable[Process]: ...


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts instances with the spawner that is tested."""
    units: list[SystemdSpawner] = []

    def make(environ: dict[str, str]) -> Spawner:
        if KIND == "direct":
            return DirectSpawner(environ, ALLOWED)
        assert KIND == "systemd", KIND
        units.append(SystemdSpawner(environ, tmp_path / "state", FRAME))
        return units[-1]

    async def begin(
        what: Launch, lines: Lines, environ: dict[str, str] | None = None, generation: int = 1
    ) -> Process:
        spawner = make({"PATH": os.environ["PATH"]} | (environ or {}))
        return await spawner.spawn(0, generation, what, lines.hear)

    yield begin
    for spawner in units:
        await spawner.close(for_good=False)


async def ended(process: Process) -> Exit:
    async with asyncio.timeout(SOON_S):
        return await process.wait()


async def test_lines_arrive_from_both_streams_in_order(start: Start) -> None:
    lines = Lines()
    process = await start(
        launch("sh", "-c", "echo one; echo two >&2; printf 'half\\rhalves\\n\\n  \\nlast'"), lines
    )
    assert await ended(process) == Exit(code=0, signal=None)
    assert lines == ["one", "two", "half", "halves", "last"]


async def test_output_that_is_not_text_arrives_too(start: Start) -> None:
    lines = Lines()
    await ended(await start(launch("printf", r"\377ok\n"), lines))
    assert lines == ["�ok"]


async def test_huge_lines_are_cut_and_nothing_is_lost_after_them(start: Start) -> None:
    lines = Lines()
    process = await start(
        launch("sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x; echo; echo after"), lines
    )
    await ended(process)
    assert [len(line) for line in lines] == [MAX_LINE_BYTES, 5]


@pytest.mark.parametrize("code", [0, 3, 255])
async def test_exit_code(start: Start, code: int) -> None:
    assert await ended(await start(launch("sh", "-c", f"exit {code}"), Lines())) == Exit(code, None)


@pytest.mark.parametrize("number", [signal.SIGILL, signal.SIGKILL, signal.SIGSEGV])
async def test_death_by_a_signal(start: Start, number: signal.Signals) -> None:
    process = await start(launch("sh", "-c", f"kill -{number.value} $$"), Lines())
    assert await ended(process) == Exit(None, number.value)


async def test_pid_is_the_main_process_in_another_session(start: Start) -> None:
    lines = Lines()
    process = await start(launch("sh", "-c", "echo pid $$; exec sleep 1000"), lines)
    (main,) = await lines.pids(1)
    assert main.pid == process.pid
    assert os.getsid(main.pid) != os.getsid(0), "a terminal's Ctrl-C must not reach it"
    process.kill()
    await ended(process)


async def test_a_dollar_in_an_argument_stays_one(start: Start) -> None:
    lines = Lines()
    await ended(await start(launch("printf", "%s\\n", "$HOME ${PATH} %n 100%"), lines))
    assert lines == ["$HOME ${PATH} %n 100%"]


async def test_terminate_reaches_the_main_process(start: Start) -> None:
    lines = Lines()
    process = await start(
        launch("sh", "-c", "trap 'echo bye; exit 7' TERM; echo up; while :; do sleep 0.01; done"), lines
    )
    await lines.until(lambda lines: "up" in lines)
    process.terminate()
    assert await ended(process) == Exit(7, None)
    assert lines[-1] == "bye"


async def test_terminate_then_kill(start: Start) -> None:
    lines = Lines()
    process = await start(
        launch("sh", "-c", "trap 'echo no' TERM; echo up; while :; do sleep 0.01; done"), lines
    )
    await lines.until(lambda lines: "up" in lines)
    process.terminate()
    await lines.until(lambda lines: "no" in lines)
    process.kill()
    assert await ended(process) == Exit(None, signal.SIGKILL)
    process.kill()  # no error when it is gone
    process.terminate()


async def test_kill_takes_the_whole_tree(start: Start) -> None:
    lines = Lines()
    process = await start(launch(*TREE), lines)
    family = await lines.pids(3)
    process.kill()
    assert await ended(process) == Exit(None, signal.SIGKILL)
    assert not still_running(family), "wait() returns when nothing is left"


async def test_the_tree_ends_with_its_main_process(start: Start) -> None:
    """SIGKILL of the API server leaves EngineCore and workers alive (vllm#55510)."""
    lines = Lines()
    process = await start(launch(*TREE), lines)
    family = await lines.pids(3)
    os.kill(process.pid, signal.SIGKILL)
    assert await ended(process) == Exit(None, signal.SIGKILL)
    assert not still_running(family)


async def test_a_stopped_process_can_be_killed(start: Start) -> None:
    lines = Lines()
    process = await start(launch(*TREE), lines)
    family = await lines.pids(3)
    for member in family:
        member.suspend()
    process.kill()
    assert await ended(process) == Exit(None, signal.SIGKILL)
    assert not still_running(family)


@pytest.mark.parametrize(
    ("argv", "why"),
    [(("/nowhere/vllm", "serve"), "No such file or directory"), (("/etc",), "Permission denied")],
)
async def test_a_command_that_can_not_be_executed(start: Start, argv: tuple[str, ...], why: str) -> None:
    lines = Lines()
    process = await start(launch(*argv), lines)
    assert await ended(process) == Exit(127, None)
    assert lines == [f"numa-launcher: cannot execute {argv[0]}: {why}"]


async def test_a_run_folder_that_can_not_be_made(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LauncherError, match="cannot start slot 0: ") as caught:
        await start(launch("true", address=UnixAddress(str(tmp_path / "file" / "run" / "a.sock"))), Lines())
    assert "run folder" in caught.value.remedy


async def test_old_sockets_make_way_and_go_with_their_instance(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "run" / "slot0-1.sock"
    path.parent.mkdir()
    path.write_text("left by a daemon that was killed")
    process = await start(
        launch("sh", "-c", f"test ! -e {path} && touch {path}", address=UnixAddress(str(path))), Lines()
    )
    assert await ended(process) == Exit(0, None)
    assert path.parent.is_dir()
    assert not path.exists()


async def test_an_engines_own_sockets_are_gone_when_it_starts_again(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "slot0"
    folder.mkdir(parents=True)
    (folder / "left by one that was killed").touch()
    script = f'test -z "$(ls -A {folder})" && touch {folder}/own'
    for _ in range(2):
        process = await start(replace(launch("sh", "-c", script), scratch=str(folder)), Lines())
        assert await ended(process) == Exit(0, None)


async def test_what_an_instance_inherits(start: Start) -> None:
    """Our environment and the launch's, which wins; not what systemd tells the daemon, nor its password for the
    collector of traces; no descriptors of ours."""
    lines = Lines()
    environ = {"A": "ours", "B": "ours", "NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1", "OMP_NUM_THREADS": "3"}
    environ |= {"OTEL_EXPORTER_OTLP_HEADERS": "key=hush", "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "key=hush"}
    of_the_daemon = "".join(f"${name}" for name in environ if len(name) > 1)
    script = f"""printf "%s\\n" "$A $B $SECRET [{of_the_daemon}]"; echo $(ls /proc/self/fd)"""
    secret = {"B": "its own", "SECRET": 'a"b\\c$d`e'}
    await ended(await start(launch("sh", "-c", script, env=secret), lines, environ))
    assert lines == ['ours its own a"b\\c$d`e []', "0 1 2 3"], "3 is the folder that ls reads"


async def test_signals_are_as_an_engine_expects_them(start: Start) -> None:
    """Python ignores SIGPIPE and SIGXFSZ, and exec passes that on: `yes | head` would not end."""
    lines = Lines()
    await ended(await start(launch("grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"), lines))
    assert [int(line.split()[1], 16) for line in lines] == [0, 0]


async def test_the_main_process_may_use_all_allowed_cpus_where_the_daemon_is_pinned(start: Start) -> None:
    lines = Lines()
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        await ended(await start(launch("grep", "Cpus_allowed_list", "/proc/self/status"), lines))
    finally:
        os.sched_setaffinity(0, before)
    assert CpuSet.parse(lines[0].split()[1]) == ALLOWED


async def test_a_slot_is_used_again_and_again(start: Start) -> None:
    for generation in range(1, 4):
        lines = Lines()
        process = await start(launch("sh", "-c", f"echo life {generation}"), lines, generation=generation)
        assert await ended(process) == Exit(0, None)
        assert lines == [f"life {generation}"]
