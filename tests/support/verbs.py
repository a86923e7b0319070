"""Verbs of the command line in the tests' own process: an interpreter of their own takes a third of a second to start."""

from __future__ import annotations

import contextlib
import io
import subprocess

from launcher.cli import main


def run_verb(*words: str) -> subprocess.CompletedProcess[str]:
    """`numa-launcher WORDS`: its exit code and what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: object = main(words)
        except SystemExit as ended:  # of the parser
            code = ended.code
    assert isinstance(code, int), code
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
