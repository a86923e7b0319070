"""Whether the machine is well, in words: level, first line, and problems with their remedies. Pure. So for a fleet.

`status`, `top`, `fleet status` and the dashboard use these words, so that they agree.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final

from launcher.base.watched_file import FileState

Slot = Mapping[str, Any]
Status = Mapping[str, Any]

# A request that has waited this long in the queue is a problem: instances are busy, or none is ready.
QUEUED_S: Final = 10.0
# Share of the queue's bounds from which it fills.
FILLS: Final = 0.8
# Free share of a disk below which it counts as full.
DISK_LEAST: Final = 0.02
# A host is slow if its next first token is predicted LATE times later than the others' median, and LATE_S later.
LATE: Final = 2.0
LATE_S: Final = 1.0
_CHANGED: Final = "the machine has changed: "
# Hosts of one kind that the line names; it counts the others.
NAMED: Final = 3


class Level(StrEnum):
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is not as it should be."""

    what: str
    remedy: str = ""
    """What to do about it; empty if there is nothing to do but wait."""
    slot: int | None = None
    """None: the whole machine."""
    host: str | None = None
    """Of a fleet. None: the whole fleet, or this machine."""
    level: Level = Level.WARN
    """GOOD: a remark."""
    evidence: tuple[str, ...] = ()
    """Log lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    level: Level
    line: str
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host of a fleet, as far as it is known."""

    name: str
    state: str
    """`ready` or `draining`; `lost`: its agent does not answer; `down`: its daemon does not; `no daemon`: none so far."""
    ready: int = 0
    """Of its `instances`."""
    instances: int = 0
    running: int = 0
    waiting: int = 0
    predicted_ttft_s: float | None = None
    stragglers: tuple[int, ...] = ()
    """Slots that are slower than their siblings of the fleet."""
    troubles: tuple[str, ...] = ()
    """Why its daemon does not answer, and what its agent found wrong."""

    @property
    def serves(self) -> bool:
        """Whether new requests may be sent to it."""
        return self.state in {"ready", "lost"} and self.ready > 0


def judge(status: Status, now: float, machine: Mapping[str, Any] | None = None) -> Verdict:
    """The verdict on what a daemon answers to `GET /v1/status`, and to `GET /v1/machine` if known."""
    # A slot whose verification found something has these words already.
    named = {slot["slot"] for slot in status["slots"] if (slot["verified"] or {}).get("problems")}
    problems = (
        *_of_status(status, now),
        *(found for found in _of_machine(machine or {}) if found.slot is None or found.slot not in named),
    )
    # As the words of the line: DOWN is bad; DEGRADED, and OK with warnings, are not.
    warned = any(problem.level is not Level.GOOD for problem in problems)
    # A daemon says some problems in its warnings, too: the problem has the remedy. The two answers are not of one moment,
    # and the machine's figures may differ in them.
    said = {problem.what for problem in problems}
    drifts = bool((machine or {}).get("drift"))
    remarks = (
        Problem(what=warning, level=Level.GOOD)
        for warning in dict.fromkeys(status["warnings"])
        if warning not in said and not (drifts and warning.startswith(_CHANGED))
    )
    return Verdict(
        level=_RANK[max(level(status), int(warned))],
        line=_line(status, now, problems),
        problems=(*problems, *remarks),
    )


def summary(status: Status, now: float) -> str:
    """One line for a monitor: ASCII, problems first."""
    return _line(status, now, tuple(_of_status(status, now)))


