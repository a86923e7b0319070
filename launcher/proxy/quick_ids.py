"""The hot path of streams whose instance was asked for token ids: each event passes without them.

What comes in, and what goes out of it (transcript.py says how an ordinary event looks)::

    size line | prefix | text" | until | 12,13] | after | CRLF      size line | prefix | text" | suffix | CRLF
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher.proxy.chunk_sizes import CHUNK_SIZES, LINE_BYTES, NEVER, SIZE_LINES, SIZES

Quick = Callable[[bytes], bool]


@dataclass(frozen=True, slots=True)
class Frame:
    """The constant bytes of one stream's ordinary events; `suffix` begins with the text's quotation mark."""

    prefix: bytes
    until: bytes  # from behind the text's quotation mark to the ids
    after: bytes  # from the bracket that ends them
    suffix: bytes  # for the client


@dataclass(frozen=True, slots=True)
class Kept:
    """Where text and ids go (Transcript.text, TokenIds.entries); `give_up` is called once the text is too long."""

    text: bytearray
    entries: bytearray
    limit_bytes: int
    give_up: Callable[[], None]


def quick_with_ids(frame: Frame, kept: Kept, write: Callable[[bytes], None], moved: list[int]) -> Quick:
    """See Transcript.quick."""
    prefix, until, text, limit = frame.prefix, frame.until, kept.text, kept.limit_bytes
    end, client_end = frame.after + b"\r\n", frame.suffix[1:] + b"\r\n"
    between, tail = len(until), 1 - len(end)  # what is noted has the bracket that ends the ids
    starts: dict[int, bytes] = {}  # by a read's length: its size line and the prefix
    heads: dict[int, bytes] = {}  # the same for the client, by the text's length
    keep, note = text.extend, kept.entries.extend

    def start_of(size: int) -> bytes:
        line = SIZE_LINES[size] if size < SIZES else None
        starts[size] = start = NEVER if line is None else line + prefix
        return start

    def head_of(size: int) -> bytes:
        heads[size] = head = b"%x\r\n" % (len(prefix) + size + len(client_end) - 2) + prefix
        return head

    def quick(raw: bytes) -> bool:
        nonlocal prefix
        size = len(raw)
        start = starts.get(size) or start_of(size)
        at = len(start)
        cut = raw.find(b'"', at) + 1
        told = raw[cut + between : tail]
        if (
            raw.startswith(start)
            and raw.endswith(end)
            and raw.startswith(until, cut)
            and told.find(b"]") == len(told) - 1
        ):
            piece = raw[at:cut]
            keep(piece)
            note(told)
            moved[0] += 1
            size = len(piece)
            out = (heads.get(size) or head_of(size)) + piece + client_end
        else:
            found = [] if prefix is NEVER else _several(raw, frame)
            if not found:
                return False
            keep(b"".join([piece for piece, _ in found]))
            note(b"".join([told for _, told in found]))
            out = b"".join([head_of(len(piece)) + piece + client_end for piece, _ in found])
            moved[0] += len(found)
        moved[1] += len(out)
        write(out)
        if len(text) > limit:
            kept.give_up()
            prefix = NEVER  # nothing is ordinary any more
            starts.clear()
        return True

    return quick


def _several(raw: bytes, frame: Frame) -> list[tuple[bytes, bytes]]:
    """Text and ids of several chunks in one read; none unless all are whole and ordinary."""
    prefix, until, end = frame.prefix, frame.until, frame.after + b"\r\n"
    skip, between, tail = len(prefix), len(until), 1 - len(end)
    size, at = len(raw), 0
    found: list[tuple[bytes, bytes]] = []
    while at < size:
        event = raw.find(b"\n", at, at + LINE_BYTES) + 1
        till = at + CHUNK_SIZES.get(raw[at:event], size + 1)
        if till > size or not raw.startswith(prefix, event) or not raw.endswith(end, event + skip, till):
            return []
        cut = raw.find(b'"', event + skip, till) + 1
        told = raw[cut + between : till + tail]
        if not raw.startswith(until, cut) or told.find(b"]") != len(told) - 1:
            return []
        found.append((raw[event + skip : cut], told))
        at = till
    return found
