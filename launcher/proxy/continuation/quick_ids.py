"""The hot path of streams whose instance was asked for token ids: each event passes without them.

What comes in, and what goes out of it (transcript.py says how an ordinary event looks)::

    size line | prefix | text" | until | 12,13] | after | CRLF      size line | prefix | text" | suffix | CRLF
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher.proxy.sse.chunk_sizes import CHUNK_SIZES, LINE_BYTES, NEVER, SIZE_LINES, SIZES

Quick = Callable[[bytes], bool]

_NOTHING: tuple[list[bytes], list[bytes], list[bytes]] = ([], [], [])


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

    several = _several_of(frame, heads, head_of)

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
            pieces, notes, outs = _NOTHING if prefix is NEVER else several(raw)
            if not pieces:
                return False
            keep(b"".join(pieces))
            note(b"".join(notes))
            out = b"".join(outs)
            moved[0] += len(pieces)
        moved[1] += len(out)
        write(out)
        if len(text) > limit:
            kept.give_up()
            prefix = NEVER  # nothing is ordinary any more
            starts.clear()
        return True

    return quick


def _several_of(
    frame: Frame, heads: dict[int, bytes], head_of: Callable[[int], bytes]
) -> Callable[[bytes], tuple[list[bytes], list[bytes], list[bytes]]]:
    """A function: of several chunks in one read the texts, the ids, and the client's bytes."""
    prefix, until, end = frame.prefix, frame.until, frame.after + b"\r\n"
    client_end = frame.suffix[1:] + b"\r\n"
    skip, between, tail = len(prefix), len(until), 1 - len(end)

    def several(raw: bytes) -> tuple[list[bytes], list[bytes], list[bytes]]:
        """Nothing unless all are whole and ordinary."""
        size, at = len(raw), 0
        pieces: list[bytes] = []
        notes: list[bytes] = []
        outs: list[bytes] = []
        while at < size:
            event = raw.find(b"\n", at, at + LINE_BYTES) + 1
            till = at + CHUNK_SIZES.get(raw[at:event], size + 1)
            start = event + skip
            cut = raw.find(b'"', start, till) + 1
            told = raw[cut + between : till + tail]
            if (
                till > size
                or not raw.startswith(prefix, event)
                or not raw.endswith(end, start, till)
                or not raw.startswith(until, cut)
                or told.find(b"]") != len(told) - 1
            ):
                return _NOTHING
            pieces.append(raw[start:cut])
            notes.append(told)
            outs += heads.get(cut - start) or head_of(cut - start), pieces[-1], client_end
            at = till
        return pieces, notes, outs

    return several
