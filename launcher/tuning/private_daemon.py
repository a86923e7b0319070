"""A daemon of tune's own for one candidate: what is measured is the product, not the engine alone.

It listens on loopback and on sockets in a folder of its own, and dies with `tune`; its engines die with it (shim.py)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import tomlkit

from launcher.config.schema import Config
from launcher.control.client import ControlClient
from launcher.errors import LauncherError, reason
from launcher.host.child import dies_with_parent
from launcher.tuning.layout_config import with_layout
from launcher.tuning.model import Layout
from launcher.tuning.visits import NotStartedError

# A crash is tried once more: engines that race for memory or files at a start succeed then.
_CRASHES: Final = 2
_POLL_S: Final = 0.3
# For the daemon to read the model, probe the engine and open its socket.
_SOCKET_S: Final = 120.0
_STOP_SLACK_S: Final = 30.0
# The memory of ended engines is free within seconds; other programs' needs change meanwhile.
_MEMORY_S: Final = 10.0
_MEMORY_SHARE: Final = 0.95
_OVERRIDES: Final = "NUMA_LAUNCHER_"


def private_config(
    config: Config, layout: Layout, folder: Path, cache: Path, env: Mapping[str, str]
) -> dict[str, Any]:
    """The configuration with the candidate's layout, as plain values; nothing in it reaches the service.

    `env` is added to the engine's environment. The compile caches in `cache` are shared by all visits; not with the
    service, whose instances may run as another user."""
    tree: dict[str, Any] = _without_none(msgspec.to_builtins(with_layout(config, layout)))
    tree["engine"] |= {"cache_dir": str(cache), "env": {**tree["engine"]["env"], **env}}
    for key in ("tls_certificate", "tls_key", "api_keys_file", "overflow"):
        tree["proxy"].pop(key, None)
    tree["proxy"]["listen"] = ["127.0.0.1:0"]
    tree["control"] = {"socket": str(folder / "control.sock")}
    tree["supervision"] |= {"spawner": "direct", "crash_limit": _CRASHES}
    tree["logging"] |= {"format": "text"}
    tree |= {"usage": {"enabled": False}, "audit": {}, "telemetry": {"history": False}}
    return tree


class PrivateDaemon:
    """`numa-launcher serve` as a child."""

    def __init__(self, folder: Path, log: Path) -> None:
        self._client = ControlClient(str(folder / "control.sock"))
        self._log = log
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_OVERRIDES)}
        with log.open("ab") as file:
            self._process = subprocess.Popen(  # Ctrl-C reaches tune only
                [sys.executable, "-m", "launcher", "serve", "-c", str(folder / "config.toml")],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ, start_new_session=True,
                preexec_fn=dies_with_parent(),  # noqa: PLW1509  prctl only
            )  # fmt: skip

    def status(self) -> dict[str, Any]:
        return self._client.get("/status")

    def wait_ready(self) -> str:
        """The endpoint's URL once every slot is ready. Raises NotStartedError; the daemon's own time limits hold."""
        deadline: float | None = time.monotonic() + _SOCKET_S
        while True:
            if self._process.poll() is not None:
                raise NotStartedError(self._last_words())
            try:
                status = self.status()
            except LauncherError as error:
                if deadline is not None and time.monotonic() > deadline:
                    raise NotStartedError(error.message) from None
            else:
                deadline = None
                if status["ready"] == len(status["slots"]):
                    return str(status["endpoint"])
                for slot in status["slots"]:
                    if slot["state"] == "failed":
                        raise NotStartedError(cause_of(slot))
            time.sleep(_POLL_S)

    def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL: then the shims kill its engines."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("cannot ")]
        return (errors or lines or [f"the daemon ended with {self._process.returncode}"])[-1]


@contextlib.contextmanager
def running(
    config: Config, layout: Layout, *, run: Path, cache: Path, env: Mapping[str, str], log: Path
) -> Iterator[PrivateDaemon]:
    """A daemon with the candidate's layout; on exit it, its engines and its sockets are gone. `run`: the run's folder."""
    free = psutil.virtual_memory().available
    folder = _socket_folder(run)
    try:
        tree = private_config(config, layout, folder, cache, env)
        (folder / "config.toml").write_text(tomlkit.dumps(tree))
        daemon = PrivateDaemon(folder, log)
        try:
            yield daemon
        except BaseException:
            daemon.kill()
            raise
        daemon.stop(config.supervision.stop_timeout_s + _STOP_SLACK_S)
    finally:
        _await_memory(free)
        shutil.rmtree(folder, ignore_errors=True)


def _socket_folder(run: Path) -> Path:
    """Short, for the 107 bytes of a socket's path (unix(7)); one per run, so that a killed run's is removed by the next.
    Raises LauncherError."""
    digest = hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"numa-launcher-tune-{digest}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(mode=0o700)  # fails where another user has made it
    except OSError as error:
        raise LauncherError(
            f"cannot make the folder '{folder}': {reason(error)}",
            "remove it, or set TMPDIR to another folder",
        ) from None
    return folder


def cause_of(slot: Mapping[str, Any]) -> str:
    """Of a slot of `status`."""
    cause = slot["last_cause"] or {"message": f"its state is {slot['state']}"}
    return f"slot {slot['slot']}: {cause['message']}"


def _await_memory(wanted_bytes: int) -> None:
    deadline = time.monotonic() + _MEMORY_S
    while psutil.virtual_memory().available < _MEMORY_SHARE * wanted_bytes and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _without_none(value: Any) -> Any:
    """TOML has no null: an absent key is the default."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_without_none(inner) for inner in value]
    return value
