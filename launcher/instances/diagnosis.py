"""Why an instance ended: its exit status, its last lines as its engine words them, and the kernel's report -> a Cause."""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from launcher.base.errors import OWN_SHORTAGE, LauncherError, PassingError, reason
from launcher.engines.causes import CRASHES, Cause, Retry, Rule, rule
from launcher.engines.containers import OOM_LINE
from launcher.engines.log import PLAIN_LOG, EngineLog
from launcher.instances.ports import Exit
from launcher.machine.oom import NO_REPORT, KernelReport, NodeMemory

# EAGAIN: fork(2) and clone(2), where a limit on processes or threads is reached.
START_SHORTAGE: Final = OWN_SHORTAGE | {errno.EAGAIN}
# A node with less than this share free when a process of it was killed is taken to have run out of memory.
SHORT_SHARE: Final = 0.03
_EVIDENCE: Final = 3
# What spawn_systemd adds to the log of a unit that was ended so: its cgroup, and its count, are gone by then.
UNIT_OOM: Final = "numa-launcher: systemd ended the unit: Result=oom-kill"
# Signals that people and service managers send; what an engine does to itself are SIGABRT, SIGSEGV, SIGBUS, SIGILL.
_SENT: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL})
_NATIVE: Final = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE})
# Messages of Python's servers after SIGTERM or SIGINT; the process then exits with 0.
_FAREWELL: Final = (
    "Shutting down", "Received signal", "KeyboardInterrupt", "SIGTERM", "Application shutdown complete",
)  # fmt: skip


_ERROR: Final = re.compile(
    r"\b(?:ERROR|FATAL|CRITICAL|[Ff]ailed|[Ff]atal|\w*(?:Error|Exception)\b)|died|error:"
)
_TRACEBACK: Final = "Traceback (most recent call last):"
_EXCEPTION: Final = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)(?:: .*|:?)")
_CALM: Final = frozenset({"DEBUG", "INFO", "WARNING"})
_LINKS: Final = ("The above exception was the direct cause", "During handling of the above exception")


# Stands for the cause while processes of the instance still end: freeing hundreds of GiB takes seconds.
EXITED: Final = "exited"
UNHEALTHY: Final = "unhealthy"
# Causes that are one process's: of several, it is said which.
_OF_A_PROCESS: Final = frozenset(
    {"killed-by-operator", "node-oom", "cgroup-oom", "native-crash", "missing-instruction-set", "unknown"}
)

OBSERVED: Final[tuple[Rule, ...]] = (
    rule(
        "cgroup-oom", None,
        "the memory limit of its cgroup was reached, and the kernel ended it",
        "raise the unit's or container's memory limit, or lower memory.kv_cache", Retry.BACKOFF,
    ),
    rule(
        "killed-by-operator", None,
        "a user or process sent it a signal",
        "none needed: it starts again; `numa-launcher hold SLOT` keeps a slot stopped", Retry.NOW,
    ),
    rule(
        "hung", None,
        "it had work and made no progress",
        "read the evidence; `numa-launcher quarantine SLOT` keeps one running for inspection (py-spy dump --pid PID)",
        Retry.NOW,
    ),
    rule(
        UNHEALTHY, None,
        "its health path no longer answers 200",
        "read `numa-launcher logs SLOT`; it is being restarted", Retry.BACKOFF,
    ),
    rule("unknown", None, "ended by itself", "read `numa-launcher logs SLOT`", Retry.BACKOFF),
)  # fmt: skip
"""Causes that are not found in the log, but by the kernel or the probes."""


def rule_of(name: str) -> Rule:
    """One of OBSERVED, or of what any engine may end of (engines.causes)."""
    return next(found for found in (*OBSERVED, *CRASHES) if found.name == name)


def cause_names(log: EngineLog) -> tuple[str, ...]:
    """Every name that a cause may have, by an engine's log."""
    named = [each.name for each in (*log.causes, *OBSERVED)]
    return tuple(dict.fromkeys([*named, "not-ready-in-time", "cannot-start"]))


