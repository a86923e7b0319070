"""numa-launcher.service around a tuning run: stopped before, started again whatever happens to `tune`.

A transient unit waits for the lock that `tune` holds on a file. The kernel releases it with the process, also after
SIGKILL; then the unit starts what was active. After a reboot systemd starts what is enabled, as always."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from launcher.base.errors import LauncherError, RefusedError, reason
from launcher.control.client import ControlClient, NoAnswerError, UnreachableError
from launcher.measure.tune.runner import unlock, until_unlocked

SERVICE: Final = "numa-launcher.service"
# The sockets, too: a client's connection to them would start the service in the middle of a measurement.
UNITS: Final = ("numa-launcher.socket", "numa-launcher-control.socket", SERVICE)
INSTANCES: Final = "numa-launcher-slot*.service"
_RUNNING: Final = frozenset({"active", "activating", "reloading", "deactivating"})
# sd_booted(3)
_BOOTED: Final = Path("/run/systemd/system")
# systemd answers in milliseconds, and in seconds while it reloads a large system.
_CALL_S: Final = 60.0
# Longer than the unit's TimeoutStopSec=: it drains its requests first.
_STOP_S: Final = 900.0
# For the transient unit to start the service again.
_RESTORE_S: Final = 30.0
_POLL_S: Final = 0.2

Run = Callable[[Sequence[str], float], "subprocess.CompletedProcess[str]"]


def _run(argv: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=limit_s)


class Service:
    """The shipped units. `run` executes a command; `booted` exists where systemd is process 1."""

    def __init__(self, run: Run = _run, booted: Path = _BOOTED) -> None:
        self._run = run
        self._booted = booted

    def active(self) -> list[str]:
        """Those of UNITS that run or listen; none without systemd. Raises LauncherError."""
        if not self._booted.exists():
            return []
        shown = self._systemctl("show", "--property=Id,ActiveState", *UNITS)
        found: list[str] = []
        for block in shown.split("\n\n"):
            facts = dict(line.partition("=")[::2] for line in block.splitlines())
            if facts.get("ActiveState") in _RUNNING:
                found.append(facts["Id"])
        return found

    @contextlib.contextmanager
    def stopped(self, units: Sequence[str], lock: Path) -> Iterator[None]:
        """Within the context `units` are stopped. Raises LauncherError."""
        with until_unlocked(lock) as file:
            self._start_guard(units, lock)
            try:
                self._systemctl("stop", "--no-ask-password", *units, limit_s=_STOP_S)
                # Of a daemon that was killed before: it would have adopted them.
                self._systemctl("stop", "--no-ask-password", INSTANCES, limit_s=_STOP_S)
                yield
            finally:
                unlock(file)
                self._await_start(units)

    def _start_guard(self, units: Sequence[str], lock: Path) -> None:
        flock = shutil.which("flock")
        if flock is None:
            raise LauncherError(
                "cannot stop the service: the program 'flock' is missing", "install util-linux"
            )
        argv = [
            "systemd-run", "--quiet", "--collect", "--no-ask-password", "--service-type=exec",
            f"--unit=numa-launcher-after-tune-{os.getpid()}",
            f"--description=start {', '.join(units)} when tune has ended",
            flock, str(lock), "systemctl", "start", "--no-block", *units,
        ]  # fmt: skip
        self._command(argv, "prepare the start of the service after the run")

    def _await_start(self, units: Sequence[str]) -> None:
        deadline = time.monotonic() + _RESTORE_S
        while missing := sorted(set(units) - set(self.active())):
            if time.monotonic() > deadline:  # the transient unit was stopped by hand
                self._systemctl("start", "--no-block", "--no-ask-password", *missing)
                return
            time.sleep(_POLL_S)

    def _systemctl(self, verb: str, *words: str, limit_s: float = _CALL_S) -> str:
        return self._command(["systemctl", verb, *words], f"{verb} {SERVICE}", limit_s)

    def _command(self, argv: list[str], what: str, limit_s: float = _CALL_S) -> str:
        try:
            done = self._run(argv, limit_s)
        except subprocess.TimeoutExpired:
            raise LauncherError(
                f"cannot {what}: '{argv[0]}' has not ended within {limit_s:g} s",
                f"see `systemctl status {SERVICE}`",
            ) from None
        except OSError as error:
            raise LauncherError(
                f"cannot {what}: '{argv[0]}': {reason(error)}", "install systemd's tools"
            ) from None
        if done.returncode != 0:
            said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
            raise LauncherError(
                f"cannot {what}: {said}", f"run tune as root; see `systemctl status {SERVICE}`"
            )
        return done.stdout


def claim_cores(
    service: Service, sockets: Sequence[str], *, stop: bool, lock: Path
) -> contextlib.AbstractContextManager[None]:
    """Refuses (RefusedError) while the service or a daemon behind one of the control `sockets` runs here.

    With `stop` the context stops the service and starts it again."""
    units = service.active()
    if units and not stop:
        raise RefusedError(
            f"cannot tune: {' and '.join(units)} {'is' if len(units) == 1 else 'are'} active, and the cores are in use",
            "add --stop-service: tune stops the service and starts it again at the end, also when tune is killed",
        )
    # With active units systemd holds the sockets: a connection would start the service.
    for socket in () if units else dict.fromkeys(sockets):
        _refuse_daemon(socket)
    return service.stopped(units, lock) if units else contextlib.nullcontext()


def _refuse_daemon(socket: str) -> None:
    try:
        found = f"pid {ControlClient(socket).get('/status')['pid']}"
    except NoAnswerError:
        found = "it does not answer"
    except UnreachableError:
        return
    raise RefusedError(
        f"cannot tune: a numa-launcher daemon ({found}) behind '{socket}' uses the cores",
        f"stop it and start tune again; --stop-service stops {SERVICE} only",
    )
