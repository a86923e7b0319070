"""The one exception that reaches a person: `cannot X: why`, then one line with the remedy."""

from __future__ import annotations


class LauncherError(Exception):
    """An error a person can act on.

    `message` reads "cannot X: why" with the value quoted; `remedy` is one line.
    The CLI prints both and exits 2; the control socket answers with both.
    """

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


def reason(error: OSError) -> str:
    """What the system says, as it goes on after a colon: "no such file or directory"."""
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


class NotFoundError(LauncherError):
    """What was named is not there. The control socket answers 404."""


class RefusedError(LauncherError):
    """It could be done, and must not be now. The control socket answers 409."""


class BusyError(LauncherError):
    """It took too long, or too many ask at once. The control socket answers 503."""
