"""A rolling upgrade: one host at a time is drained, upgraded, checked and returned. It stops at the first that gets worse,
and a second start goes on where the first stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from launcher.base.errors import LauncherError, TimedOutError, reason
from launcher.base.files import read_own, replace_file
from launcher.control import verdict
from launcher.control.client import UnreachableError
from launcher.control.messages import VERIFY_S
from launcher.fleet.hosts import Hosts
from launcher.fleet.members import MemberState

RELOAD: Final = ("reload",)
"""Instead of a command: the daemon reads its configuration again."""
# So often in a row a host must have no request before it counts as drained: one may be on its way from an ingress.
QUIET_LOOKS: Final = 6
POLL_S: Final = 0.5
# By more than this factor, and by more than so many seconds: less is noise of a short measurement.
SLOWER: Final = 1.25
TTFT_NOISE_S: Final = 0.05
TPOT_NOISE_S: Final = 0.005
T = TypeVar("T")


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A host before or after its upgrade, without requests of the ingress."""

    version: str
    ready: int
    slots: int
    level: int
    """launcher.control.verdict.level: 0 all slots are ready and watched, 1 some, 2 none is."""
    misplaced: tuple[int, ...]
    """Slots whose threads or memory are not where the plan has them."""
    ttft_s: float | None = None
    tpot_s: float | None = None


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept between two starts."""

    how: tuple[str, ...]
    done: tuple[str, ...] = ()
    doing: str | None = None
    before: Figures | None = None
    """Of `doing`; None: nothing was changed on it yet."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    how: tuple[str, ...]
    file: Path
    drain_s: float = 300.0
    """The longest wait for running requests of one host."""
    ready_s: float = 3600.0
    """The longest wait for its instances: they load their models."""
    bench: Callable[[str], tuple[float, float]] | None = None
    """Seconds to the first token and per token after it, measured on one host."""
    wait: Callable[[float], None] = time.sleep


def worse(before: Figures, after: Figures) -> list[str]:
    """In which points a host got worse. Fewer instances are none if the configuration wants fewer. Pure."""
    found = []
    if after.ready < min(before.ready, after.slots):
        found.append(f"{after.ready} of {after.slots} instances are ready, before it were {before.ready}")
    elif after.level > before.level:
        found.append("instances are not watched that were before")
    if new := [str(slot) for slot in after.misplaced if slot not in before.misplaced]:
        found.append(f"not placed as planned: slot {', '.join(new)}")
    for what, old, now, noise in (
        ("first token", before.ttft_s, after.ttft_s, TTFT_NOISE_S),
        ("time per token", before.tpot_s, after.tpot_s, TPOT_NOISE_S),
    ):
        if old is not None and now is not None and now > max(SLOWER * old, old + noise):
            found.append(f"{what} takes {1e3 * now:.0f} ms, before it were {1e3 * old:.0f} ms")
    return found


