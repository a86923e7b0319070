"""`Server-Timing`: where a request's time went before its first byte (W3C Server Timing, header syntax)."""

from __future__ import annotations


def server_timing(queue_s: float, connect_s: float | None, first_byte_s: float) -> bytes:
    """The header's line, with CRLF. All in seconds: waiting for an instance, reaching it (None where a kept
    connection was used), and from the request's start there to the first byte of its answer.

    The header says milliseconds, as the specification wants; browsers show it in their network panel.
    """
    connect = b"" if connect_s is None else b"connect;dur=%.1f, " % (connect_s * 1000)
    return b"Server-Timing: queue;dur=%.1f, %sfirst_byte;dur=%.1f\r\n" % (
        queue_s * 1000,
        connect,
        first_byte_s * 1000,
    )
