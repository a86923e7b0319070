"""HTTP/1.1 in both directions: bytes in, values out (RFC 9110, RFC 9112). No I/O.

    fields     syntax and limits of a head, and which fields pass
    requests   a client's head -> RequestHead or HttpError; RequestHead -> the head for an instance
    responses  an instance's head -> ResponseHead; ResponseHead -> the head for the client
    chunks     the chunked transfer coding

Nothing is repaired: an ambiguous head is refused. What is sent on is written from the parsed values; only whole field
lines that were found valid are copied. So no later parser can read another message than the one checked here.
"""

from launcher.proxy.http1.chunks import BadFraming, ChunkedDecoder
from launcher.proxy.http1.fields import MAX_FIELDS, MAX_HEAD_BYTES, MAX_LINE_BYTES, SERVER, head_end, lines_of
from launcher.proxy.http1.requests import (
    FORWARDED_FIELDS,
    REPEATED_BYTES,
    RequestHead,
    field_lines,
    parse_request,
    selected_head,
    upstream_head,
)
from launcher.proxy.http1.responses import BadResponse, ResponseHead, client_head, parse_response

__all__ = [
    "FORWARDED_FIELDS", "MAX_FIELDS", "MAX_HEAD_BYTES", "MAX_LINE_BYTES", "REPEATED_BYTES", "SERVER", "BadFraming",
    "BadResponse", "ChunkedDecoder", "RequestHead", "ResponseHead", "client_head", "field_lines", "head_end", "lines_of",
    "parse_request", "parse_response", "selected_head", "upstream_head",
]  # fmt: skip