def problems_of_daemon(status: Status) -> Iterator[Problem]:
    """What is wrong with the daemon as a whole, worst first; not with its slots."""
    if no_listener := status.get("no_listener"):
        yield Problem(
            what=no_listener,
            remedy="see systemctl status numa-launcher.socket; then systemctl restart numa-launcher.socket numa-launcher",
            level=Level.BAD,
        )
    if absent := status.get("absent_endpoints"):  # a daemon from before an upgrade does not send it
        yield Problem(
            what=f"no interface of this host has the address of {', '.join(absent)}",
            remedy="it is served as soon as one has it; correct a wrong one in numa-launcher.socket, or in [proxy] listen",
            level=Level.BAD if _is_cut_off(status) else Level.WARN,
        )
    yield from _of_queue(status)
    if unapplied := status.get("unapplied"):  # a daemon from before an upgrade does not send it
        yield Problem(
            what=unapplied,
            remedy="numa-launcher reload --dry-run shows what a reload changes, or why it is refused",
        )


def _of_status(status: Status, now: float) -> Iterator[Problem]:
    yield from problems_of_daemon(status)
    yield from of_files(status, now)
    for slot in status["slots"]:
        yield from problems_of(slot, now)


_RANK: Final = (Level.GOOD, Level.WARN, Level.BAD)


def no_answer(message: str, remedy: str, silent_s: float | None) -> Verdict:
    """The verdict when the daemon does not answer. `silent_s`: since its last answer; None: it never answered."""
    since = "" if silent_s is None else f" for {duration(silent_s)}"
    problem = Problem(what=message, remedy=remedy, level=Level.UNKNOWN)
    return Verdict(level=Level.UNKNOWN, line=f"NO ANSWER{since}: {message}", problems=(problem,))


def level(status: Status) -> int:
    """0: every slot is ready and watched, the certificate is valid, each listener's address is here. 1: some are, or one is
    not. 2: none is ready, or no client can reach them."""
    ready, slots = status["ready"], status["slots"]
    if not ready or status.get("no_listener") or _is_cut_off(status):
        return 2
    refused = any(file["state"] in _REFUSED for file in status.get("files", ()))
    unwatched = any(slot["unwatched"] for slot in slots)
    return int(ready < len(slots) or refused or unwatched or bool(status.get("absent_endpoints")))


def _is_cut_off(status: Status) -> bool:
    """Whether no listener has an address of this host."""
    absent = status.get("absent_endpoints", ())
    return bool(absent) and set(absent) == set(status["endpoints"])


def _line(status: Status, now: float, problems: Sequence[Problem]) -> str:
    slots, found = status["slots"], level(status)
    ready = f"{('OK', 'DEGRADED', 'DOWN')[found]} {status['ready']}/{len(slots)} ready"
    warnings = sum(problem.level is not Level.GOOD for problem in problems)
    if warnings and found == 0:
        ready += f", {warnings} warning{'s' * (warnings > 1)}"
    parts = [ready]
    parts += [_trouble(slot, now) for slot in slots if slot["state"] != "ready"]
    parts += [f"slot {slot['slot']} makes no progress" for slot in slots if slot["stalled_s"]]
    parts += [f"slot {slot['slot']} is not watched" for slot in slots if slot["unwatched"]]
    parts += [f"{file['what']} {file['state']}" for file in _bad_files(status)]
    parts += [problem.what for problem in problems_of_daemon(status)]
    requests = status["requests"]
    parts.append(f"{requests.get('in_flight', 0)} in flight, {requests.get('waiting', 0)} waiting")
    speeds = [slot["tokens_per_s"] for slot in slots if slot["tokens_per_s"] is not None]
    parts += [f"{sum(speeds):.0f} tok/s"] * bool(speeds)
    slowest = max((slot["first_token"]["p99_s"] for slot in slots if slot["first_token"]), default=None)
    parts += [] if slowest is None else [f"TTFT p99 {seconds(slowest)}s"]
    return "; ".join(parts)


def _trouble(slot: Slot, now: float) -> str:
    text = f"slot {slot['slot']} {state_of(slot)} {duration(now - slot['since'])}"
    return f"{text} ({slot['last_cause']['name']})" if slot["last_cause"] else text


