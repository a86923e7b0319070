"""The one exception that reaches a person: `cannot X: why`, then one line with the remedy."""

from __future__ import annotations

import errno
import re
from typing import ClassVar, Final

# This process itself lacks descriptors or memory: what it wanted to ask or open says nothing of the other side.
OWN_SHORTAGE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})

# Errors of a path whose file system is not mounted (yet), does not answer, or has lost its server: they may pass.
AWAY: Final = frozenset({
    errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EIO, errno.EREMOTEIO, errno.ENOTCONN, errno.ECONNREFUSED,
    errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ESHUTDOWN,
    errno.ENODEV, errno.ENXIO, errno.EAGAIN, *OWN_SHORTAGE,
})  # fmt: skip

# What socket.create_server puts after the system's text, and asyncio before it: the address, which the message quotes.
_BINDING: Final = re.compile(
    r" \(while attempting to bind on address .*\)$|^error while attempting to bind on address \(.*?\): (?:\[errno \d+\] )?"
)


class LauncherError(Exception):
    """An error a person can act on.

    `message` reads "cannot X: why" with the value quoted; `remedy` is one line. The CLI prints both and exits with
    `exit_code`; the control socket answers with both."""

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[LauncherError], tuple[str, str]]:
        """Exceptions are pickled with their arguments as str() shows them: one, where __init__ takes two."""
        return type(self), (self.message, self.remedy)


def reason(error: OSError) -> str:
    """The system's error text in lower case, for use after a colon: "no such file or directory"."""
    text = error.strerror or str(error)
    text = _BINDING.sub("", text)
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


class NotFoundError(LauncherError):
    """What was named is not there. The control socket answers 404."""


class RefusedError(LauncherError):
    """It could be done, and must not be now. The control socket answers 409."""


class PassingError(LauncherError):
    """What is lacking may come by itself, such as a file system that is not mounted yet: the daemon looks again."""


class TimedOutError(LauncherError):
    """No answer in time: neither yes nor no, and asking again may help. A finding never exits with this code."""

    exit_code: ClassVar[int] = 3


def timed_out(program: str, within_s: float) -> TimedOutError:
    return TimedOutError(
        f"cannot wait longer for '{program}': no answer within {within_s:g} s",
        "try again when the machine is less busy; run it by hand to see whether it hangs",
    )


class BusyError(TimedOutError):
    """It took too long, or too many ask at once. The control socket answers 503."""
