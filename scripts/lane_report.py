"""The closing lines of scripts/test: flaky and skipped tests by name, then the totals."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

FLAKY_AT_MOST: Final = 3
# Reasons of skips that nobody here can do anything about. Any other skip is a test that proves nothing unnoticed.
ACCEPTED: Final = ("this machine",)
ACCEPTED_OF_USERS: Final = (*ACCEPTED, "only root")
AGAIN: Final = ".again.xml"


@dataclass(frozen=True)
class Outcome:
    """One test of one run, as pytest's JUnit file has it."""

    lane: str
    test: str
    failed: bool
    skipped: str | None
    """The reason; None: not skipped."""


def outcomes(file: Path) -> Iterator[Outcome]:
    """The tests of a JUnit file. A test that fails and whose teardown fails, too, has two entries there."""
    lane = file.name.split(".")[0]
    for case in ET.parse(file).getroot().iter("testcase"):  # noqa: S314  written by our own pytest
        skip = case.find("skipped")
        yield Outcome(
            lane=lane,
            test=f"{case.get('classname', '').replace('.', '/')}::{case.get('name', '')}",
            failed=case.find("failure") is not None or case.find("error") is not None,
            skipped=None if skip is None else skip.get("message") or "no reason given",
        )


@dataclass(frozen=True)
class Report:
    """The judgement over all lanes of a run."""

    passed: int
    failed: int
    flaky: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    """Test and reason."""
    unexplained: tuple[str, ...]
    """Skipped tests whose reason is not an accepted one."""

    @property
    def ok(self) -> bool:
        """Whether neither flaky nor skipped tests are a failure of the run."""
        return len(self.flaky) <= FLAKY_AT_MOST and not self.unexplained


def judge(folder: Path, accepted: Sequence[str] = ACCEPTED) -> Report:
    """Judge the JUnit files LANE.xml and, of the failed tests run again, LANE.again.xml."""
    files = sorted(folder.glob("*.xml"))
    first = {}
    for file in files:
        if not file.name.endswith(AGAIN):
            for one in outcomes(file):
                key = (one.lane, one.test)
                first[key] = one if key not in first or one.failed else first[key]
    again: dict[tuple[str, str], bool] = {}
    for file in files:
        if file.name.endswith(AGAIN):
            for one in outcomes(file):
                again[one.lane, one.test] = (
                    again.get((one.lane, one.test), True) and not one.failed and one.skipped is None
                )
    bad = [key for key, one in first.items() if one.failed]
    flaky = [key for key in bad if again.get(key, False)]
    skipped = [(f"{one.lane}: {one.test}", one.skipped) for one in first.values() if one.skipped is not None]
    return Report(
        passed=len(first) - len(bad) - len(skipped) + len(flaky),
        failed=len(bad) - len(flaky),
        flaky=tuple(f"{lane}: {test}" for lane, test in flaky),
        skipped=tuple(skipped),
        unexplained=tuple(test for test, why in skipped if not why.startswith(tuple(accepted))),
    )


def lines(report: Report) -> Iterator[str]:
    """The report as text; the totals are alone on the last line."""
    for test in report.flaky:
        yield f"flaky: {test}"
    if len(report.flaky) > FLAKY_AT_MOST:
        yield f"{len(report.flaky)} flaky tests are more than {FLAKY_AT_MOST}: the run has failed"
    for test, why in report.skipped:
        yield f"skipped: {test}: {why}"
    for test in report.unexplained:
        yield f"skipped without an accepted reason, which fails the run: {test}"
    if report.passed or report.failed or report.skipped:
        skips = f", {len(report.skipped)} skipped" if report.skipped else ""
        flaky = f", {len(report.flaky)} flaky" if report.flaky else ""
        yield f"{report.passed} passed, {report.failed} failed{skips}{flaky}"


def main(folder: str) -> int:
    """Print the report of the files in `folder`; 1 if too many are flaky or a skip is not accepted."""
    report = judge(Path(folder), ACCEPTED if os.geteuid() == 0 else ACCEPTED_OF_USERS)
    print("\n".join(lines(report)))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