def _of_queue(status: Status) -> Iterator[Problem]:
    queue = status.get("queue")  # a daemon from before an upgrade does not send it
    if not queue or not queue["requests"]:
        return
    shares = {
        size: queue[size] / queue[f"limit_{size}"]
        for size in ("requests", "bytes")
        if queue.get(f"limit_{size}")
    }
    full, oldest_s = max(shares.values(), default=0.0), queue["oldest_s"] or 0.0
    if full < FILLS and oldest_s < QUEUED_S:
        return
    word = "full" if full >= 1 else "fills" if full >= FILLS else "slow"
    of = f" of {queue['limit_requests']}" if queue.get("limit_requests") else ""
    requests = "request" if queue["requests"] == 1 and not of else "requests"
    in_bytes = f", {shares['bytes']:.0%} of queue_max_bytes" if shares.get("bytes", 0.0) >= FILLS else ""
    yield Problem(
        what=f"queue {word}: {queue['requests']}{of} {requests}{in_bytes}, oldest {duration(oldest_s)}",
        remedy="send fewer requests, start more instances, or set [[proxy.overflow]] (docs/proxy.md)",
        level=Level.BAD if full >= 1 else Level.WARN,
    )


# States of files, as launcher.base.watched_file has them.
_IN_USE: Final = "in use"
_REFUSED: Final = frozenset({"expired", "not yet valid"})


def _bad_files(status: Status) -> list[Mapping[str, Any]]:
    # A daemon from before an upgrade does not send them.
    return [file for file in status.get("files", ()) if file["state"] != _IN_USE]


def of_files(status: Status, now: float) -> Iterator[Problem]:
    """Files that cannot be used, have expired or soon will."""
    for file in _bad_files(status):
        yield Problem(
            what=f"{file['why']} (for {duration(now - file['since'])})", remedy=file["remedy"],
            level=Level.BAD if file["state"] in _REFUSED else Level.WARN,
        )  # fmt: skip


def problems_of(slot: Slot, now: float) -> Iterator[Problem]:
    """What is wrong with a slot, worst first."""
    yield from _of_state(slot, now)
    yield from _of_health(slot)
    yield from _of_placement(slot)


_UNDONE_BY: Final = {
    "drained": "resume",
    "stopped": "start",
    "failed": "start",
    "held": "release",
    "quarantine": "release",
}


def _of_state(slot: Slot, now: float) -> Iterator[Problem]:
    number, state = slot["slot"], state_of(slot)
    if state == "ready":
        return
    progress, cause = next_step(slot, now), slot["last_cause"]
    undo = f"numa-launcher {_UNDONE_BY[state]} {number}" if state in _UNDONE_BY else ""
    if cause and state in {"failed", "backoff", "held"}:
        if progress:
            yield Problem(what=progress, slot=number)
        yield Problem(
            what=f"{cause['name']}: {cause['message']}", remedy=cause["remedy"] or undo, slot=number,
            level=Level.BAD, evidence=tuple(cause["evidence"]),
        )  # fmt: skip
    elif progress or undo:  # the first line says the rest
        yield Problem(what=progress or state, remedy=undo, slot=number)


def next_step(slot: Slot, now: float) -> str:
    """What a slot that is not ready does or waits for."""
    if slot["next_start"]:
        return f"starts again in {max(0.0, slot['next_start'] - now):.0f} s"
    if not slot["phase"] and (slot["eta"] is None or slot["state"] not in {"draining", "stopping"}):
        return ""
    left = (
        "" if slot["eta"] is None or slot["eta"] <= now else f", estimated {duration(slot['eta'] - now)} left"
    )
    return f"{slot['phase'] or slot['state']}{left}"


