"""Standard output and standard error, of every verb: a failed write has an exit code of its own, and what a terminal's
character set lacks is replaced.

A verb prints as if nothing could fail. `guarded` puts streams below it that remember the first failed write, so that its
errno decides, whatever became of the exception on its way up.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import select
import signal
import sys
import unicodedata
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Final

from launcher.base.errors import reason

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

UNWRITTEN: Final = 4
"""Exit code: standard output could not be written. No verb has it for a result."""
READER_GONE: Final = 128 + signal.SIGPIPE
"""Exit code of programs that SIGPIPE ends: the reader of a pipe has closed it."""

_STDOUT: Final = 1
_STDERR: Final = 2
# One column each, so that tables and the lines of a full screen keep their width.
_SUBSTITUTES: Final = str.maketrans(
    "…·→←×–—−÷≤≥±µμ•“”„‘’‚«»\u00a0␣─━│┃┌┐└┘├┤┬┴┼╭╮╰╯╷╵▁▂▃▄▅▆▇█░▒▓",
    "~-><x---/<>~uu*\"\"\"'''<> _--||+++++++++++++||_.--==##.:#",
)
_ERRORS: Final = "numa-launcher-substitute"


class OutputError(Exception):
    """Standard output could not be written. No OSError: whoever handles those of a connection is not meant."""


def substitute(text: str) -> str:
    """ASCII for what a character set lacks: a similar character, the letter without its accent, or \\uNNNN."""
    return "".join(map(_ascii, text.translate(_SUBSTITUTES)))


def _ascii(character: str) -> str:
    if character.isascii():
        return character
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    if plain:
        return plain
    return character.encode("ascii", "backslashreplace").decode()


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return substitute(error.object[error.start : error.end]), error.end


codecs.register_error(_ERRORS, _replace)


def guarded(run: Callable[[], int]) -> int:
    """The exit code of `run`; UNWRITTEN and one line on standard error where its output could not be written; READER_GONE,
    without a word, where the reader of a pipe has closed it."""
    if sys.stdout is not sys.__stdout__:  # somebody else's: a test reads it
        return run()
    _occupy()
    out = _Descriptor(_STDOUT)
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _text(out, before[0]), _text(_Diagnostics(_STDERR), before[1])
    try:
        try:
            code = run()
        finally:
            sys.stdout.flush()
    except BaseException:
        if out.failure is None:
            raise
        code = UNWRITTEN
    finally:
        sys.stderr.flush()
    if out.failure is not None:
        code = _told(out.failure)
    return code


def _told(failure: OSError) -> int:
    if failure.errno != errno.EPIPE:
        print(f"cannot write to standard output: {reason(failure)}", file=sys.stderr, flush=True)
    # The interpreter flushes what is left at its end.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, _STDOUT)
    os.close(null)
    return READER_GONE if failure.errno == errno.EPIPE else UNWRITTEN


def _occupy() -> None:
    """Open standard descriptors that are closed, or the next socket would be one of them. Writing to a closed standard
    output still fails, as the null device is opened for reading only."""
    for number, flags in ((0, os.O_RDONLY), (_STDOUT, os.O_RDONLY), (_STDERR, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, flags)  # the lowest free number, which is this one
            os.set_inheritable(opened, True)


class _Descriptor(io.FileIO):
    """Writes to a descriptor, whose first failure it remembers."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "wb", closefd=False)
        self.failure: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        while True:
            try:
                written: int | None = super().write(data)
            except OSError as error:
                return self._failed(error, data)
            if written is not None:
                return written
            # Whoever shares the terminal may have set O_NONBLOCK.
            (writable := select.poll()).register(self.fileno(), select.POLLOUT)
            writable.poll()

    def _failed(self, error: OSError, _data: ReadableBuffer) -> int:
        self.failure = self.failure or error
        raise OutputError(str(error)) from None


class _Diagnostics(_Descriptor):
    """Standard error: there is nobody left to tell that it cannot be written."""

    def _failed(self, _error: OSError, data: ReadableBuffer) -> int:
        return memoryview(data).nbytes


def _text(raw: _Descriptor, like: IO[str] | None) -> io.TextIOWrapper:
    """A text stream with the encoding and buffering of the interpreter's own; None: it found the descriptor closed."""
    buffered = io.BufferedWriter(raw)
    if not isinstance(like, io.TextIOWrapper):
        return io.TextIOWrapper(buffered, encoding="utf-8", errors=_ERRORS, line_buffering=True)
    with contextlib.suppress(OSError, OutputError):
        like.flush()
    return io.TextIOWrapper(
        buffered, encoding=like.encoding, errors=_ERRORS, newline="\n",
        line_buffering=like.line_buffering, write_through=like.write_through,
    )  # fmt: skip
