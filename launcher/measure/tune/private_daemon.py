"""A daemon of tune's own for one candidate: what is measured is the product, not the engine alone.

It listens on loopback and on sockets in a folder of its own, and dies with `tune`; its engines die with it (shim.py)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import tomlkit
from msgspec import Struct

from launcher.base.errors import LauncherError, reason
from launcher.base.files import HUB
from launcher.base.processes import dies_with_parent
from launcher.config.schema import Config
from launcher.control.client import ControlClient
from launcher.engines.make import engine_type
from launcher.measure.tune.layout import with_layout
from launcher.measure.tune.model import Layout, NotStartedError

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
# Of root's login, not of the instances' user.
_LOGIN: Final = frozenset({"HOME", "USER", "LOGNAME", "SHELL", "MAIL"})
_IMPORTS_S: Final = 60.0
_HIDDEN: Final = 'raise ImportError("switched off for this measurement")\n'


class InstancesUser(Struct, frozen=True):
    """The user of the service's instances. Code that comes with a model must not run as root."""

    name: str
    uid: int
    gid: int
    home: str

    def environ(self, of_root: Mapping[str, str]) -> dict[str, str]:
        """Models that are named are found where numa-launcher.service has them (HF_HOME= of the unit)."""
        kept = {n: v for n, v in of_root.items() if n not in _LOGIN and not n.startswith("XDG_")}
        return {"HF_HOME": str(HUB), **kept, "HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def process(self) -> dict[str, Any]:
        """Arguments of subprocess.Popen."""
        return {
            "user": self.uid, "group": self.gid, "extra_groups": os.getgrouplist(self.name, self.gid),
            "env": self.environ(os.environ),
        }  # fmt: skip


def instances_user(
    config: Config,
    euid: int,
    find: Callable[[str], pwd.struct_passwd] = pwd.getpwnam,
    python: str = sys.executable,
) -> InstancesUser | None:
    """The user whom engines run as while root tunes; None where they run as the caller.

    These are: a caller who is not root, `[systemd] user = "root"`, and a machine without that user, on which
    numa-launcher is not installed. Raises LauncherError if the user cannot run this Python."""
    name = config.systemd.user
    if euid != 0 or name == "root":
        return None
    try:
        entry = find(name)
    except KeyError:
        return None
    user = InstancesUser(name, entry.pw_uid, entry.pw_gid, entry.pw_dir)
    try:
        done = subprocess.run(
            [python, "-c", "import launcher"], cwd="/", capture_output=True, text=True, check=False, timeout=_IMPORTS_S,
            **user.process(),
        )  # fmt: skip
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except OSError as error:
        why = reason(error)
    else:
        if done.returncode == 0:
            return user
    raise LauncherError(
        f"cannot tune as root: engines run as user '{name}', which cannot run '{python}': {why}",
        "run the installed numa-launcher (scripts/install), or run tune as a user who may run this one",
    )


def private_config(
    config: Config, layout: Layout, folder: Path, cache: Path, env: Mapping[str, str]
) -> dict[str, Any]:
    """The configuration with the candidate's layout, as plain values; nothing in it reaches the service.

    `env` is added to the engine's environment. The compile caches in `cache` are shared by all visits; not with the
    service, whose instances may run as another user."""
    overriding = engine_type(config.engine.kind).overriding
    tree: dict[str, Any] = _without_none(msgspec.to_builtins(with_layout(config, layout, overriding)))
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

    def __init__(self, folder: Path, log: Path, user: InstancesUser | None) -> None:
        self._client = ControlClient(str(folder / "control.sock"))
        self._log = log
        process: dict[str, Any] = {"env": os.environ} if user is None else user.process()
        process["env"] = {n: value for n, value in process["env"].items() if not n.startswith(_OVERRIDES)}
        with log.open("ab") as file:
            self._process = subprocess.Popen(  # Ctrl-C reaches tune only
                [sys.executable, "-P", "-m", "launcher", "serve", "-c", str(folder / "config.toml")],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
                cwd=None if user is None else "/",
                preexec_fn=dies_with_parent(),  # noqa: PLW1509  prctl only
                **process,
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
    config: Config,
    layout: Layout,
    *,
    run: Path,
    cache: Path,
    log: Path,
    hidden: Sequence[str] = (),
    user: InstancesUser | None = None,
) -> Iterator[PrivateDaemon]:
    """A daemon with the candidate's layout; on exit it, its engines and its sockets are gone. `run`: the run's folder.

    `hidden`: modules that its engines cannot import. `user`: runs the daemon and its engines; the caller if None."""
    free = psutil.virtual_memory().available
    folder = _socket_folder(run)
    try:
        tree = private_config(config, layout, folder, cache, _hide(hidden, folder, config))
        if user is not None:
            _hand_over(tree, folder, cache, user)
        (file := folder / "config.toml").write_text(tomlkit.dumps(tree))
        if user is not None:
            os.chown(file, user.uid, user.gid)  # the caller's umask may be strict
            # Last: from here on its files are the user's to change.
            os.chown(folder, user.uid, user.gid)
        daemon = PrivateDaemon(folder, log, user)
        try:
            yield daemon
        except BaseException:
            daemon.kill()
            raise
        daemon.stop(config.supervision.stop_timeout_s + _STOP_SLACK_S)
    finally:
        _await_memory(free)
        shutil.rmtree(folder, ignore_errors=True)


def _hide(modules: Sequence[str], folder: Path, config: Config) -> dict[str, str]:
    """The engines' environment without these modules. In the sockets' folder, which their user may enter: the run's, with
    values of --set, is closed to others."""
    if not modules:
        return {}
    shadow = folder / "hidden"
    shadow.mkdir()
    for module in modules:
        (file := shadow / f"{module}.py").write_text(_HIDDEN)
        file.chmod(0o644)
    shadow.chmod(0o755)  # the caller's umask may be strict
    before = config.engine.env.get("PYTHONPATH")
    return {"PYTHONPATH": f"{shadow}:{before}" if before else str(shadow)}


def _hand_over(tree: dict[str, Any], folder: Path, cache: Path, user: InstancesUser) -> None:
    """What the user needs of root's files: its own compile caches, and a copy of the token that only root may read."""
    # Engines of root or of another user compiled it in runs before: these could not write there.
    if cache.is_dir() and not cache.is_symlink() and cache.stat().st_uid != user.uid:
        shutil.rmtree(cache)
    cache.mkdir(mode=0o755, exist_ok=True)
    os.chown(cache, user.uid, user.gid, follow_symlinks=False)
    if token := tree["engine"].get("hf_token_file"):
        copy = folder / "hf-token"
        copy.touch(mode=0o600)
        shutil.copyfile(Path(token).expanduser(), copy)
        os.chown(copy, user.uid, user.gid)
        tree["engine"]["hf_token_file"] = str(copy)


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