def diagnose(
    ended: Exit,
    tail: Sequence[str],
    log: EngineLog = PLAIN_LOG,
    *,
    served: bool = False,
    kernel: KernelReport = NO_REPORT,
    ranks: int = 1,
    lost_rank: bool = False,
) -> Cause:
    """The cause of an unrequested exit. `tail`: the last log lines, oldest first; `log`: the words of its engine; `ranks`:
    the instance's number of them.

    `served`: it was ready once, so its configuration is good, whatever it has printed since: one client's bad request
    can make an engine log what looks like a wrong setting, and must not forbid a restart.
    `lost_rank`: it was killed because the process of a rank had ended; its own exit tells nothing.

    1. A kill by the kernel for lack of memory is proved by the kernel, and outweighs the log.
    2. The first rule with a line in the log.
    3. A process below the main one that was killed, or the main one by a signal that is sent: for lack of
       memory where the node was short of it or the kernel's log can't be read, else by a user. By a signal that
       a fault raises: a crash in native code.
    4. Of several ranks, the one whose process ended first is named, and its exit counts: the others and the main process
       end with it. Where nobody saw its exit and the log tells nothing, the kernel's report does."""
    died = _dead_rank(tail, log) if ranks > 1 or lost_rank else None
    if died is not None:
        ended = died.ended or (Exit(code=0, signal=None) if lost_rank else ended)
    unseen = died is not None and died.ended is None
    detail = "no exit code was seen" if unseen else str(ended)
    found = tuple(line for line in tail if log.child_killed.search(line))[-_EVIDENCE:]
    killed = ended.signal == signal.SIGKILL or bool(found)
    cause = _of_kernel(detail, tail, kernel, killed=killed) or _of_log(str(ended), tail, log, served=served)
    if cause is None and unseen:
        cause = _of_kernel(detail, tail, kernel, killed=True) or _of_shortage(detail, (), kernel)
    cause = cause or _of_signal(ended, tail, log, kernel, served=served, found=found, killed=killed)
    if died is None or cause.name not in _OF_A_PROCESS:
        return cause
    who = f"the process of rank {died.rank}" if ranks > 1 else "its worker process"
    message = f"{cause.message}; {who} ended first"
    if died.ended is None and cause.name == "unknown":
        message = f"{who} ended, and the engine saw no exit code"
    evidence = cause.evidence if died.line in cause.evidence else (died.line, *cause.evidence)
    return replace(cause, message=message, evidence=evidence)


class _DeadRank(Struct, frozen=True):
    rank: int
    ended: Exit | None
    """None: the engine saw no exit code."""
    line: str


def _dead_rank(tail: Sequence[str], log: EngineLog) -> _DeadRank | None:
    """The first rank whose process ended, by the log."""
    for line in tail:
        if match := log.rank_died.search(line):
            code = None if match["code"] == "None" else int(match["code"])
            ended = None if code is None else Exit(None, -code) if code < 0 else Exit(code, None)
            return _DeadRank(int(match["rank"]), ended, line)
    return None


def rank_died(tail: Sequence[str], log: EngineLog) -> bool:
    """Whether the log says that the process of a rank has ended."""
    return _dead_rank(tail, log) is not None


def _of_kernel(detail: str, tail: Sequence[str], kernel: KernelReport, *, killed: bool) -> Cause | None:
    if found := tuple(line for line in tail if UNIT_OOM in line or OOM_LINE in line):
        return rule_of("cgroup-oom").cause(detail, (*found, *map(_memory, kernel.nodes)))
    # The count is of the whole cgroup, which a sibling may share; a line names a process of its own.
    if not kernel.oom_lines and not (killed and kernel.cgroup_kills):
        return None
    in_cgroup = kernel.cgroup_kills > 0 or any(
        "MEMCG" in line or "cgroup" in line for line in kernel.oom_lines
    )
    evidence = list(kernel.oom_lines[-_EVIDENCE:])
    if kernel.cgroup_kills:
        evidence.append(f"{kernel.cgroup_file}: oom_kill rose by {kernel.cgroup_kills}")
    evidence += [_memory(node) for node in kernel.nodes]
    return rule_of("cgroup-oom" if in_cgroup else "node-oom").cause(detail, tuple(evidence))


def _of_log(detail: str, tail: Sequence[str], log: EngineLog, *, served: bool) -> Cause | None:
    for known in log.causes:
        if known.pattern is None or (served and known.starting):
            continue
        evidence = tuple(line for line in tail if known.pattern.search(line))
        if evidence:
            return known.cause(detail, evidence[-_EVIDENCE:])
    return None