def read_progress(file: Path, how: Sequence[str]) -> Progress:
    """Raises LauncherError if another upgrade is unfinished."""
    try:
        progress = msgspec.json.decode(read_own(file), type=Progress)
    except FileNotFoundError:
        return Progress(how=tuple(how))
    except (OSError, msgspec.DecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise LauncherError(
            f"cannot read '{file}': {why}", "give --restart to begin with all hosts again"
        ) from None
    if progress.how != tuple(how):
        raise LauncherError(
            f"cannot begin an upgrade by '{' '.join(how)}': one by '{' '.join(progress.how)}' is unfinished",
            "finish it, or give --restart to begin with all hosts again",
        )
    return progress


def accept(hosts: Hosts, host: str, settings: Settings) -> None:
    """Take a host as it is. Raises LauncherError."""
    progress = read_progress(settings.file, settings.how)
    hosts.hold(host, draining=False)
    done = tuple(dict.fromkeys((*progress.done, host)))
    doing = None if progress.doing == host else progress.doing
    _keep(
        settings.file,
        Progress(how=progress.how, done=done, doing=doing, before=progress.before if doing else None),
    )


def upgrade(
    hosts: Hosts, names: Sequence[str], settings: Settings, say: Callable[[str], None]
) -> tuple[str, ...]:
    """Upgrade the hosts of these names, and return those that were left out because their agents do not answer. Raises
    LauncherError with what to do next; the file of the settings says what is done. An interrupt leaves the host as it is."""
    fresh = not settings.file.exists()
    progress = read_progress(settings.file, settings.how)
    states = {member.host: member.state for member in hosts.members()}
    lost = tuple(name for name in names if states[name] is MemberState.LOST)
    waiting = [name for name in names if name not in {*progress.done, *lost}]
    waiting.sort(key=lambda name: name != progress.doing)
    for host in waiting:
        progress = _one(_Host(hosts, host, settings, say), host, settings, progress)
        _keep(settings.file, progress)
    if set(progress.done) >= set(names if fresh else states):
        settings.file.unlink(missing_ok=True)
    return lost


def _one(step: _Host, host: str, settings: Settings, progress: Progress) -> Progress:
    try:
        before = step.begin(progress.before if host == progress.doing else None)
        _keep(settings.file, msgspec.structs.replace(progress, doing=host, before=before))
        step.change(before)
    except LauncherError as error:
        raise type(error)(f"cannot upgrade {host}: {error.message}", f"{step.left}; {error.remedy}") from None
    except KeyboardInterrupt:
        step.say(f"interrupted: {step.left}")
        raise
    return Progress(how=progress.how, done=(*progress.done, host))


def _keep(file: Path, progress: Progress) -> None:
    try:
        replace_file(file, msgspec.json.encode(progress))
    except OSError as error:
        raise LauncherError(
            f"cannot write '{file}': {reason(error)}", "set `state` in fleet.toml to a folder of yours"
        ) from None


class _Host:
    """One host on its way. `left`: how it is if it stops here."""

    def __init__(self, hosts: Hosts, host: str, settings: Settings, say: Callable[[str], None]) -> None:
        self._hosts, self._host, self._settings, self._print = hosts, host, settings, say
        self.left = "nothing was changed on it; `fleet status` shows whether it gets requests"

    def say(self, text: str) -> None:
        self._print(f"{self._host}: {text}")

    def begin(self, before: Figures | None) -> Figures:
        """Without requests, and how it was."""
        self._hosts.hold(self._host, draining=True)
        changed = "nothing was changed" if before is None else "its upgrade had begun before"
        self.left = f"it gets no new requests, and {changed}; a second start continues with it"
        self.say("gets no new requests; waiting for running ones")
        quiet = 0

        def drained() -> bool:
            nonlocal quiet
            requests = self._status()["requests"]
            quiet = quiet + 1 if not requests["in_flight"] else 0
            return quiet >= QUIET_LOOKS

        try:
            self._until(drained, "its running requests", self._settings.drain_s)
            return self._look() if before is None else before
        except LauncherError:
            if before is None:
                self._hosts.hold(self._host, draining=False)
                self.left = "it serves again, and nothing was changed"
            raise

    def change(self, before: Figures) -> None:
        self.left = "it gets no new requests, and its upgrade has begun; a second start continues with it"
        self.say(f"{before.ready} of {before.slots} ready; upgrading: {' '.join(self._settings.how)}")
        self._reload() if self._settings.how == RELOAD else self._run()
        self._until(self._settled, "its instances", self._settings.ready_s)
        after = self._look()
        if found := worse(before, after):
            raise LauncherError(
                f"it got worse: {'; '.join(found)}",
                f"repair it and start the command again, or take it as it is with --accept {self._host}",
            )
        self._hosts.hold(self._host, draining=False)
        self.say(f"{after.ready} of {after.slots} ready, version {after.version}; serves again")

    def _run(self) -> None:
        code, output = self._hosts.run(self._host, self._settings.how, self._settings.ready_s)
        if code:
            last = (output.strip().splitlines() or ["no output"])[-1]
            raise LauncherError(
                f"the command ended with exit code {code}: {last}", "run it on the host by hand"
            )

    def _reload(self) -> None:
        self._ask("POST", "/reload", 90.0)
        end = self._until(
            lambda: now if (now := self._ask("GET", "/reload"))["stage"] not in {"running", "rolling back"} else None,
            "its reload", self._settings.ready_s,
        )  # fmt: skip
        if end["stage"] != "done":
            raise LauncherError(
                f"reload {end['stage']}: {end.get('error') or ''}", end.get("remedy") or "see its log"
            )

    def _settled(self) -> bool:
        """Whether nothing is on its way to be ready."""
        try:
            slots = self._status()["slots"]
        except UnreachableError:
            return False  # it restarts
        # A daemon answers before its instances begin to start: those without a generation are on their way, too.
        return all(
            slot["state"] in {"ready", "failed", "held"}
            or (slot["state"] == "stopped" and slot["generation"])
            for slot in slots
        )

    def _look(self) -> Figures:
        status = self._status()
        slots = [slot["slot"] for slot in status["slots"] if slot["state"] == "ready"]
        checked = [self._ask("POST", f"/slots/{slot}/verify", VERIFY_S) for slot in slots]
        ttft_s, tpot_s = self._settings.bench(self._host) if self._settings.bench else (None, None)
        return Figures(
            version=status["version"], ready=status["ready"], slots=len(status["slots"]), level=verdict.level(status),
            misplaced=tuple(slot["slot"] for slot in checked if not (slot["verified"] or {}).get("ok")),
            ttft_s=ttft_s, tpot_s=tpot_s,
        )  # fmt: skip

    def _status(self) -> Any:
        return self._ask("GET", "/status")

    def _ask(self, method: str, path: str, timeout_s: float = 30.0) -> Any:
        return self._hosts.ask(self._host, method, path, timeout_s=timeout_s)

    def _until(self, check: Callable[[], T | None], what: str, within_s: float) -> T:
        waited = 0.0
        while not (found := check()):
            if waited >= within_s:
                raise TimedOutError(
                    f"{what} took longer than {within_s:g} s", "see `numa-launcher fleet status`"
                )
            self._settings.wait(POLL_S)
            waited += POLL_S
        return found
