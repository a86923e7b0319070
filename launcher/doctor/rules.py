"""Compares the facts with what vLLM needs on a many-core machine: one rule per row. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from launcher.doctor.compatibility import Matrix
from launcher.doctor.facts import Facts
from launcher.doctor.report import Report, Row
from launcher.doctor.rules_host import HOST_RULES
from launcher.doctor.rules_software import SOFTWARE_RULES

Rule = Callable[[Facts, Matrix], Iterator[Row]]


def examine(facts: Facts, matrix: Matrix) -> Report:
    """All rows, in the order of RULES."""
    return Report(tuple(row for rule in RULES for row in rule(facts, matrix)))


RULES: Final[tuple[Rule, ...]] = (*HOST_RULES, *SOFTWARE_RULES)
