"""Settings of Python's cyclic garbage collector for a process that runs for months and must not pause."""

from __future__ import annotations

import gc
from typing import Final

# New containers between two collections of the youngest generation; Python's default is 700. Reference counts free the
# objects of a request, so cycles are rare and small.
YOUNGEST: Final = 5000


def settle() -> None:
    """Exclude all present objects from collection. Call it once everything is loaded.

    Modules, classes and configuration are most of the heap; each full collection would walk them, a pause of tens of
    milliseconds. https://docs.python.org/3/library/gc.html#gc.freeze"""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNGEST, *gc.get_threshold()[1:])
