"""Whether an instance computes with ZenTorch. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# vllm/platforms/__init__.py (0.32) and the older plugin (vLLM 0.11 to 0.15).
_ON: Final = ("AMD Zen CPU detected with zentorch installed", "Loading plugin zentorch")
_OFF: Final = (
    "AMD Zen CPU detected but zentorch not installed",
    "AMD Zen CPU detected but zentorch failed to import",
    "Plugin supports versions",
)
_LIBRARY: Final = "libzentorch"


def zentorch_active(log_lines: Iterable[str], maps_text: str) -> bool | None:
    """True or False when known, else None.

    `maps_text` is /proc/PID/maps of the instance's processes, joined; it is conclusive. Of log lines, one that says
    no outweighs one that says yes."""
    if _LIBRARY in maps_text:
        return True
    said_yes = False
    for line in log_lines:
        if any(text in line for text in _OFF):
            return False
        said_yes = said_yes or any(text in line for text in _ON)
    if said_yes:
        return True
    return False if maps_text else None
