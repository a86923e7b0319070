"""`Server-Timing`: where a request's time went before its first byte (W3C Server Timing, header syntax)."""

from __future__ import annotations


def server_timing(queue_s: float, first_byte_s: float) -> bytes:
    """The header's line, with CRLF. In seconds: waiting for an instance, and from the request's start there to the
    first byte of its answer.

    The header says milliseconds, as the specification wants; browsers show it in their network panel.
    """
    return b"Server-Timing: queue;dur=%.1f, first_byte;dur=%.1f\r\n" % (queue_s * 1000, first_byte_s * 1000)
