"""The control protocol: requests, their options, what they answer. HTTP + JSON over a UNIX socket.

The server's routes, its check of options and docs/control-protocol.md come from the one table here. Asking for a change
twice changes nothing more, except that `restart` also stops and repeats a start. What `GET /v1/status` answers is
launcher.daemon.status.Status.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

PREFIX: Final = "/v1"
# The longest that one answer may take, and that of `verify`: the kernel walks every page of a process for numa_maps,
# seconds for each 100 GiB, more where others have the cpus.
REQUEST_S: Final = 60.0
VERIFY_S: Final = 600.0


class SlotCommand(StrEnum):
    """What an operator can ask of one slot: ``POST /v1/slots/SLOT/COMMAND``."""

    RESTART = "restart"
    DRAIN = "drain"
    RESUME = "resume"
    STOP = "stop"
    START = "start"
    HOLD = "hold"
    RELEASE = "release"
    QUARANTINE = "quarantine"


SUMMARY: Final[dict[SlotCommand, str]] = {
    SlotCommand.RESTART: "send a slot no new requests, wait for running ones, stop its instance and start a new one",
    SlotCommand.DRAIN: "take a slot out of rotation (no new requests) until `resume`; keep its instance running",
    SlotCommand.RESUME: "put a drained slot back into rotation",
    SlotCommand.STOP: "send a slot no new requests, wait for running ones, and stop its instance until `start`, `restart` "
    "or the next start of the daemon",
    SlotCommand.START: "start the instance of a stopped or failed slot",
    SlotCommand.HOLD: "send a slot no new requests, wait for running ones, and stop its instance until `release`, also "
    "across a restart of the daemon",
    SlotCommand.QUARANTINE: "take a slot out of rotation for inspection until `release`; keep its instance running",
    SlotCommand.RELEASE: "end the hold or quarantine of a slot",
}

DISRUPTIVE: Final = frozenset(
    {SlotCommand.RESTART, SlotCommand.DRAIN, SlotCommand.STOP, SlotCommand.HOLD, SlotCommand.QUARANTINE}
)
"""Commands that take an instance out of rotation: refused where too few would be left, unless forced."""


@dataclass(frozen=True, slots=True)
class Request:
    """One command with its options: ``?force=1&deadline=30``."""

    command: SlotCommand
    force: bool = False
    """Also when fewer than `supervision.min_ready` instances would be left."""
    deadline_s: float | None = None
    """`drain` only: requests that are in flight after this time are ended."""


@dataclass(frozen=True, slots=True)
class Option:
    """One query parameter."""

    name: str
    value: str
    """A value that may be given, as docs show it."""
    meaning: str


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One request."""

    name: str
    """Of the server's handler."""
    method: str
    path: str
    """Below PREFIX; `{slot}` stands for a slot's number, `{request}` for a request's id."""
    does: str
    answers: str
    """The reply in words."""
    command: str = ""
    """The command line that asks it."""
    options: tuple[Option, ...] = ()
    examples: tuple[str, ...] = ("",)
    """Queries of the examples; "" asks without options. A reply with `follow` does not end by itself."""
    body: str = ""
    """JSON that an example sends."""
    routine: bool = False
    """A program asks it every few seconds: done ones are neither logged nor in the audit trail, refused ones are."""
    within_s: float | None = None
    """The longest that the daemon takes for an answer, where that is not REQUEST_S; 503 after it."""


_FORCE: Final = Option("force", "1", "also if fewer than `supervision.min_ready` instances would be left")
_TAIL: Final = Option("tail", "100", "number of last lines or events; at most 100,000")
REDACT: Final = Option(
    "redact",
    "1",
    "mask known and likely secrets; always done for role read, and in all but `status`, `metrics`, `logs`, `usage`, "
    "`budgets`, `cost`, `requests`",
)
"""Of every GET whose answer ends."""
_SLOT: Final = "the slot, as in `status`"
_USAGE: Final = (
    Option(
        "since",
        "30d",
        "begin: `12h`, `30d`, `4w`, `today`, `2026-11-01`, `2026-11-01T14:00`; days count from midnight",
    ),
    Option("until", "now", "end, likewise"),
    Option("key", "NAME", "only requests of this API key"),
    Option("model", "NAME", "only requests for this model"),
)


