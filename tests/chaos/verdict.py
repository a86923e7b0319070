"""Judges a chaos run: the report, and every bound that does not hold."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaos.actions import Notes
from chaos.clients import KINDS, Result
from chaos.hostile import SILENT_WITHIN_S, Pipeliner
from launcher.proxy.request.retry_policy import MAX_ATTEMPTS, MAX_FAILED

CUTS = {
    "fin",
    "rst",
    "early",
    "unset",
    "stall",
    "pings",
    "garbage",
    "broken",
    "kill",
    "freeze",
    "hang",
    "stopped",
}
# After these an engine's own counters tell of a request that does not move: with nothing else to do, it hangs.
HANGS = {"freeze", "hang", "stall", "pings", "mute"}
SHOWN_AT_ONCE = {
    "fin",
    "rst",
    "early",
    "unset",
    "garbage",
    "broken",
    "kill",
    "reset",
    "500",
    "503",
    "nonsense",
    "error",
}
DISHONEST = {"wrong", "silent", "unframed", "lost"}
CONTINUED_SHARE = 0.99
# The median after a fail-over, more than the p99 of a first token in the same run without a fault: a fail-over waits for no
# time limit (main.CONFIG has 2 s and more). The tail is the machine's, and is only told.
FIRST_TOKEN_S = 1.0
RSS_GROWTH = 1.10
# An attempt is sent again where its connection was idle before (upstream/connection.py). Attempts on instances that end
# don't count against the request: only MAX_ATTEMPTS bounds those of a request that meets many of them.
POISON_ATTEMPTS = 2 * MAX_ATTEMPTS
USUAL_POISON_ATTEMPTS = 2 * MAX_FAILED
# /health on a machine whose cores are all busy, while another client pipelines thousands of requests.
HEALTH_WITHIN_S = 10.0
EXAMPLES = 12
# A client without a fault has its first event by then, however many other clients do not read.
STARVED_S = 40.0
# What a client is refused for (docs/routes-and-errors.md); those of KINDS are far below every limit and never refused.
STATED = {
    (408, "timeout"), (413, "too_large"), (429, "queue_full"), (429, "rate_limit_exceeded"), (503, "upload_memory"),
}  # fmt: skip
_NO_SPREAD = {"max": 0.0}
_NO_ATTEMPTS = {"max": 0.0, "p50": 0.0}
_NO_RSS: dict[str, Any] = {"start": 0.0, "end": 0.0}


@dataclass(frozen=True, slots=True)
class Fault:
    """One request that a fault hit, as the engine noted it."""

    name: str
    kind: str
    at: float  # time.monotonic of this machine
    sent: int  # events with text that had been written before
    engine: str


def judge(
    results: Sequence[Result],
    faults: Iterable[Fault],
    requests: dict[str, Any],
    notes: Notes,
    *,
    silent_s: Mapping[str, float],
    agreement: Mapping[str, Any],
    pipeliner: Pipeliner,
) -> dict[str, Any]:
    """The report; `broken` names every bound that does not hold. `silent_s`: the longest that a silent connection was
    kept, by kind. `agreement`: of ledger, metrics and clients (agreement.py)."""
    faults = list(faults)
    hits: dict[str, list[Fault]] = {}
    for fault in faults:
        hits.setdefault(fault.name, []).append(fault)
    outcomes = Counter(result.outcome for result in results)
    cut = [
        result for result in results
        if result.plain and result.outcome != "aborted"
        and any(fault.kind in CUTS and fault.sent > 0 for fault in hits.get(result.name, ()))
    ]  # fmt: skip
    continued = [result for result in cut if result.outcome == "exact"]
    late = sorted(
        (
            (gap, result.name, hits[result.name])
            for result in results
            for gap in _gaps(result, hits.get(result.name, ()))
        ),
        key=lambda found: found[:2],
    )
    report: dict[str, Any] = {
        "requests": len(results),
        "outcomes": dict(outcomes),
        "by_kind": {
            kind: dict(Counter(result.outcome for result in results if result.kind == kind))
            for kind in sorted({result.kind for result in results})
        },
        "faults": dict(Counter(fault.kind for hit in hits.values() for fault in hit)),
        "requests_hit": len(hits),
        "failed_before_commit": outcomes["failed"],
        "rejected": outcomes["refused"],
        "dishonest": sum(outcomes[kind] for kind in DISHONEST),
        "cut_plain_streams": len(cut),
        "continued_exactly": len(continued),
        "continued_share": len(continued) / len(cut) if cut else None,
        "cut_twice_or_more": sum(
            sum(fault.kind in CUTS and fault.sent > 0 for fault in hits[result.name]) > 1 for result in cut
        ),
        "honest_errors": outcomes["told"] + outcomes["dropped"],
        "first_token_after_failover_s": _spread([gap for gap, *_ in late]),
        "first_token_without_fault_s": _spread(_first_tokens(results, hits)),
        "slowest_failovers": [f"{gap:.3f} s {name}: {_story(faults)}" for gap, name, faults in late[-3:]],
        "accounting": {
            "daemon": {key: value for key, value in requests.items() if isinstance(value, int)},
            "wrong": _accounts(
                outcomes,
                requests,
                unread=sum(r.kind == "unread" for r in results),
                uploads=sum(r.kind == "upload" and r.outcome == "aborted" for r in results),
            ),
        },
        "agreement": dict(agreement),
        "rss_mib": _rss(notes.rss),
        "silent_s": dict(silent_s),
        "freezes": notes.freezes,
        "health_s": _spread(sorted(notes.health_s)),
        "poison_attempts": _spread(
            sorted(Counter(f.name for hit in hits.values() for f in hit if f.kind == "poison").values())
        ),
        "pipelined": {
            "asked": pipeliner.asked,
            "answered": pipeliner.answered,
            "wrong": pipeliner.wrong[:3],
        },
        "refusals": dict(Counter(f"{r.status} {r.detail}" for r in results if r.outcome == "refused")),
        "refused_without_reason": [
            f"{r.kind} {r.name}: {r.status} {r.detail}"
            for r in results
            if r.outcome == "refused" and (r.kind in KINDS or (r.status, r.detail) not in STATED)
        ],
        "restarts": notes.restarts,
        "hangs": _hangs(notes, faults),
        "failed_actions": notes.failed,
        "looks": notes.looks,
        "unanswered": notes.unanswered,
        "unwatched": [
            *notes.unwatched,
            *(f"{fault.engine}: nobody asked for /health" for fault in faults if fault.kind == "unwatched"),
        ],
        "ended_as_hung": _wrongly_hung(notes, faults),
        "held": sum(fault.kind == "held" for fault in faults),
        "given_up": _given_up(results, hits),
        "descriptors": notes.descriptors,
        "starved": [
            f"{r.kind} {r.name}: {(r.arrivals[0] if r.arrivals else r.ended) - r.begun:.1f} s"
            for r in results
            if r.kind in KINDS and r.name not in hits and (r.arrivals[0] if r.arrivals else r.ended) - r.begun > STARVED_S
        ],
    }  # fmt: skip
    report["broken"] = _broken(report)
    report["examples"] = [
        f"{result.name} {result.kind} {result.outcome}: {result.detail}; hit by {_story(hits.get(result.name, ()))}"
        for result in sorted(results, key=lambda result: result.outcome not in DISHONEST | {"failed"})
        if result.outcome in DISHONEST | {"failed"} or (result.outcome == "told" and result.plain)
    ][:EXAMPLES]  # fmt: skip
    return report


def _hangs(notes: Notes, faults: Iterable[Fault]) -> list[dict[str, Any]]:
    """The hangs that began: an instance that another fault ended before it took the signal did not hang."""
    hung = {fault.engine.rpartition(" ")[2] for fault in faults if fault.kind == "hang"}
    return [one for one in notes.hangs if f"slot{one['slot']}-{one['generation']}" in hung]


def _wrongly_hung(notes: Notes, faults: Iterable[Fault]) -> list[str]:
    """Instances killed as hung although they were not."""
    hung = {fault.engine.rpartition(" ")[2] for fault in faults if fault.kind in HANGS}
    ended = sorted(f"slot{slot}-{generation}" for slot, generation in notes.ended_as_hung)
    return [name for name in ended if name not in hung]


def _given_up(results: Iterable[Result], hits: Mapping[str, Sequence[Fault]]) -> list[str]:
    """Requests that an engine computed and told nothing of for a while, and that were taken from it; not by their clients,
    nor because something else happened to it."""
    return [
        f"{result.name}: {_story(hits[result.name])}"
        for result in results
        if result.outcome != "aborted"
        and {fault.kind for fault in hits.get(result.name, ())} == {"held", "given up"}
    ]


def _story(faults: Sequence[Fault]) -> str:
    """The faults of one request, in order, with the seconds since the first."""
    told = sorted(faults, key=lambda fault: fault.at)
    lines = (f"{fault.kind}@{fault.engine} after {fault.sent} +{fault.at - told[0].at:.2f}" for fault in told)
    return ", ".join(lines) or "nothing"


def _gaps(result: Result, faults: Sequence[Fault]) -> Iterable[float]:
    """Seconds from each immediately visible fault to the client's next event."""
    for fault in faults:
        if fault.kind in SHOWN_AT_ONCE and result.outcome == "exact" and result.streamed:
            times = result.arrivals
            # Of the gaps that may be this fault's, the longest: bytes on their way arrive after it too.
            around = [
                b - max(a, fault.at)
                for a, b in zip([0.0, *times], times, strict=False)
                if b > fault.at > a - 0.05
            ]
            # A second fault that takes its time to show itself is not counted against the first.
            hidden = [other for other in faults if other.kind not in SHOWN_AT_ONCE and other.at >= fault.at]
            if around and not hidden:
                yield max(around)