def _of_health(slot: Slot) -> Iterator[Problem]:
    number = slot["slot"]
    if slot["stalled_s"]:
        yield Problem(
            what=f"has requests and has made no progress for {slot['stalled_s']:.0f} s",
            remedy=f"numa-launcher logs {number}; the daemon restarts an instance that hangs", slot=number,
        )  # fmt: skip
    if slot["unwatched"]:
        yield Problem(
            what=f"not watched, a hang would not be detected: {slot['unwatched']}",
            remedy=f"numa-launcher logs {number}", slot=number,
        )  # fmt: skip
    if outdated := slot.get("outdated"):  # a daemon from before an upgrade does not send it
        yield Problem(
            what=outdated,
            remedy=f"numa-launcher reload, one slot at a time; numa-launcher restart {number} for this one alone",
            slot=number,
        )
    zentorch = slot["zentorch"]
    if zentorch["found"] and zentorch["active"] is False:
        yield Problem(
            what=f"does not use ZenTorch {zentorch['found']}, which is installed",
            remedy="numa-launcher doctor", slot=number,
        )  # fmt: skip


def _of_placement(slot: Slot) -> Iterator[Problem]:
    number, verified = slot["slot"], slot["verified"] or {}
    for problem in verified.get("problems", ()):
        yield Problem(what=f"not as planned: {problem}", remedy=f"numa-launcher verify {number}", slot=number)
    foreign = verified.get("foreign", ())
    if foreign:
        first = foreign[0].partition(", of which")[0]
        more = f", and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        yield Problem(
            what=f"other processes on its cpus: {first}{more}",
            remedy=f"numa-launcher verify {number}", slot=number,
            level=Level.GOOD,  # as for `verify`: the instance itself is in its place
        )  # fmt: skip


def _of_machine(machine: Mapping[str, Any]) -> Iterator[Problem]:
    for line in machine.get("drift", ()):
        yield Problem(
            what=f"{_CHANGED}{line}",
            remedy="undo the change, or restart the daemon: it plans again (systemctl restart numa-launcher)",
        )
    for slot in machine.get("slots", ()):
        if misplaced := slot["misplaced"]:
            first = misplaced[0]
            others = slot["misplaced_threads"] - 1
            more = f", and {others} more" if others else ""
            yield Problem(
                what=f"thread {first['thread']} ({first['name']}) may run on cpus {first['cpus']}, "
                f"planned {first['planned']}{more}",
                remedy=f"numa-launcher verify {slot['slot']}", slot=slot["slot"],
            )  # fmt: skip
    for disk in machine.get("disks", ()):
        if disk["free_bytes"] < DISK_LEAST * disk["total_bytes"]:
            share = disk["free_bytes"] / disk["total_bytes"] * 100
            yield Problem(
                what=f"disk of '{disk['path']}' is full: {share:.1f} % free", remedy="free space there"
            )


def state_of(slot: Slot) -> str:
    """The state in one word; includes `drained` and `quarantine`."""
    if slot["intent"] == "quarantine":
        return "quarantine"
    drained = slot["state"] == "draining" and slot["intent"] == "drain" and not slot["in_flight"]
    return "drained" if drained else str(slot["state"])


def seconds(value: float) -> str:
    """0.04, 0.31, 2.5, 31: two significant digits."""
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def duration(seconds: float) -> str:
    """A time span: 5s, 3m12s, 4h05m, 2d03h."""
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if not minutes:
        return f"{whole}s"
    if not hours:
        return f"{minutes}m{whole % 60:02}s"
    return f"{hours}h{minutes % 60:02}m" if not days else f"{days}d{hours % 24:02}h"


# --- a fleet -------------------------------------------------------------------------------------------


