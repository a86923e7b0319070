"""What a person is told: remedies in one style, the system's words as the rest of the line."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.source_tree import parsed

from launcher.base.errors import reason

ROOT = Path(__file__).resolve().parents[2] / "launcher"

# Where the remedy is among the arguments.
PLACES = {
    "Finding": 3,
    "violation": 2,
    "warning": 2,
    "Cause": 2,
    "Rule": 3,
    "CutError": 1,
    "HttpError": 9,  # its text is what a client reads: no remedy
    "_rule": 3,
    "_warn": 2,
    "_fail": 2,
}


def literals(node: ast.expr) -> Iterator[tuple[str, str]]:
    """How each text that an expression may be begins and ends; "" where it is a value."""
    match node:
        case ast.Constant(value=str(text)):
            yield text, text
        case ast.JoinedStr(values=values):
            ends = [part.value if isinstance(part, ast.Constant) else "" for part in (values[0], values[-1])]
            yield str(ends[0]), str(ends[1])
        case ast.IfExp(body=one, orelse=other):
            yield from (*literals(one), *literals(other))


def remedies(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            place = PLACES.get(name, 1 if name.endswith("Error") else 9)
            found = node.args[place : place + 1]
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = any(isinstance(its, ast.Name) and its.id.lower().endswith("remedy") for its in targets)
            found = [node.value] if named else []
        else:
            continue
        yield from ((node.lineno, *ends) for argument in found for ends in literals(argument))


def test_remedies_go_on_in_lower_case_and_without_a_stop() -> None:
    found = [(file, *its) for file in sorted(ROOT.rglob("*.py")) for its in remedies(parsed(file))]
    assert len(found) > 150
    odd = [
        f"{file.relative_to(ROOT)}:{line}: {begin} ... {end}"
        for file, line, begin, end in found
        if re.match(r"[A-Z][a-z]", begin) or end.endswith(".")
    ]
    assert odd == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, os.strerror(2), "/etc/x"), "no such file or directory"),
        (OSError("no words of the system"), "no words of the system"),
        # socket.create_server, asyncio, and asyncio of Python 3.13.
        (
            OSError(98, "Address already in use (while attempting to bind on address ('::1', 80, 0, 0))"),
            "address already in use",
        ),
        (
            OSError(
                98, "error while attempting to bind on address ('127.0.0.1', 80): address already in use"
            ),
            "address already in use",
        ),
        (
            OSError(
                98,
                "error while attempting to bind on address ('127.0.0.1', 80): [errno 98] address already in use",
            ),
            "address already in use",
        ),
        (OSError(1, "PEM lib"), "PEM lib"),
        (OSError(), ""),
    ],
)
def test_the_systems_words(error: OSError, said: str) -> None:
    assert reason(error) == said
