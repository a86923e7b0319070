"""What the direct spawner and its shim do for a container, with a client that only notes that it was called.

Real containers: tests/integration/test_containers.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from support.fakes import SOON_S
from support.processes import Lines

from launcher.base.address import TcpAddress
from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.engines.base import MARK, Container, Launch
from launcher.instances import container_processes
from launcher.instances.container_processes import ended_inside, main_pid
from launcher.instances.ports import Exit
from launcher.instances.spawn_direct import DirectProcess, DirectSpawner

ADDRESS = TcpAddress("127.0.0.1", 1)


def contained(folder: Path, script: str, *, left_over: str = "", env: dict[str, str] | None = None) -> Launch:
    """A launch whose client is a shell; what is done beside it is noted in `calls`, one word each."""
    calls = folder / "calls"

    def note(word: str) -> tuple[str, ...]:
        return ("/bin/sh", "-c", f'echo {word} "$@" >> {calls}; echo {word}: said', "sh")

    container = Container(
        folders=(str(folder / "made" / "here"),),
        last_word=note("last"),
        remove=note("remove"),
        left_over=("/bin/sh", "-c", left_over or "true"),
        remove_ids=note("ids"),
    )
    return Launch(("/bin/sh", "-c", script), env or {}, frozenset({"SECRET"}), ADDRESS, container)


def calls(folder: Path) -> list[str]:
    return [line.strip() for line in (folder / "calls").read_text().splitlines()]


async def start(launch: Launch, lines: Lines) -> DirectProcess:
    spawner = DirectSpawner({"PATH": os.environ["PATH"]}, CpuSet(os.sched_getaffinity(0)))
    return await spawner.spawn(0, 1, launch, lines.hear)


async def ended(process: DirectProcess) -> Exit:
    async with asyncio.timeout(SOON_S):
        return await process.wait()


async def test_one_that_ends_is_asked_why_and_removed(tmp_path: Path) -> None:
    lines = Lines()
    process = await start(contained(tmp_path, "echo up; exit 3"), lines)
    assert await ended(process) == Exit(3, None)
    assert calls(tmp_path) == ["remove", "last", "remove"], "before the start too: a leftover has its name"
    assert lines == ["up", "last: said"], "what a removal prints is nobody's business"
    assert (tmp_path / "made" / "here").is_dir()


async def test_a_kill_removes_it_first(tmp_path: Path) -> None:
    lines = Lines()
    process = await start(contained(tmp_path, "echo up; exec sleep 1000"), lines)
    await lines.until(lambda lines: "up" in lines)
    process.kill()
    assert await ended(process) == Exit(None, signal.SIGKILL)
    assert calls(tmp_path)[:2] == ["remove", "remove"]


async def test_the_daemon_removes_the_container_of_a_killed_shim(tmp_path: Path) -> None:
    lines = Lines()
    process = await start(contained(tmp_path, "echo pid $$; exec sleep 1000"), lines)
    (client,) = await lines.pids(1)
    assert process.pid is None, "the client is not the engine"
    shim = client.parent()
    assert shim is not None
    shim.kill()
    assert await ended(process) == Exit(None, signal.SIGKILL)
    assert calls(tmp_path) == ["remove", "remove"]


async def test_the_client_gets_the_secrets_and_nothing_else(tmp_path: Path) -> None:
    lines = Lines()
    env = {"SECRET": "x", "LD_PRELOAD": "/inside.so"}
    await ended(await start(contained(tmp_path, "echo $SECRET-$LD_PRELOAD-", env=env), lines))
    assert lines[0] == "x--"


@pytest.mark.parametrize(
    ("code", "inside", "said"),
    [
        (0, Exit(0, None), None),
        (1, Exit(1, None), None),
        (125, Exit(125, None), "numa-launcher: sh ended with 125: it did not start the container"),
        (127, Exit(127, None), "numa-launcher: sh ended with 127: the image has no such command"),
        (137, Exit(None, 9), None),
        (143, Exit(None, 15), None),
        (255, Exit(255, None), None),
    ],
)
def test_exit_codes_of_the_client(tmp_path: Path, code: int, inside: Exit, said: str | None) -> None:
    assert ended_inside(Exit(code, None), contained(tmp_path, "")) == (inside, said)
    plain = Launch(("sh",), {}, frozenset(), ADDRESS)
    assert ended_inside(Exit(code, None), plain) == (Exit(code, None), None)


async def test_what_an_earlier_daemon_left_is_removed(tmp_path: Path) -> None:
    launch = contained(tmp_path, "", left_over="echo a1; echo b2")
    spawner = DirectSpawner({}, CpuSet(os.sched_getaffinity(0)))
    assert await spawner.adopt({0: lambda _: launch, 1: lambda _: launch}) == {}
    assert calls(tmp_path) == ["ids a1 b2"]


async def test_a_client_that_fails_or_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = contained(tmp_path, "", left_over="echo no storage >&2; exit 125").container
    assert broken is not None
    with pytest.raises(LauncherError, match="no storage"):
        await container_processes.remove_left_over(broken)
    monkeypatch.setattr(container_processes, "CLIENT_S", 0.05)
    slow = contained(tmp_path, "", left_over="sleep 1000").container
    assert slow is not None
    with pytest.raises(LauncherError, match="no answer within"):
        await container_processes.remove_left_over(slow)


async def test_a_process_of_no_container_is_not_taken_for_one(tmp_path: Path) -> None:
    lines = Lines()
    process = await start(contained(tmp_path, f"echo ${MARK}; exec sleep 1000"), lines)
    await lines.until(lambda lines: len(lines) == 1)
    assert main_pid(f"{MARK}={lines[0]}".encode()) is None, "it is in our own pid namespace"
    process.kill()
    await ended(process)
