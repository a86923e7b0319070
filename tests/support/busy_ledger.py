"""A process that enters requests into a usage ledger until it is killed: `busy_ledger.py FILE FIRST BATCH_S`.

Entries have the numbers FIRST, FIRST + 1, ... as their ids, and keys, models and slots that follow from the number. It
prints "started", and at the begin of each turn of the writer the number of the next entry."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from launcher.accounts import ledger as module
from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger import Ledger
from launcher.base.writer import Problem, Writer
from launcher.config.schema import Usage

PER_S = 2000


def entry(number: int, now: float) -> EndedRequest:
    return EndedRequest(
        ended_at=now, request_id=str(number), key=f"key {number % 7}", model=f"model {number % 3}", slot=number % 5,
        outcome="completed" if number % 11 else "failed", prompt_tokens=number % 1000, cached_tokens=number % 10,
        output_tokens=number % 100, picos=number * 1000, queued_s=0.001, first_byte_s=0.2, duration_s=1.0,
    )  # fmt: skip


class ToldLedger(Ledger):
    """Tells of each turn when it begins: entries with smaller numbers are in the file when the turn has ended."""

    first = 0

    def write(self) -> Problem | None:
        os.write(1, b"%d\n" % (self.first + self._put))
        return super().write()


def enter(ledger: Ledger, number: int, before: Callable[[int], None] = lambda _number: None) -> None:
    """Entries from `number` on, PER_S each second, for ever. `before`: called before each, with the next number."""
    began, first = time.monotonic(), number
    while True:
        while number - first < (time.monotonic() - began) * PER_S:
            before(number + 1)
            ledger.put(entry(number, time.time()))
            number += 1
        time.sleep(0.001)


def main() -> None:
    path, number, batch_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    setattr(module, "BATCH_S", batch_s)  # noqa: B010  mypy refuses a plain assignment of a constant
    ledger = ToldLedger(Usage(), path)
    ledger.first = number
    print("started", flush=True)
    Writer("usage ledger", ledger).start()
    enter(ledger, number)


if __name__ == "__main__":
    main()
