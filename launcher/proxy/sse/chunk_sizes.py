"""Size lines of chunks (RFC 9112 7.1) as vLLM's uvicorn writes them: lower-case hex, no extensions."""

from __future__ import annotations

from typing import Final

NEVER: Final = b"\x00"  # in no event
SIZES: Final = 4096  # bytes of a chunk with its framing; a longer one takes the longer way
LINE_BYTES: Final = 5  # the longest size line


def _size_lines() -> list[bytes | None]:
    """The size line of a chunk, by the length of the chunk with its framing."""
    lines: list[bytes | None] = [None] * SIZES
    for size in range(1, SIZES):
        line = b"%x\r\n" % size
        if len(line) + size + 2 < SIZES:
            lines[len(line) + size + 2] = line
    return lines


SIZE_LINES: Final = _size_lines()
CHUNK_SIZES: Final = {line: size for size, line in enumerate(SIZE_LINES) if line is not None}
