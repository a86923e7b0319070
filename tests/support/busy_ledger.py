"""A process that enters requests into a usage ledger until it is killed: `busy_ledger.py FILE FIRST BATCH_S`.

Entries have the numbers FIRST, FIRST + 1, ... as their ids, and keys, models and slots that follow from the number."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from launcher.accounts import ledger as module
from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger import Ledger
from launcher.base.writer import Writer
from launcher.config.schema import Usage

PER_S = 2000


def entry(number: int, now: float) -> EndedRequest:
    return EndedRequest(
        ended_at=now, request_id=str(number), key=f"key {number % 7}", model=f"model {number % 3}", slot=number % 5,
        outcome="completed" if number % 11 else "failed", prompt_tokens=number % 1000, cached_tokens=number % 10,
        output_tokens=number % 100, picos=number * 1000, queued_s=0.001, first_byte_s=0.2, duration_s=1.0,
    )  # fmt: skip


def enter(ledger: Ledger, number: int, then: Callable[[int], None] = lambda _number: None) -> None:
    """Entries from `number` on, PER_S each second, for ever. `then`: called after each, with the next number."""
    began, first = time.monotonic(), number
    while True:
        while number - first < (time.monotonic() - began) * PER_S:
            ledger.put(entry(number, time.time()))
            number += 1
            then(number)
        time.sleep(0.001)


def main() -> None:
    path, number, batch_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    setattr(module, "BATCH_S", batch_s)  # noqa: B010  mypy refuses a plain assignment of a constant
    ledger = Ledger(Usage(), path)
    Writer("usage ledger", ledger).start()
    print("started", flush=True)
    enter(ledger, number)


if __name__ == "__main__":
    main()
