"""HTTP/1.1 in both directions: bytes in, values out (RFC 9110, RFC 9112). No I/O.

    fields     syntax and limits of a head, and which fields pass
    requests   a client's head -> RequestHead or HttpError; RequestHead -> the head for an instance
    responses  an instance's head -> ResponseHead; ResponseHead -> the head for the client
    chunks     the chunked transfer coding

Nothing is repaired: an ambiguous head is refused. What is sent on is written from the parsed values; only whole field
lines that were found valid are copied. So no later parser can read another message than the one checked here.
"""