def judge_fleet(hosts: Sequence[Host], others: Sequence[Problem] = ()) -> Verdict:
    """The verdict on all hosts. `others`: what else is wrong; a problem of level BAD, and a host that should serve and
    does not, degrade the fleet."""
    late = late_hosts(hosts)
    problems = [problem for host in hosts for problem in _of_host(host, late=host.name in late)]
    problems += others
    if not hosts:
        problems.append(Problem(what="no host is known", remedy="numa-launcher fleet up", level=Level.BAD))
    serving = sum(host.serves for host in hosts)
    warnings = sum(problem.level is Level.WARN for problem in problems)
    degraded = any(problem.level is Level.BAD for problem in problems)
    word = "DOWN" if not serving else "DEGRADED" if degraded else "OK"
    head = f"{word} {serving}/{len(hosts)} hosts serving"
    if warnings and word == "OK":
        head += f", {warnings} warning{'s' * (warnings > 1)}"
    parts = [head, *_troubles(hosts, late)]
    parts += [problem.what for problem in others if problem.level is Level.BAD]
    parts.append(
        f"{sum(host.ready for host in hosts)}/{sum(host.instances for host in hosts)} instances ready"
    )
    parts.append(
        f"{sum(host.running for host in hosts)} running, {sum(host.waiting for host in hosts)} waiting"
    )
    level = Level.BAD if not serving else Level.WARN if degraded or warnings else Level.GOOD
    return Verdict(level=level, line="; ".join(parts), problems=tuple(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressState:
    """The state of an ingress host, as it says itself."""

    files: tuple[FileState, ...] = ()
    """Its certificates."""
    troubles: tuple[str, ...] = ()
    """Reasons why it does not do as the member list and fleet.toml say."""


def of_ingress(address: str, state: IngressState, now: float) -> list[Problem]:
    """The problems of one ingress host."""
    shown = {"files": [asdict(file) for file in state.files]}
    found = [*of_files(shown, now), *(Problem(what=each, remedy=_INGRESS) for each in state.troubles)]
    return [replace(problem, what=f"ingress {address}: {problem.what}") for problem in found]


_INGRESS: Final = "journalctl -u numa-launcher-ingress"


def late_hosts(hosts: Sequence[Host]) -> frozenset[str]:
    """Those whose first tokens are predicted much later than those of the others."""
    known = sorted(host.predicted_ttft_s for host in hosts if host.predicted_ttft_s is not None)
    found = set()
    for host in hosts:
        if host.predicted_ttft_s is None or host.predicted_ttft_s <= known[0] + LATE_S:
            continue
        others = list(known)
        others.remove(host.predicted_ttft_s)
        median = statistics.median(others)
        if host.predicted_ttft_s > max(LATE * median, median + LATE_S):
            found.add(host.name)
    return frozenset(found)


def _of_host(host: Host, *, late: bool) -> Iterator[Problem]:
    for trouble in host.troubles:
        yield Problem(what=trouble, remedy=_LOOK.format(host.name), host=host.name, level=Level.BAD)
    if host.state == "lost" and not host.troubles:
        what = "its agent does not answer; it gets requests as long as its daemon does"
        yield Problem(what=what, remedy="numa-launcher fleet up", host=host.name)
    if host.state in {"ready", "lost"} and not host.ready:
        yield Problem(
            what="no instance is ready", remedy=f"`numa-launcher status` on {host.name}", host=host.name,
            level=Level.BAD,
        )  # fmt: skip
    if host.stragglers:
        slots = ", ".join(map(str, host.stragglers))
        what = f"slow: slot {slots}: first tokens come later than from its siblings; gets fewer requests"
        yield Problem(
            what=what, remedy=f"`numa-launcher why {host.stragglers[0]}` on {host.name}", host=host.name
        )
    elif late:
        what = "slow: its first tokens are predicted much later than those of the other hosts"
        yield Problem(what=what, remedy=f"`numa-launcher status` on {host.name}", host=host.name)


_LOOK: Final = "`systemctl status numa-launcher` on {}"


def _troubles(hosts: Sequence[Host], late: frozenset[str]) -> Iterator[str]:
    """Hosts that do not serve, and slow ones, by what they are; the worst first."""
    found: dict[str, list[str]] = {word: [] for word in ("down", "no daemon", "not ready", "slow")}
    for host in hosts:
        word = "not ready" if host.state in {"ready", "lost"} else host.state
        if not host.serves:
            found.setdefault(word, []).append(host.name)
        elif host.stragglers or host.name in late:
            found.setdefault("slow", []).append(host.name)
    for word, names in found.items():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        if names:
            yield f"{', '.join(names[:NAMED])}{more} {word}"
