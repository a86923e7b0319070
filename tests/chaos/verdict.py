"""What happened, against what may happen."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from chaos.clients import Result

CUTS = {"fin", "rst", "early", "stall", "garbage", "kill", "freeze", "stopped"}
SHOWN_AT_ONCE = {"fin", "rst", "early", "garbage", "kill", "reset", "500", "503", "nonsense", "error"}
DISHONEST = {"wrong", "silent", "unframed", "lost"}
CONTINUED_SHARE = 0.99
FIRST_TOKEN_S = 1.0  # more than a first token takes in the same run without a fault
RSS_GROWTH = 1.10
EXAMPLES = 12
_NO_RSS = {"start": 0.0, "end": 0.0}


@dataclass(frozen=True, slots=True)
class Fault:
    """One request that a fault hit, as the engine noted it."""

    name: str
    kind: str
    at: float  # time.monotonic of this machine
    sent: int  # events with text that had been written before
    engine: str


def judge(
    results: Sequence[Result], faults: Iterable[Fault], requests: dict[str, Any], rss: Sequence[int]
) -> dict[str, Any]:
    """The report; `broken` names every bound that does not hold."""
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
            "wrong": _accounts(outcomes, requests),
        },
        "rss_mib": _rss(rss),
    }  # fmt: skip
    report["broken"] = _broken(report)
    report["examples"] = [
        f"{result.name} {result.kind} {result.outcome}: {result.detail}; hit by {_story(hits.get(result.name, ()))}"
        for result in sorted(results, key=lambda result: result.outcome not in DISHONEST | {"failed"})
        if result.outcome in DISHONEST | {"failed"} or (result.outcome == "told" and result.plain)
    ][:EXAMPLES]  # fmt: skip
    return report


def _story(faults: Sequence[Fault]) -> str:
    """The faults of one request, in order, with the seconds since the first."""
    told = sorted(faults, key=lambda fault: fault.at)
    lines = (f"{fault.kind}@{fault.engine} after {fault.sent} +{fault.at - told[0].at:.2f}" for fault in told)
    return ", ".join(lines) or "nothing"


def _gaps(result: Result, faults: Sequence[Fault]) -> Iterable[float]:
    """From each fault that shows itself at once to the next event that the client got."""
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
    """What a first event takes in this run where no fault is: the machine's share of one after a fail-over."""
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


def _accounts(outcomes: Counter[str], requests: dict[str, Any]) -> list[str]:
    """What does not add up. A client that leaves while the last bytes are under way may count as either."""
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
            requests["completed"] + requests["client_aborted"] == whole + left
        ),
        "completed ≥ whole answers": requests["completed"] >= whole,
        "failed = errors told, answers dropped, requests failed": requests["failed"] == bad,
        "rejected = refused": requests["rejected"] == outcomes["refused"],
    }
    return [rule for rule, holds in rules.items() if not holds]


def _rss(samples: Sequence[int]) -> dict[str, float] | None:
    """Medians of two fifths of the time: after the beginning, and the end."""
    fifth = len(samples) // 5
    if not fifth:
        return None
    start, end = statistics.median(samples[fifth : 2 * fifth]), statistics.median(samples[-fifth:])
    return {
        "start": round(start / 2**20, 1),
        "end": round(end / 2**20, 1),
        "max": round(max(samples) / 2**20, 1),
    }


def _broken(report: dict[str, Any]) -> list[str]:
    share, rss, gaps = (
        report["continued_share"],
        report["rss_mib"] or _NO_RSS,
        report["first_token_after_failover_s"],
    )
    late = gaps["p99"] if gaps else 0.0
    usual = report["first_token_without_fault_s"]
    bound = FIRST_TOKEN_S + (usual["p99"] if usual else 0.0)
    bounds = {
        f"{report['failed_before_commit']} requests failed before their first byte": report["failed_before_commit"] == 0,
        f"{report['dishonest']} dishonest answers": report["dishonest"] == 0,
        f"{share} of the cut streams continued, not {CONTINUED_SHARE}": share is None or share >= CONTINUED_SHARE,
        f"accounts do not add up: {'; '.join(report['accounting']['wrong'])}": not report["accounting"]["wrong"],
        f"RSS grew from {rss['start']} to {rss['end']} MiB": rss["end"] <= rss["start"] * RSS_GROWTH,
        f"p99 of the first token after a fail-over is {late} s, not {bound:.3f}": late <= bound,
        "no request was made": report["requests"] > 0,
    }  # fmt: skip
    return [text for text, holds in bounds.items() if not holds]


def readable(report: dict[str, Any]) -> str:
    """For a person."""
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
        f"RSS of the daemon              {rss.get('start')} -> {rss.get('end')} MiB",
        f"restarts                       {report.get('restarts')}",
        *(f"  {example}" for example in report["examples"]),
        "BROKEN: " + "; ".join(report["broken"]) if report["broken"] else "all bounds hold",
    ]
    return "\n".join(lines)
