"""`tune --measure COMMAND`: a command measures each candidate. No engine is started."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from launcher.base.errors import LauncherError, reason
from launcher.base.processes import dies_with_parent
from launcher.measure.tune.model import Candidate, Measurement, MeasurementFailedError, Visit

# Of the command's standard error, in a cause.
_SHOWN_CHARACTERS: Final = 300


def parse_command(text: str) -> list[str]:
    """The words of a command, as a shell splits them; no shell runs it. Raises LauncherError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise LauncherError(f"cannot use --measure {text!r}: {error}", "close the quotation") from None
    if not words:
        raise LauncherError(
            "cannot use --measure '': it is empty", "give a command that prints the measurement"
        )
    if shutil.which(words[0]) is None:
        raise LauncherError(
            f"cannot run --measure {text!r}: no command {words[0]!r}",
            "give an executable file, or a command in PATH",
        )
    return words


class CommandVisits:
    """Gives each candidate to the command, once per repeat: the plan's JSON on standard input, with "candidate" added.

    It prints one JSON object with the fields of Measurement."""

    def __init__(self, command: Sequence[str], *, limit_s: float) -> None:
        """`limit_s`: the longest that one call may take."""
        self._command = list(command)
        self._limit_s = limit_s

    @contextlib.contextmanager
    def start(self, candidate: Candidate, visit: Visit) -> Iterator[CommandSession]:
        yield CommandSession(self._command, candidate, visit, self._limit_s)


class CommandSession:
    def __init__(self, command: list[str], candidate: Candidate, visit: Visit, limit_s: float) -> None:
        self._command = command
        self._candidate = candidate
        self._visit = visit
        self._limit_s = limit_s

    def measure(self, repeat: int, seed: int) -> Measurement:
        output = self._run(json.dumps(self._input(repeat, seed)))
        try:
            return msgspec.json.decode(output, type=Measurement)
        except msgspec.DecodeError as error:
            said = output.strip().splitlines()[-1:] or [""]
            raise MeasurementFailedError(
                f"{self._command[0]}: {error}; its standard output ends with '{said[0][:_SHOWN_CHARACTERS]}'"
            ) from None

    def answers(self) -> list[str]:
        return []

    def _input(self, repeat: int, seed: int) -> dict[str, Any]:
        candidate = {
            "layout": msgspec.to_builtins(self._candidate.layout), "label": self._candidate.label,
            "visit": self._visit.number, "purpose": self._visit.purpose, "repeat": repeat, "seed": seed,
        }  # fmt: skip
        return {**self._candidate.plan, "candidate": candidate}

    def _run(self, given: str) -> str:
        try:
            process = subprocess.Popen(  # a session of its own: its children are killed with it
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                start_new_session=True, preexec_fn=dies_with_parent(),  # noqa: PLW1509  prctl only
            )  # fmt: skip
        except OSError as error:
            raise LauncherError(
                f"cannot run --measure '{shlex.join(self._command)}': {reason(error)}",
                "give an executable file, or a command in PATH",
            ) from None
        with process:
            try:
                output, errors = process.communicate(given, self._limit_s)
            except BaseException as error:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise MeasurementFailedError(
                        f"{self._command[0]}: not ended within {self._limit_s:g} s"
                    ) from None
                raise
        if process.returncode != 0:
            raise MeasurementFailedError(_how_it_ended(self._command[0], process.returncode, errors))
        return output


def _how_it_ended(name: str, code: int, errors: str) -> str:
    how = f"exit code {code}" if code > 0 else f"signal {-code}"
    said = errors.strip().splitlines()[-1:]
    return f"{name}: {how}: {said[0][:_SHOWN_CHARACTERS]}" if said else f"{name}: {how}"