def _first_tokens(results: Sequence[Result], hits: dict[str, list[Fault]]) -> list[float]:
    """Time to the first event without a fault in this run: the machine's share of the time after a fail-over."""
    return sorted(
        result.arrivals[0] - result.begun for result in results if result.arrivals and result.name not in hits
    )


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {
        "count": len(values),
        "p50": round(statistics.median(values), 3),
        "p99": round(values[min(len(values) - 1, int(len(values) * 0.99))], 3),
        "max": round(values[-1], 3),
    }


def _accounts(outcomes: Counter[str], requests: dict[str, Any], *, unread: int, uploads: int) -> list[str]:
    """What does not add up. A client that leaves while the last bytes are under way may count as either, and one that does
    not read never learns how its answer ended. `uploads`: those that the run's end stopped, perhaps just refused."""
    whole, left = outcomes["exact"] + outcomes["wrong"], outcomes["aborted"] + outcomes["lost"]
    bad = (
        outcomes["told"]
        + outcomes["silent"]
        + outcomes["dropped"]
        + outcomes["failed"]
        + outcomes["unframed"]
    )
    rules = {
        "accepted = asked": requests["accepted"] == outcomes.total(),
        "in flight = 0": requests["in_flight"] == 0,
        "completed + client_aborted = whole answers + clients that left": (
            whole + left - unread - uploads
            <= requests["completed"] + requests["client_aborted"]
            <= whole + left
        ),
        "completed ≥ whole answers": requests["completed"] >= whole,
        "failed = errors told, answers dropped, requests failed": bad <= requests["failed"] <= bad + unread,
        "completed + client_aborted + rejected + failed = accepted": (
            sum(requests[key] for key in ("completed", "refused", "client_aborted", "rejected", "failed"))
            == requests["accepted"]
        ),
        "rejected = refused": outcomes["refused"] <= requests["rejected"] <= outcomes["refused"] + uploads,
    }
    return [rule for rule, holds in rules.items() if not holds]


