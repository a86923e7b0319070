"""The usage ledger as the rest of the daemon sees it: enter a request, meter seconds and joules, ask how it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from launcher.config.schema import Usage
from launcher.usage.entry import Entry
from launcher.usage.writer import Sample, State, Writer

# For the last batch at the daemon's end; a disk that hangs does not hold up the end for longer.
STOP_S: Final = 10.0


class Ledger:
    """Raises LauncherError for a zone that this machine does not know; nothing else of it raises."""

    def __init__(self, settings: Usage, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._entries: list[Entry] = []
        self._samples: list[Sample] = []
        self._writer = Writer(settings, path, self._entries, self._samples, clock)
        self._thread = threading.Thread(target=self._writer.run, name="usage ledger", daemon=True)
        self.record: Callable[[Entry], None] = self._entries.append
        """Enter an ended request. It is in the file a second later, and until then only in memory."""

    def meter(self, amounts: Iterable[tuple[str, str, float]]) -> None:
        """Add to the sums of the current hour: what, name, amount."""
        now = self._clock()
        self._samples.extend((now, what, name, amount) for what, name, amount in amounts)

    @property
    def state(self) -> State:
        return self._writer.state

    @property
    def waiting(self) -> int:
        """Entries that are not in the file."""
        return len(self._entries)

    def start(self) -> None:
        self._thread.start()

    def flush(self, within_s: float = 5.0) -> bool:
        """Wait until what was entered is in the file; False where it cannot be written. Blocks: call it in a thread."""
        return self._writer.flush(within_s)

    def stop(self) -> None:
        """Write what waits and end. Blocks, at most STOP_S."""
        self._writer.stop()
        self._thread.join(STOP_S)
