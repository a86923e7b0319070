"""Whether the usage ledger, the counters of /metrics and the clients of a run agree on its requests and tokens."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from support.ledger_file import entries

from chaos.clients import Result
from launcher.accounts.audit_verify import verify
from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger_file import open_sums
from launcher.base.errors import LauncherError

KINDS = ("prompt", "cached_prompt", "output")
# An estimate, of a stream that was continued by its text: so far may it be from the truth, in tokens and as a share.
ESTIMATE_TOKENS = 3
ESTIMATE_SHARE = 0.1
FLUSHED_S = 10.0


class Books:
    """The ledger's file as it is now."""

    def __init__(self, ledger: Path) -> None:
        reader = open_sums(ledger)
        try:
            self.entries = list(entries(reader, 0.0, time.time() + 3600))
            columns = "sum(requests), sum(prompt_tokens), sum(cached_tokens), sum(output_tokens)"
            rows = reader.execute(f"SELECT dimension, {columns} FROM hourly GROUP BY dimension")  # noqa: S608
            self.hourly: dict[str, tuple[int, ...]] = {row[0]: tuple(row[1:]) for row in rows}
        finally:
            reader.close()


def books(ledger: Path, accepted: int) -> Books:
    """The ledger once it has that many entries, or what it has in the end. Blocks."""
    deadline = time.monotonic() + FLUSHED_S
    while True:
        try:
            found = Books(ledger)
            if len(found.entries) >= accepted or time.monotonic() > deadline:
                return found
        except LauncherError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def counters(page: str) -> tuple[int, ...]:
    """The tokens of all models in a metrics page: prompt, cached, output."""
    patterns = (rf"^numa_launcher_{kind}_tokens_total{{.*}} (\S+)$" for kind in KINDS)
    return tuple(
        sum(int(float(value)) for value in re.findall(pattern, page, re.MULTILINE)) for pattern in patterns
    )


def compare(results: Sequence[Result], found: Books, page: str, accepted: int) -> dict[str, Any]:
    """What was compared; `wrong` names every difference."""
    entered = {entry.request_id: entry for entry in found.entries}
    sums = tuple(
        sum(getattr(entry, name) for entry in found.entries)
        for name in ("prompt_tokens", "cached_tokens", "output_tokens")
    )
    counted = [result for result in results if result.tokens is not None]
    missing = [result.name for result in counted if result.name not in entered]
    known = [(result, entered[result.name]) for result in counted if result.name in entered]
    other = [_told(result, entry) for result, entry in known if entry.exact and not _equal(result, entry)]
    far = [_told(result, entry) for result, entry in known if not entry.exact and not _near(result, entry)]
    rules = {
        f"{len(found.entries)} entries of {accepted} requests": len(found.entries)
        == len(entered)
        == accepted,
        f"no entry of {missing[:3]}": not missing,
        f"an entry is not what its client counted: {other[:3]}": not other,
        f"an estimate is far off: {far[:3]}": not far,
        f"hourly sums {found.hourly}, entries {sums}": all(
            row == (len(found.entries), *sums) for row in found.hourly.values()
        ),
        f"/metrics say {counters(page)}, the entries {sums}": counters(page) == sums,
        f"outcomes differ: {_outcomes(known)[:3]}": not _outcomes(known),
    }
    return {
        "entries": len(found.entries),
        "tokens": sums,
        "equal to their clients' counts": sum(entry.exact for _, entry in known),
        "estimates": sum(not entry.exact for entry in found.entries),
        "estimates of whole responses": sum(not entry.exact for _, entry in known),
        "wrong": [rule for rule, holds in rules.items() if not holds],
    }


def differences(trail: Path, entered: Sequence[EndedRequest]) -> list[str]:
    """Of the audit trail and the ledger's entries. Blocks."""
    deadline = time.monotonic() + FLUSHED_S
    while True:
        report = verify(trail)
        if report.kinds.get("request", 0) >= len(entered) or report.wrong or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    texts = [text for path in trail.glob("audit-*.jsonl") for text in path.read_text().splitlines()]
    lines = [line for line in map(json.loads, texts) if line["kind"] == "request"]
    names = ("request_id", "model", "status", "outcome", "slot", "prompt_tokens", "output_tokens")
    recorded = Counter(tuple(line[name] for name in names) for line in lines)
    other = recorded - Counter(tuple(getattr(entry, name) for name in names) for entry in entered)
    rules = {
        f"audit trail: {report.wrong}": report.wrong is None,
        f"audit trail: {len(lines)} requests of {len(entered)} entries": len(lines) == len(entered),
        f"audit trail: not as entered: {list(other)[:3]}": not other,
    }
    return [rule for rule, holds in rules.items() if not holds]


def _equal(result: Result, entry: EndedRequest) -> bool:
    return (entry.prompt_tokens, entry.output_tokens) == result.tokens


def _near(result: Result, entry: EndedRequest) -> bool:
    assert result.tokens is not None
    pairs = zip((entry.prompt_tokens, entry.output_tokens), result.tokens, strict=True)
    return all(abs(said - true) <= ESTIMATE_TOKENS + ESTIMATE_SHARE * true for said, true in pairs)


def _outcomes(known: Iterable[tuple[Result, EndedRequest]]) -> list[str]:
    return [f"{entry.request_id}: {entry.outcome}" for _, entry in known if entry.outcome != "completed"]


def _told(result: Result, entry: EndedRequest) -> str:
    said = (entry.prompt_tokens, entry.output_tokens)
    return f"{result.name}: entered {said}, counted {result.tokens}, continued {entry.continued}"
