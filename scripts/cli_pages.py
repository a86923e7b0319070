"""Writes the manual page and the shells' completions from the command line's parser: cli_pages.py FOLDER.

FOLDER/numa-launcher.1 and FOLDER/{numa-launcher.bash,_numa-launcher,numa-launcher.fish}. scripts/docs calls it;
scripts/install copies what is committed, so that a server needs neither shtab nor argparse-manpage.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import shtab
from argparse_manpage.manpage import Manpage

import launcher
from launcher.cli import build_parser

ROOT: Final = Path(__file__).resolve().parent.parent
# argparse wraps by it; man wraps itself.
os.environ["COLUMNS"] = "10000"

SHELLS: Final = {"bash": "numa-launcher.bash", "zsh": "_numa-launcher", "fish": "numa-launcher.fish"}
PAGE: Final = "numa-launcher.1"
# Changed by hand: a build date would make the page differ on each run.
DATE: Final = "2026-11-22"

_NUMBERS: Final = "numa-launcher status --slots 2>/dev/null"
# zsh expands what double quotes hold each time it loads the file, at every Tab, and it is there once for each verb.
# Escaped, it is expanded where a slot is completed.
_SLOTS: Final = {**shtab.cmd(_NUMBERS), "zsh": rf"(\$({_NUMBERS}))"}
# What completes an argument, by its name in help texts.
_BY_METAVAR: Final = {
    "SLOT": _SLOTS,
    "SLOT|REQUEST": _SLOTS,
    "FILE": shtab.FILE,
    "PATH": shtab.FILE,
    "DIR": shtab.DIRECTORY,
    "DIR|NAME": shtab.DIRECTORY,
}

SECTIONS: Final = {
    "exit status": r""".TP
.B 0
Done; a check found nothing.
.TP
.B 1
Negative result: no slot is ready, a check failed, a change was rolled back.
.TP
.B 2
The operator must change something: two lines on standard error give the reason and the remedy.
.TP
.B 3
No answer in time from the daemon or a program; the outcome is unknown. Repeating the command is safe.
.TP
.B 4
Standard output could not be written; one line on standard error gives the reason.
.TP
.B 130
Ended by Ctrl-C.
.TP
.B 141
The reader of the output, a pipe, has closed it.""",
    "environment": r""".TP
.B NUMA_LAUNCHER_CONFIG
The configuration file, unless \-c names one.
.TP
.B NUMA_LAUNCHER_SOCKET
The daemon's control socket, unless \-\-socket or \-c names one.
.TP
.B NUMA_LAUNCHER_\fISECTION\fB__\fIKEY\fR
Overrides a key of the configuration, for example NUMA_LAUNCHER_PROXY__LISTEN.
.TP
.B NO_COLOR
Set to anything: no colours.""",
    "files": r""".TP
.I /etc/numa-launcher/config.toml
The configuration.
.TP
.I /run/numa-launcher/control.sock
The control socket: HTTP and JSON.""",
    "see also": r""".BR numactl (8),
.BR systemctl (1),
.BR journalctl (1),
.BR numa (7)
.PP
Further pages are in the folder docs/ of the source.""",
}


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument, those of verbs too."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from actions(inner)


def completions() -> dict[str, str]:
    """File name -> script."""
    parser = build_parser()
    for action in actions(parser):
        completer = _BY_METAVAR.get(str(action.metavar or action.dest.upper()))
        if completer is not None and not action.choices:
            action.complete = completer  # type: ignore[attr-defined]
    return {name: shtab.complete(parser, shell) for shell, name in SHELLS.items()}


def manual() -> str:
    """The page, as man(7) has it."""
    parser = build_parser()
    parser.man_short_description = "one OpenAI endpoint over NUMA-pinned vLLM instances"  # type: ignore[attr-defined]
    page = Manpage(parser, format="single-commands-section")
    page.date = DATE
    page.source = f"numa-launcher {launcher.__version__}"
    page.manual = "numa-launcher"
    page.synopsis = ["numa-launcher", r"\fIVERB\fR", r"[\fIOPTION\fR...]"]
    for heading, text in SECTIONS.items():
        page.add_section(heading, "=", text)
    text = str(page)
    text = re.sub(r"^(usage: )(.*)$", r".PP\n\2\n.PP", text, flags=re.MULTILINE)
    # Empty lines are paragraphs, which stand between texts alone: anything else mandoc warns of.
    text = re.sub(r"\n(?:[ \t]*\n)+", "\n.PP\n", text)
    text = re.sub(r"(?:\.PP\n)+(?=\.(?:SH|SS|TP|PP)|\Z)", "", text)
    text = re.sub(r"(\.S[HS] [^\n]*\n)(?:\.PP\n)+", r"\1", text)
    # A verb's help is its description again; and a date is no word to be hyphenated.
    text = re.sub(r"(\.SS [^\n]*\n)[^\n]+\n\.PP\n", r"\1", text)
    return text.replace(DATE.replace("-", r"\-"), DATE, 1)


def main() -> None:
    folder = Path(sys.argv[1])
    for name, text in (*completions().items(), (PAGE, manual())):
        (folder / name).write_text(text.rstrip("\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
