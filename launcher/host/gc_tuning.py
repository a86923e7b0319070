"""Python's collector of reference cycles, set for a process that lives for months and must not pause."""

from __future__ import annotations

import gc
from typing import Final

# New containers between two looks at the youngest; 700 is usual. Reference counts free what a request made, so there
# is seldom a cycle to find, and what waits to be found is small.
YOUNGEST: Final = 5000


def settle() -> None:
    """Call once all is built and loaded: what is there now is never looked at again.

    Modules, classes and configuration are most of the heap; each full collection would walk them in vain, some
    tens of milliseconds in which no byte moves. https://docs.python.org/3/library/gc.html#gc.freeze
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNGEST, *gc.get_threshold()[1:])
