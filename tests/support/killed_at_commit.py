"""Processes that enter requests into a usage ledger and are killed at a commit: `killed_at_commit.py FILE`.

Each line of its input, FIRST N WHEN, forks one: the modules are imported once. WHEN: "before" or "after" the N-th commit.
Entries have the numbers FIRST, FIRST + 1, ... as their ids; before each, a budget's sum is stored, as the daemon does it,
and a row of the history is added. The process prints what ToldLedger tells, and before it ends how many entries the file
has then. Then follows a line with "ended" and its exit code: the negative number of the signal."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from support.busy_ledger import ToldLedger, enter
from support.history_rows import row

from launcher.base.database import Database
from launcher.base.writer import Writer
from launcher.config.schema import Usage
from launcher.telemetry.load_table import LoadTable

KEY = ("key", "ann", "tokens/month")
BEGIN = 1_793_000_000
STEP_MS = 2000


class Killed(Database):
    """Ends the process."""

    left = 0
    when = ""

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        if self.connection.in_transaction:
            yield self.connection
            return
        [before] = self.connection.execute("SELECT count(*) FROM request").fetchone()
        with super().transaction() as connection:
            yield connection
            Killed.left -= 1
            self.end("before", before)
        [after] = self.connection.execute("SELECT count(*) FROM request").fetchone()
        self.end("after", after)

    def end(self, when: str, count: int) -> None:
        if self.left == 0 and self.when == when:
            print(count, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def run(path: Path, number: int) -> None:
    load = LoadTable(lambda: 1 << 60)
    ledger = ToldLedger(Usage(), path, mirrored=[load])
    ledger.first = number
    slot = ledger.spent.slot(*KEY)
    Writer("usage ledger", ledger).start()

    def before(following: int) -> None:
        slot.store(BEGIN, following)
        load.add([row(following * STEP_MS)])

    enter(ledger, number, before)


def main() -> None:
    for line in sys.stdin:
        first, left, when = line.split()
        child = os.fork()
        if not child:
            try:
                Killed.left, Killed.when = int(left), when
                run(Path(sys.argv[1]), int(first))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        print("ended", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    from launcher.accounts import ledger_file

    setattr(ledger_file, "Database", Killed)  # noqa: B010  mypy refuses a plain assignment of a class
    main()