def _of_shortage(detail: str, found: tuple[str, ...], kernel: KernelReport) -> Cause | None:
    short = tuple(node for node in kernel.nodes if node.free_bytes < node.total_bytes * SHORT_SHARE)
    if not short and not (found and not kernel.readable):
        return None
    return rule_of("node-oom").cause(detail, (*found, *map(_memory, short or kernel.nodes)))


def _of_signal(
    ended: Exit,
    tail: Sequence[str],
    log: EngineLog,
    kernel: KernelReport,
    *,
    served: bool,
    found: tuple[str, ...],
    killed: bool,
) -> Cause:
    """`found`: the last lines that tell of a killed child; `killed`: it, or the main process, was."""
    last, first_at = _telling(tail, log, served=served)
    if ended.signal == signal.SIGILL:
        cause = rule_of("missing-instruction-set").cause(str(ended), last)
        return replace(cause, retry=Retry.BACKOFF) if served else cause
    if killed and (shortage := _of_shortage(str(ended), found, kernel)) is not None:
        return shortage
    if killed or (ended.signal is not None and ended.signal in _SENT) or _was_asked(ended, tail, log):
        evidence = (*(found or last), *map(_memory, kernel.nodes if killed else ()))
        return rule_of("killed-by-operator").cause(str(ended), evidence)
    if ended.signal in _NATIVE:
        return rule_of("native-crash").cause(str(ended), last)
    how = f"ended by {ended}" if ended.signal is not None else f"ended by itself with {ended}"
    return _unknown(how, last, tail, first_at)


def _unknown(message: str, evidence: tuple[str, ...], tail: Sequence[str], first_at: int | None) -> Cause:
    """`first_at`: the line where the traceback of the evidence begins."""
    cause = replace(rule_of("unknown").cause("", evidence), message=message)
    if first_at is None:
        return cause
    rest = len(tail) - first_at
    return replace(cause, remedy=f"read on from its traceback: `numa-launcher why SLOT --lines {rest}`")


class _Raised(Struct, frozen=True):
    """An exception in the log."""

    begins: int
    """Line of its traceback's head; its own where that is not in the log."""
    line: int
    text: str
    linked: bool
    """It was raised while the one before it was handled, or because of it."""


def _telling(tail: Sequence[str], log: EngineLog, *, served: bool) -> tuple[tuple[str, ...], int | None]:
    """The lines that say why the engine failed, and the line where their traceback begins.

    1. The first exception that is not about another one: with several processes, that of the worker; in a chain of
       exceptions Python prints the cause first. What it was turned into follows it.
    2. Without one: the last lines that speak of an error, which are no source code; else the last ones."""
    fatal = next((at for at, line in enumerate(tail) if log.fatal.search(line)), 0)
    raised = [
        each for each in _raised(tail, log) if each.line >= fatal and not log.about_others.search(each.text)
    ]
    if raised:
        # Without a line about the failure itself, what an instance printed first after it was ready explains nothing.
        at = _head_of_chain(raised, len(raised) - 1) if served and not fatal else 0
        return _evidence(tail, log, raised, at), raised[at].begins
    lines = [line for line in tail if line.strip()]
    quoted = [line for line in lines if log.quoted.search(line)]
    errors = quoted[:1] or [line for line in lines if _ERROR.search(line) and _speaks(line, log)]
    return tuple((errors or lines)[-_EVIDENCE:]), None


def _speaks(line: str, log: EngineLog) -> bool:
    """Whether it is neither source code, nor a traceback's head, nor of a calm level."""
    level, _, text = _split(line, log)
    return level not in _CALM and not text[:1].isspace() and not text.startswith(_TRACEBACK)


def _head_of_chain(raised: Sequence[_Raised], at: int) -> int:
    while at and raised[at].linked:
        at -= 1
    return at