def _endpoint(command: SlotCommand) -> Endpoint:
    options = [_FORCE] if command in DISRUPTIVE else []
    if command is SlotCommand.DRAIN:
        options.append(Option("deadline", "30", "end requests that are still running after so many seconds"))
    return Endpoint(
        "act", "POST", f"/slots/{{slot}}/{command}", SUMMARY[command], _SLOT, f"{command} SLOT", tuple(options),
        ("deadline=30",) if command is SlotCommand.DRAIN else ("",),
    )  # fmt: skip


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    Endpoint(
        "status", "GET", "/status", "the state of the daemon, its slots and its requests",
        "the object below", "status, status --watch, top", (REDACT,),
    ),
    Endpoint(
        "plan", "GET", "/plan", "the plan in force",
        "what `numa-launcher plan --json` prints", options=(REDACT,),
    ),
    Endpoint(
        "topology", "GET", "/topology", "the machine that the plan in force was made for",
        "`name`, `cpu_count`, `sockets` (`socket`, `nodes`), `nodes` (`node`, `socket`, `memory_bytes`, `cpus`), `cores` "
        "(`cpus`, `socket`, `node`, `l3`: number of its L3 domain), `reserved` and `allowed` CPU lists",
        options=(REDACT,),
    ),
    Endpoint(
        "machine", "GET", "/machine", "the load of the machine now: CPUs, memory of NUMA nodes, placement, disks",
        "`MachineStatus`, below", options=(REDACT,),
    ),
    Endpoint(
        "measurements", "GET", "/measurements", "the newest results of `bench` and `tune` that the daemon can read",
        "`measurements`, newest first, at most 20: `Measurement`, below", options=(REDACT,),
    ),
    Endpoint(
        "history", "GET", "/history", "the recent load of the host and its slots: [columns](history.md#columns)",
        "`span`, `step_ms`, `newest` (ms; null without rows), `columns`, `rows`: each the end of its step (ms since the "
        "epoch), then the values of the columns; null is unknown. A missing row is a gap: the daemon did not run",
        options=(
            Option("span", "1h", "`1h` in steps of 2 s, `1d` of 60 s or `90d` of 10 minutes"),
            Option("after", "0", "only rows after this time, in ms; the whole span if it is above `newest`"),
            Option("slots", "all", "columns of `all` slots, of `none` (for `90d` always), or of one slot's number"),
            REDACT,
        ),
        examples=("span=1h&slots=none", "span=1d&after=0&slots=0"),
    ),
    Endpoint(
        "config", "GET", "/config", "the configuration in force: file, environment and overrides, secrets masked",
        "an object for each section of the file, with every key", options=(REDACT,),
    ),
    Endpoint(
        "events", "GET", "/events", "the last events: what was done, and who asked for it",
        "`events`, oldest first: `number`, `time` (seconds since the epoch), `level`, `logger`, `message`, `fields`; of "
        "these an event has what applies: `slot` and `generation` (numbers), `state`, `cause` with `evidence` (lines) and "
        "`remedy`, `verb`, `user`, `audit`",
        "events",
        (_TAIL, Option("after", "0", "only events with a higher number; numbers also increase across restarts"), REDACT),
        ("tail=3",),
    ),
    Endpoint(
        "metrics", "GET", "/metrics", "the endpoint's `/metrics`",
        "Prometheus' text format", options=(REDACT,),
    ),
    Endpoint(
        "usage", "GET", "/usage", "what was served, from the usage ledger's hourly sums",
        "`UsageReport`, below", "usage",
        (*_USAGE, Option("by", "key", "a row for each `key`, `model`, `instance`, `overflow`, `day` or `hour`"), REDACT),
        ("since=30d&by=key",),
    ),
    Endpoint(
        "usage_requests", "GET", "/usage/requests", "the latest single requests of the usage ledger",
        "`UsageRequests`, below", "usage --requests",
        (*_USAGE, Option("limit", "50", "number of requests; at most 10,000"), REDACT),
        ("since=1h&limit=5",),
    ),
    Endpoint(
        "request", "GET", "/requests/{request}", "what became of one request, step by step: of a recent one, or what the "
        "usage ledger has of it",
        "`Timeline`, below", "why REQUEST", (REDACT,),
    ),
    Endpoint(
        "budgets", "GET", "/budgets", "budgets of API keys: what is spent, reserved and left",
        "`budgets`: `key`, `budget`, `unit` (tokens or a currency), `limit`, `spent`, `reserved` (by running requests), "
        "`left`, `begins` and `ends` of the period; of `spent`, `spent_here` and `spent_elsewhere`, with the time since "
        "that was reported, `elsewhere_age_s` (null: it never was); `spent`, `spent_here` and `left` are null while they "
        "are unknown; amounts of money are texts",
        "key list", (REDACT,),
    ),
    Endpoint(
        "spent_elsewhere", "POST", "/budgets/elsewhere", "report what API keys spent on the other hosts of a fleet. "
        "Body: `spent`: `key`, `budget` and `begins` as in `GET /v1/budgets`, `amount`: the sum of the other hosts' "
        "`spent_here`. It counts until a report of more, or the end of the period, also after a restart",
        "`taken`: how many figures count; `ignored`: why others do not, such as a budget that is not the same here",
        body='{"spent": []}', routine=True,
    ),
    Endpoint(
        "cost", "GET", "/cost", "what tokens cost on this machine, beside APIs; from the usage ledger and [cost]",
        "`CostReport`, below", "cost", (_USAGE[0], REDACT), ("since=30d",),
    ),
    Endpoint(
        "logs", "GET", "/slots/{slot}/logs", "the last lines of a slot's instances",
        "`lines`, oldest first: `time`, `generation`, `text`; with `follow` one such object "
        "per line of the reply, as long as the client reads",
        "logs SLOT, logs SLOT -f", (_TAIL, Option("follow", "1", "continue with new lines"), REDACT),
        ("tail=2", "tail=2&follow=1"),
    ),
    Endpoint(
        "reloading", "GET", "/reload", "progress of the last reload",
        "`stage`: none, running, done, rolling back, rolled back or stuck; `changes`; `doing`; `error` and `remedy`",
        "reload --show", (REDACT,),
    ),
    Endpoint(
        "reload", "POST", "/reload", "reload the configuration and apply it, one slot at a time",
        "as `GET /v1/reload`; the stage of a dry run is `dry run`", "reload, scale N",
        (
            Option("dry_run", "1", "list the changes only"),
            Option("set", "KEY=VALUE", "overrides the file until the next reload; up to 64 times"),
            _FORCE,
        ),
        ("dry_run=1",),
    ),
    Endpoint(
        "verify", "POST", "/slots/{slot}/verify", "compare a slot's threads and pages with the plan now",
        _SLOT, "verify SLOT", within_s=VERIFY_S,
    ),
    *(_endpoint(command) for command in SlotCommand),
)  # fmt: skip
