"""Who may read, who may change: processes that really are other users, as the kernel tells them apart."""

from __future__ import annotations

import asyncio
import grp
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.fake_operations import FakeOperations

from launcher.control.connections import Bound
from launcher.control.messages import SlotCommand
from launcher.control.server import ControlServer

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")

# Users and groups that nobody has on a real machine.
USER, NOBODYS_GROUP = 4_000_001, 4_000_002
# curl: could not connect.
REFUSED_BY_THE_KERNEL = 7


@dataclass(frozen=True)
class Who:
    """One process's credentials."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


def two_groups() -> tuple[grp.struct_group, grp.struct_group]:
    first, second = [group for group in sorted(grp.getgrall()) if group.gr_gid not in {0, os.getegid()}][:2]
    return first, second


CHANGERS, READERS = two_groups()
READER = Who(USER, READERS.gr_gid)
STRANGER = Who(USER, NOBODYS_GROUP)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can pass, as /run/numa-launcher is; pytest's own is root's alone."""
    made = Path(tempfile.mkdtemp(prefix="nl-roles-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def operations() -> FakeOperations:
    return FakeOperations()


@pytest.fixture
async def shared(folder: Path, operations: FakeOperations) -> AsyncIterator[str]:
    """A socket with both groups."""
    server = ControlServer(str(folder / "c.sock"), CHANGERS.gr_name, operations, read_group=READERS.gr_name)
    await server.start()
    yield str(folder / "c.sock")
    await server.stop()


@pytest.fixture
async def private(folder: Path, operations: FakeOperations) -> AsyncIterator[str]:
    """A socket for one group, which may change."""
    server = ControlServer(str(folder / "c.sock"), CHANGERS.gr_name, operations)
    await server.start()
    yield str(folder / "c.sock")
    await server.stop()


def as_user(who: Who) -> tuple[str, ...]:
    """The start of a command line that runs as somebody: setpriv(1)."""
    groups = f"--groups={','.join(map(str, who.groups))}" if who.groups else "--clear-groups"
    return "setpriv", f"--reuid={who.uid}", f"--regid={who.gid}", groups


async def ask(path: str, who: Who, method: str, where: str) -> tuple[int, Any]:
    """As `who`; (curl's exit code, the reply)."""
    curl = await asyncio.create_subprocess_exec(
        *as_user(who), "curl", "--silent", "--unix-socket", path, "-X", method, f"http://localhost/v1/{where}",
        stdout=asyncio.subprocess.PIPE, cwd="/",
    )  # fmt: skip
    out, _ = await curl.communicate()
    return curl.returncode or 0, json.loads(out) if out else None


@pytest.mark.parametrize(
    ("who", "may_read", "may_change"),
    [
        (Who(0, 0), True, True),
        (Who(0, NOBODYS_GROUP), True, True),
        (Who(USER, CHANGERS.gr_gid), True, True),
        (Who(USER, NOBODYS_GROUP, (CHANGERS.gr_gid,)), True, True),
        (Who(USER, READERS.gr_gid, (NOBODYS_GROUP, CHANGERS.gr_gid)), True, True),
        (READER, True, False),
        (Who(USER, NOBODYS_GROUP, (READERS.gr_gid,)), True, False),
        (STRANGER, False, False),
        (Who(USER, NOBODYS_GROUP, (NOBODYS_GROUP + 1,)), False, False),
    ],
)
async def test_roles(
    shared: str, operations: FakeOperations, who: Who, may_read: bool, may_change: bool
) -> None:
    code, body = await ask(shared, who, "GET", "status")
    assert (code, "ready" in body) == (0, may_read)
    code, body = await ask(shared, who, "POST", "slots/0/stop")
    assert (code, "state" in body) == (0, may_change)
    assert operations.asked == ([(0, SlotCommand.STOP)] if may_change else [])


async def test_the_refusals_say_which_group(shared: str) -> None:
    _, body = await ask(shared, STRANGER, "GET", "status")
    assert body["error"] == {
        "message": f"cannot use the control socket: user '{USER}' is not in its group",
        "remedy": f"ask an administrator to add you to group '{READERS.gr_name}' (control.read_group)",
    }
    _, body = await ask(shared, READER, "POST", "reload?dry_run=1")
    assert body["error"] == {
        "message": f"cannot change anything here: user '{USER}' may only read",
        "remedy": f"ask an administrator to add you to group '{CHANGERS.gr_name}' (control.group)",
    }


async def test_without_a_read_group_the_kernel_refuses_other_users(
    private: str, operations: FakeOperations
) -> None:
    assert await ask(private, STRANGER, "GET", "status") == (REFUSED_BY_THE_KERNEL, None)
    assert await ask(private, READER, "GET", "status") == (REFUSED_BY_THE_KERNEL, None)
    for who in (Who(USER, CHANGERS.gr_gid), Who(USER, NOBODYS_GROUP, (CHANGERS.gr_gid,))):
        code, body = await ask(private, who, "POST", "slots/0/stop")
        assert (code, body["slot"]) == (0, 0)
    assert operations.asked == [(0, SlotCommand.STOP)] * 2


async def test_a_user_can_not_take_all_connections(folder: Path, operations: FakeOperations) -> None:
    shared = str(folder / "c.sock")
    server = ControlServer(
        shared, CHANGERS.gr_name, operations, read_group=READERS.gr_name, connections=Bound(2, 512)
    )
    await server.start()
    follow = ("curl", "--silent", "--no-buffer", "--unix-socket", shared)
    where = "http://localhost/v1/slots/0/logs?tail=1&follow=1"
    held = []
    for _ in range(2):
        curl = await asyncio.create_subprocess_exec(
            *as_user(READER), *follow, where, stdout=asyncio.subprocess.PIPE, cwd="/",
        )  # fmt: skip
        assert curl.stdout is not None
        assert json.loads(await curl.stdout.readline())["text"] == "<redacted>"
        held.append(curl)
    _, body = await ask(shared, READER, "GET", "status")
    assert body["error"]["message"] == "cannot use the control socket: too many connections are open"
    assert (await ask(shared, Who(0, 0), "GET", "status"))[1]["ready"] == 2, "root gets in"
    assert (await ask(shared, Who(USER + 1, READERS.gr_gid), "GET", "status"))[1]["ready"] == 2, "others, too"
    held[0].terminate()
    await held[0].communicate()
    assert (await ask(shared, READER, "GET", "status"))[1]["ready"] == 2
    held[1].terminate()
    await held[1].communicate()
    await server.stop()


async def test_readers_get_no_secret_and_do_not_drive_out_events(
    shared: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The fake's redactor knows "three" as a secret. Who may only read can ask as often as he likes."""
    caplog.set_level("INFO", "launcher.control")
    _, body = await ask(shared, READER, "GET", "slots/0/logs")
    assert [line["text"] for line in body["lines"]] == ["one", "two", "<redacted>"]
    _, body = await ask(shared, Who(0, 0), "GET", "slots/0/logs")
    assert body["lines"][-1]["text"] == "three"
    for _ in range(5):
        _, body = await ask(shared, READER, "POST", "slots/0/stop")
        assert "may only read" in body["error"]["message"]
    said = [record.getMessage() for record in caplog.records if record.name == "launcher.control"]
    assert len([line for line in said if line.startswith("refused POST /v1/slots/0/stop of Peer(")]) == 1
