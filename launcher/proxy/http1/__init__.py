"""HTTP/1.1 as the front door speaks it, both ways: bytes in, values out (RFC 9110, RFC 9112). No I/O.

    fields     what a head may look like, where one ends, and which of its lines pass on
    requests   a client's head -> RequestHead or a HttpError; RequestHead -> the head for an instance
    responses  an instance's head -> ResponseHead; ResponseHead -> the head for the client
    chunks     the chunked transfer coding, taken apart

The rule behind all of it: nothing is repaired. A head that two readers could understand in two ways is
refused, and what goes on is written anew from the parsed values; only whole field lines that were found good
are passed as they came. So nobody behind can see another message than the one that was judged here.
"""

from launcher.proxy.http1.chunks import BadFraming, ChunkedDecoder
from launcher.proxy.http1.fields import MAX_FIELDS, MAX_HEAD_BYTES, MAX_LINE_BYTES, SERVER, head_end
from launcher.proxy.http1.requests import (
    FORWARDED_FIELDS,
    KEY_ID,
    RequestHead,
    field_lines,
    inside_head,
    parse_request,
    request_id,
    upstream_head,
)
from launcher.proxy.http1.responses import BadResponse, ResponseHead, client_head, parse_response

__all__ = [
    "FORWARDED_FIELDS",
    "KEY_ID",
    "MAX_FIELDS",
    "MAX_HEAD_BYTES",
    "MAX_LINE_BYTES",
    "SERVER",
    "BadFraming",
    "BadResponse",
    "ChunkedDecoder",
    "RequestHead",
    "ResponseHead",
    "client_head",
    "field_lines",
    "head_end",
    "inside_head",
    "parse_request",
    "parse_response",
    "request_id",
    "upstream_head",
]
