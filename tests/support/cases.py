"""Cases of a test that share what is dear to set up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def case(*names: object) -> Iterator[None]:
    """Names the case in an error of the block."""
    try:
        yield
    except Exception as error:
        error.add_note(f"case: {', '.join(map(str, names))}")
        raise