def _evidence(tail: Sequence[str], log: EngineLog, raised: Sequence[_Raised], at: int) -> tuple[str, ...]:
    """The exception, with the source line that raised it or the next line where it says nothing itself; the last
    exception of its chain."""
    first, lines = raised[at], [tail[raised[at].line]]
    if not first.text.partition(":")[2].strip():
        frames = [line for line in tail[first.begins : first.line] if _text_of(line, log).strip(" ^~")]
        lines = [*frames[-2:], *lines][-_EVIDENCE:]
    else:  # the message may have more lines
        lines += [line for line in tail[first.line + 1 : first.line + 2] if _text_of(line, log)[:1].isspace()]
    chain = list(takewhile(lambda each: each.linked, raised[at + 1 :]))
    lines += [tail[each.line] for each in chain[-1:]]
    return tuple(lines[:_EVIDENCE])


def _split(line: str, log: EngineLog) -> tuple[str | None, str, str]:
    """Level, process and text of a line, without its logger's prefix; no process where it has none."""
    match = log.prefix.match(line)
    if match is None:
        return None, "", line
    return match["level"], match["process"] or "", line[match.end() :]


def _text_of(line: str, log: EngineLog) -> str:
    return _split(line, log)[2]


def _raised(tail: Sequence[str], log: EngineLog) -> Iterator[_Raised]:
    """The exceptions in the log, in its order; not those of logged warnings."""
    open_at: dict[str, int] = {}
    linked: set[str] = set()
    for at, line in enumerate(tail):
        level, process, text = _split(line, log)
        if level in _CALM:
            continue
        if text.startswith(_TRACEBACK):
            open_at[process] = at
        elif text.startswith(_LINKS):
            linked.add(process)
        elif text.strip() == text != "" and (process in open_at or _EXCEPTION.fullmatch(text)):
            yield _Raised(open_at.pop(process, at), at, text, process in linked)
            linked.discard(process)


def _was_asked(ended: Exit, tail: Sequence[str], log: EngineLog) -> bool:
    """Exit 0 after the messages of a shutdown: a SIGTERM. An engine may print the same when one of its processes died."""
    if ended.code != 0 or any(log.child_died.search(line) for line in tail):
        return False
    return any(word in line for line in tail[-20:] for word in _FAREWELL)


def _memory(node: NodeMemory) -> str:
    where = "the machine" if node.node is None else f"node {node.node}"
    free, total = node.free_bytes / 2**30, node.total_bytes / 2**30
    return f"{where} had {free:.2f} of {total:.2f} GiB free when last sampled"


def failed_start(tail: Sequence[str], waited_s: float, log: EngineLog = PLAIN_LOG) -> Cause:
    """The cause when an engine has printed that its start failed, and does not exit."""
    failed = f"it reported so and had not exited {waited_s:.0f} s later"
    found = _of_log(failed, tail, log, served=False)
    if found is not None:
        return found
    evidence, first_at = _telling(tail, log, served=False)
    return _unknown(f"the engine's start failed: {failed}", evidence, tail, first_at)


def exited() -> Cause:
    """Until the exit is diagnosed: the main process has ended, the rest of its tree has not."""
    return Cause(EXITED, "its main process has ended", "", Retry.BACKOFF)


def part_exited() -> Cause:
    """Until the exit is diagnosed: a process below the main one has ended, and the rest is of no use."""
    return Cause(EXITED, "one of its processes has ended", "", Retry.BACKOFF)


def hung_or_dead(detail: str) -> Cause:
    """The cause when a running instance reports that it is not healthy."""
    return replace(rule_of(UNHEALTHY).cause("", ()), message=detail)


def hung(evidence: tuple[str, ...]) -> Cause:
    """The cause when requests are in flight without progress; `evidence` says what was observed."""
    return rule_of("hung").cause("", evidence)


def cannot_start(slot: int, error: Exception) -> Cause:
    """The cause when a start came to nothing before there was a process."""
    passes = isinstance(error, PassingError) or _is_shortage(error)
    retry = Retry.SOON if passes else Retry.BACKOFF
    if isinstance(error, LauncherError):
        return Cause("cannot-start", error.message, error.remedy, retry)
    why = reason(error) if isinstance(error, OSError) else str(error)
    return Cause(
        "cannot-start", f"cannot start slot {slot}: {why}",
        "check free memory, and the limits on processes and open files", retry,
    )  # fmt: skip


def _is_shortage(error: BaseException | None) -> bool:
    """The daemon itself lacked descriptors, memory or threads, by whatever was raised because of that."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in START_SHORTAGE:
            return True
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "new thread" in str(error)):
            return True
        error = error.__cause__
    return False
