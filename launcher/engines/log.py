"""How an engine's log is read: phases of its start, causes of its end, and lines that tell. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from launcher.engines.causes import DIED, PLAIN, Rule

NEVER: Final = re.compile(r"(?!)")
"""Matches nothing."""


class EngineLog(Struct, frozen=True, kw_only=True):
    """The words of one engine, as data; patterns are searched in single lines."""

    causes: tuple[Rule, ...] = PLAIN
    """In the order in which they are tried."""
    phases: tuple[tuple[str, str], ...] = ()
    """A text in a line, and the phase of the start that it announces."""
    compiled: str = ""
    """The phase in which everything is compiled; empty for an engine that compiles nothing."""
    start_failed: re.Pattern[str] = NEVER
    """After this line the engine ends, or hangs."""
    child_killed: re.Pattern[str] = re.compile(rf"{DIED}-9\b")
    """A process below the main one ended by SIGKILL: by the kernel's out-of-memory killer, or by a user."""
    child_died: re.Pattern[str] = NEVER
    """A process below the main one ended by itself; the engine may then end in good order, with exit code 0."""
    rank_died: re.Pattern[str] = NEVER
    """The process of a tensor-parallel rank ended first, with the groups `rank` and `code`: a number or "None"."""
    prefix: re.Pattern[str] = re.compile(r"(?P<process>)(?P<level>(?!))?")
    """The logger's beginning of a line, with the groups `process` and `level`."""
    about_others: re.Pattern[str] = NEVER
    """An exception about another one, which is logged above."""
    quoted: re.Pattern[str] = NEVER
    """A copy of another process's message, for a log whose beginning is lost."""
    fatal: re.Pattern[str] = NEVER
    """The first line about the failure that ended the process; what is above it may be old, of one client's request."""

    def phase_of(self, line: str) -> str | None:
        """The phase that a line announces, or None."""
        return next((phase for mark, phase in self.phases if mark in line), None)


PLAIN_LOG: Final = EngineLog()
"""The log of an engine that is not known."""


class Accelerator(Struct, frozen=True, kw_only=True):
    """A library that an engine computes with where it can, and how to see whether it does."""

    library: str
    """The beginning of its file's name."""
    on: tuple[str, ...]
    """Texts in lines that say that it is used."""
    off: tuple[str, ...]
    """Texts in lines that say that it is not."""

    def active(self, log_lines: Iterable[str], mapped: str) -> bool | None:
        """True or False when known, else None.

        `mapped` names the libraries that the instance's processes have mapped, or is the text of their /proc/PID/maps;
        it is conclusive. Of log lines, one that says no outweighs one that says yes."""
        if self.library in mapped:
            return True
        said_yes = False
        for line in log_lines:
            if any(text in line for text in self.off):
                return False
            said_yes = said_yes or any(text in line for text in self.on)
        if said_yes:
            return True
        return False if mapped else None
