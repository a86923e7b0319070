"""The event of a stream that tells its usage and nothing else."""

from __future__ import annotations

from typing import Final

import msgspec

from launcher.proxy.sse.tracker import EVENT_END, event_data

USAGE_KEY: Final = b'"usage"'  # in no text: within a JSON string every quotation mark is escaped


def without_usage(events: bytes) -> bytes:
    """Whole events without those that tell usage and nothing else; the very same bytes where there is none."""
    kept, start = bytearray(), 0
    for end in EVENT_END.finditer(events):
        event, start = events[start : end.end()], end.end()
        if USAGE_KEY not in event or not _tells_usage_only(event):
            kept += event
    kept += events[start:]
    return events if len(kept) == len(events) else bytes(kept)


def _tells_usage_only(event: bytes) -> bool:
    data = event_data(event)
    if data is None:
        return False
    try:
        chunk = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(chunk, dict) and chunk.get("choices") == [] and isinstance(chunk.get("usage"), dict)
