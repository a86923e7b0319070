"""What a container needs beyond the tree of processes that its client is: see engines/containers.py for the argv."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Final

from launcher.base.errors import LauncherError, reason
from launcher.engines.base import Container, Launch
from launcher.instances.ports import Exit

# For podman or docker to list and remove what an earlier daemon left.
CLIENT_S: Final = 60.0
# podman-run(1) and docker's `run` reference: what the client's own exit codes mean.
NOT_STARTED: Final = 125
_CODES: Final = {
    NOT_STARTED: "it did not start the container",
    126: "the image's command can't be executed",
    127: "the image has no such command",
}
# A main process that a signal ended, as a shell reports it.
_SIGNALS: Final = range(129, 193)


def for_shim(container: Container | None) -> str:
    return "" if container is None else json.dumps([container.last_word, container.remove])


def make_folders(container: Container) -> None:
    """The host's side of what is mounted: podman refuses a folder that is not there. Raises OSError."""
    for folder in container.folders:
        Path(folder).mkdir(parents=True, exist_ok=True)


def ended_inside(ended: Exit, launch: Launch) -> tuple[Exit, str | None]:
    """How the main process ended, from how its client did; and a line for the log where the client failed."""
    if launch.container is None or ended.code is None:
        return ended, None
    if ended.code in _SIGNALS:
        return Exit(code=None, signal=ended.code - 128), None
    if (what := _CODES.get(ended.code)) is not None:
        return ended, f"numa-launcher: {Path(launch.argv[0]).name} ended with {ended.code}: {what}"
    return ended, None


def main_pid(mark: bytes) -> int | None:
    """The first process of a container that was started with `mark` (NAME=value) in its environment.

    It is number 1 of a pid namespace below ours (proc(5), NSpid), and a small init that keeps its environment. None
    while there is none, or where another user's may not be read."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if _is_first_below(entry) and mark in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
    return None


def _is_first_below(proc: Path) -> bool:
    for line in (proc / "status").read_text(errors="replace").splitlines():
        if line.startswith("NSpid:"):
            _, *numbers = line.split()
            return len(numbers) > 1 and numbers[-1] == "1"
    return False


async def remove_left_over(container: Container) -> None:
    """Remove the containers of an earlier daemon. Raises LauncherError."""
    ids = (await _ask(container.left_over)).split()
    if ids:
        await _ask((*container.remove_ids, *ids))


async def remove(container: Container) -> None:
    """One whose shim was killed. What can't be removed now is removed before the next start."""
    with contextlib.suppress(LauncherError):
        await _ask(container.remove)


async def _ask(argv: tuple[str, ...]) -> str:
    name = Path(argv[0]).name
    try:
        client = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise LauncherError(f"cannot run {name}: {reason(error)}", f"install {name}") from error
    try:
        async with asyncio.timeout(CLIENT_S):
            out, errors = await client.communicate()
    except TimeoutError:
        raise LauncherError(
            f"cannot run `{name} {argv[1]}`: no answer within {CLIENT_S:.0f} s", f"run: {name} info"
        ) from None
    finally:
        if client.returncode is None:
            os.killpg(client.pid, signal.SIGKILL)  # its children hold its pipes too
            await client.communicate()  # until its pipes have ended, too
    if client.returncode != 0:
        why = errors.decode(errors="replace").strip().splitlines()
        raise LauncherError(
            f"cannot run `{name} {argv[1]}`: {why[-1] if why else f'exit code {client.returncode}'}",
            f"run: {name} info",
        )
    return out.decode(errors="replace")