def _rss(samples: Sequence[int]) -> dict[str, Any] | None:
    """Medians of two fifths of the time, and a sample for each tenth. The first one is the third: before it the memory
    fills that bodies, and answers that nobody reads, may have (`upload_max_bytes`, `slow_client_buffer_bytes`)."""
    fifth = len(samples) // 5
    if not fifth:
        return None
    start, end = statistics.median(samples[2 * fifth : 3 * fifth]), statistics.median(samples[-fifth:])
    return {
        "start": round(start / 2**20, 1),
        "end": round(end / 2**20, 1),
        "max": round(max(samples) / 2**20, 1),
        "tenths": [round(samples[at * len(samples) // 10] / 2**20, 1) for at in range(10)],
    }


def _broken(report: dict[str, Any]) -> list[str]:
    share, rss, gaps = (
        report["continued_share"],
        report["rss_mib"] or _NO_RSS,
        report["first_token_after_failover_s"],
    )
    late = gaps["p50"] if gaps else 0.0
    usual = report["first_token_without_fault_s"]
    attempts = report["poison_attempts"] or _NO_ATTEMPTS
    bound = FIRST_TOKEN_S + (usual["p99"] if usual else 0.0)
    bounds = {
        f"{report['failed_before_commit']} requests failed before their first byte": report["failed_before_commit"] == 0,
        f"{report['dishonest']} dishonest answers": report["dishonest"] == 0,
        f"{share} of the cut streams continued, not {CONTINUED_SHARE}": share is None or share >= CONTINUED_SHARE,
        f"accounts do not add up: {'; '.join(report['accounting']['wrong'])}": not report["accounting"]["wrong"],
        f"tokens: {'; '.join(report['agreement']['wrong'])}": not report["agreement"]["wrong"],
        f"RSS grew from {rss['start']} to {rss['end']} MiB": rss["end"] <= rss["start"] * RSS_GROWTH,
        f"median of the first token after a fail-over is {late} s, not {bound:.3f}": late <= bound,
        "no request was made": report["requests"] > 0,
        f"refused for no stated reason: {report['refused_without_reason'][:3]}": not report["refused_without_reason"],
        f"planned actions failed: {report['failed_actions']}": not report["failed_actions"],
        f"hung and not ended in time: {_not_ended(report['hangs'])}": not _not_ended(report["hangs"]),
        f"ended as hung, and was not: {report['ended_as_hung']}": not report["ended_as_hung"],
        f"given up while their engines computed: {report['given_up'][:3]}": not report["given_up"],
        f"starved by others: {report['starved'][:3]}": not report["starved"],
        f"not watched: {report['unwatched'][:3]}": not report["unwatched"],
        f"{len(report['unanswered'])} looks without an answer: {report['unanswered'][:3]}": not report["unanswered"],
        f"poisonous requests got too many attempts: {report['poison_attempts']}": (
            attempts["max"] <= POISON_ATTEMPTS and attempts["p50"] <= USUAL_POISON_ATTEMPTS
        ),
        f"pipelined requests without an answer: {report['pipelined']}": (
            report["pipelined"]["asked"] == report["pipelined"]["answered"] and not report["pipelined"]["wrong"]
        ),
        f"/health took {(report['health_s'] or _NO_SPREAD)['max']} s": (
            (report["health_s"] or _NO_SPREAD)["max"] <= HEALTH_WITHIN_S
        ),
        f"silent connections were kept for {report['silent_s']} s": (
            max(report["silent_s"].values(), default=0.0) <= SILENT_WITHIN_S
        ),
    }  # fmt: skip
    return [text for text, holds in bounds.items() if not holds]


def _not_ended(hangs: Sequence[dict[str, Any]]) -> list[str]:
    """Hangs that were not detected, or were reported with another cause."""
    return [
        f"slot {one['slot']} ({one['model']}, {'with' if one['counters'] else 'without'} counters): "
        f"{one['cause'] if one['replaced'] else 'not replaced'} after {one['took_s']} s"
        for one in hangs
        if not one["replaced"] or one["cause"] != "hung"
    ]


def readable(report: dict[str, Any]) -> str:
    """The report as text."""
    gaps, rss = report["first_token_after_failover_s"] or {}, report["rss_mib"] or {}
    usual = report["first_token_without_fault_s"] or {}
    daemon = report["accounting"]["daemon"]
    lines = [
        f"{report['requests']} requests, {report['requests_hit']} of them hit by faults: {report['faults']}",
        f"outcomes                       {report['outcomes']}",
        *(f"  {kind:<28} {found}" for kind, found in report["by_kind"].items()),
        f"failed before the first byte   {report['failed_before_commit']}",
        f"dishonest                      {report['dishonest']}",
        f"cut plain streams              {report['cut_plain_streams']} ({report['cut_twice_or_more']} more than once)",
        f"continued exactly              {report['continued_exactly']}",
        f"honest errors                  {report['honest_errors']}",
        f"first token after a fail-over  p50 {gaps.get('p50')} s, p99 {gaps.get('p99')} s, max {gaps.get('max')} s",
        f"first token without a fault    p50 {usual.get('p50')} s, p99 {usual.get('p99')} s",
        *(f"  {story}" for story in report["slowest_failovers"]),
        f"accounting                     {daemon}: {report['accounting']['wrong'] or 'adds up'}",
        f"usage ledger                   {report['agreement']}",
        f"RSS of the daemon              {rss.get('start')} -> {rss.get('end')} MiB: {rss.get('tenths')}",
        f"restarts                       {report['restarts']}, failed actions {report['failed_actions']}",
        *(
            f"hang of slot {one['slot']}  {one['model']}, {'with' if one['counters'] else 'without'} counters: "
            f"{'replaced' if one['replaced'] else 'NOT REPLACED'} after {one['took_s']} s, cause {one['cause']}"
            for one in report["hangs"]
        ),
        f"ended as hung, and was not     {report['ended_as_hung'] or 'none'}",
        f"held back by its engine        {report['held']}, given up meanwhile {report['given_up'][:3] or 'none'}",
        f"starved by others              {report['starved'][:3] or 'none'}",
        f"not watched                    {report['unwatched'][:3] or 'none'}",
        f"looks without an answer        {len(report['unanswered'])} of {report['looks']}: {report['unanswered'][:3]}",
        f"refusals                       {report['refusals']}, for no stated reason {len(report['refused_without_reason'])}",
        f"silent connections             kept at most {report['silent_s']} s",
        f"freezes of the host            {report['freezes']}",
        f"attempts of poisonous requests {report['poison_attempts']}",
        f"pipelined requests             {report['pipelined']}",
        f"/health over TLS               {report['health_s']}",
        f"descriptors                    {report['descriptors']}",
        *(f"  {example}" for example in report["examples"]),
        "BROKEN: " + "; ".join(report["broken"]) if report["broken"] else "all bounds hold",
    ]
    return "\n".join(lines)
