"""One ended request, as the usage ledger and the audit trail enter it. No word of its prompt or response."""

from __future__ import annotations

from msgspec import Struct


class Entry(Struct, frozen=True, gc=False):
    """Made once, when an accepted request has ended. Texts are "" where there is none.

    The ledger keeps them as columns: a new field goes to the end here, and into columns.py."""

    ended_at: float  # Unix time, seconds
    request_id: str
    key: str = ""  # name of its API key
    model: str = ""
    adapter: str = ""
    path: str = ""  # its route
    status: int = 0  # of the response; 0: none was sent
    outcome: str = ""
    slot: int | None = None  # of the last instance that worked on it
    duration_s: float = 0.0  # from its arrival to its end
    queued_s: float | None = None  # from its arrival until an instance was asked; None: none was
    first_byte_s: float | None = (
        None  # from its arrival to the response's first byte; for a stream the first token
    )
    prompt_tokens: int = 0  # the cached ones included
    cached_tokens: int = 0
    output_tokens: int = 0
    exact: bool = True  # an upstream counted the tokens; False: they are estimated
    attempts: int = 0
    continued: int = 0
    overflow: str = ""  # name of the overflow endpoint that it was sent to
    overflow_reason: str = ""  # "full" or "predicted"
    predicted_s: float | None = None  # time to the first token that was predicted when it arrived
    picos: int = (
        0  # of the currency: at the overflow endpoint's prices, or for a local request at [cost.price]
    )
    streamed: bool = True  # its first byte came when its first token was there, not all of them
