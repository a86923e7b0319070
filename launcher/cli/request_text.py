"""What became of a request, in words. Pure."""

from __future__ import annotations

import time
from typing import Any, Final

_SHOWN: Final = {
    "completed": "completed",
    "client_aborted": "its client left before the end",
    "rejected": "refused by the proxy",
    "failed": "failed",
    None: "in flight",
}


def to_text(request: dict[str, Any], now: float) -> str:
    """All of it: who asked what, what came of it, each step, and where the time went. `now`: Unix time."""
    ended = request["ended"]
    took_s = (now if ended is None else ended) - request["began"]
    lines = [
        _who(request),
        f"  began:   {_local(request['began'])}, {'so far' if ended is None else 'took'} {seconds(took_s)}",
        f"  outcome: {_outcome(request)}",
    ]
    if request["tokens"] is not None:
        lines.append(f"  tokens:  {_tokens(request['tokens'])}")
    if (first := _first_token(request)) is not None:
        lines.append(f"  first token: {first}")
    lines.append("  steps:")
    lines += [f"    {step['at_s']:10.3f} s  {_step(step)}" for step in request["steps"]]
    if (spent := _spent(request, took_s)) is not None:
        lines.append(f"  time:    {spent}")
    if request["trace_id"] is not None:
        lines.append(f"  trace:   {request['trace_id']}")
    lines += _notes(request)
    return "\n".join(lines)


def _who(request: dict[str, Any]) -> str:
    parts = [request["route"]]
    if request["model"] is not None:
        parts.append(f"model {request['model']}")
    if request["key"] is not None:
        parts.append(f"key {request['key']}")
    if request["stream"]:
        parts.append("stream")
    return f"request {request['id']}: {', '.join(parts)}"


def _outcome(request: dict[str, Any]) -> str:
    status = "" if request["status"] is None else f", status {request['status']}"
    why = "" if request["reason"] is None else f": {request['reason']}"
    return f"{_SHOWN.get(request['outcome'], request['outcome'])}{status}{why}"


def _tokens(tokens: dict[str, Any]) -> str:
    about = "about " if tokens["estimated"] else ""
    cached = f" ({tokens['cached']:,} cached)" if tokens["cached"] else ""
    return f"{about}{tokens['prompt']:,} of the prompt{cached}, {tokens['output']:,} generated"


def _first_token(request: dict[str, Any]) -> str | None:
    at_s = next((step["at_s"] for step in request["steps"] if step["what"] == "first token"), None)
    predicted_s = request["predicted_s"]
    if at_s is None:
        return None if predicted_s is None else f"predicted after {seconds(predicted_s)}"
    predicted = "" if predicted_s is None else f", predicted after {seconds(predicted_s)}"
    return f"after {seconds(at_s)}{predicted}"


def _step(step: dict[str, Any]) -> str:
    where, why = _where(step), "" if step["why"] is None else f": {step['why']}"
    words = {
        "sent": f"sent to {where or 'an instance'}{why}",
        "overflowed": f"sent to {where}{_reason(step['why'])}",
        "attempt failed": f"{where or 'attempt'} failed{why}",
        "continued": f"continued by {where or 'another instance'}",
        "first token": f"first token{f' from {where}' if where else ''}",
    }
    return words.get(step["what"], f"{step['what']}{why}")


def _reason(why: str | None) -> str:
    words = {
        "full": ": the queue here was full, or no instance was ready",
        "predicted": ": its first token was predicted to come too late here",
    }
    return "" if why is None else words.get(why, f": {why}")


def _where(step: dict[str, Any]) -> str:
    if step["endpoint"] is not None:
        return f"overflow endpoint {step['endpoint']}"
    if step["slot"] is None:
        return ""
    generation = "" if step["generation"] is None else f" (generation {step['generation']})"
    return f"slot {step['slot']}{generation}"


def _spent(request: dict[str, Any], took_s: float) -> str | None:
    """Where the time went: in the queue, and at each upstream."""
    if took_s <= 0:
        return None
    sums: dict[str, float] = {}
    where, since = "waiting", 0.0
    steps = request["steps"]
    for step in [*steps, {"what": "ended", "at_s": took_s}]:
        if step["what"] in {"first token", "continued", "received"}:
            continue
        sums[where] = sums.get(where, 0.0) + max(0.0, step["at_s"] - since)
        since = step["at_s"]
        where = _where(step) or "an instance" if step["what"] in {"sent", "overflowed"} else "waiting"
    shares = (
        f"{name} {seconds(spent)} ({spent / took_s:.0%})"
        for name, spent in sums.items()
        if spent / took_s >= 0.005
    )
    return ", ".join(shares) or None


def _notes(request: dict[str, Any]) -> list[str]:
    notes = []
    if request["same_id"]:
        notes.append(f"{request['same_id']} more requests in memory have this id; this is the latest")
    if request["source"] != "memory":
        notes.append("from the usage ledger: single attempts are kept in memory only, and for a shorter time")
    return [f"  note: {note}" for note in notes]


def seconds(value: float) -> str:
    """A time in milliseconds or seconds."""
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _local(at: float) -> str:
    whole = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    return f"{whole}.{int(at % 1 * 1000):03}"
