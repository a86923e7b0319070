"""The journal of a tuning run, torn and whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.base.errors import LauncherError
from launcher.measure.tune.journal import (
    Journal,
    RepeatEnded,
    RunBegan,
    VisitBegan,
    VisitEnded,
    VisitOverhead,
    newest,
)
from launcher.measure.tune.model import Measurement, Visit, VisitResult

BEGAN = RunBegan(id="run", at="2026-11-22T12:00:00+00:00", options={"seed": 1}, identity={"seed": "1"})


def visit(number: int) -> Visit:
    return Visit(number=number, candidate=0, purpose="race", repeats=2)


def repeat(number: int, rate: float = 10.0) -> RepeatEnded:
    return RepeatEnded(repeat=number, measure_s=1.0, measurement=Measurement(output_tokens_per_s=rate))


def ended(number: int) -> VisitEnded:
    result = VisitResult(
        visit=visit(number), started_at=BEGAN.at, start_s=1, measure_s=2,
        measurements=[Measurement(output_tokens_per_s=10.0)],
    )  # fmt: skip
    return VisitEnded(result=result)


def begin(folder: Path) -> Journal:
    return Journal.create(folder / "run", BEGAN)


def test_a_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    for record in (
        VisitBegan(visit=visit(1), at="t"),
        VisitOverhead(seconds=3.0),
        repeat(0),
        repeat(1),
        ended(1),
    ):
        journal.append(record)
    again = Journal.open(tmp_path / "run")
    assert again.began == BEGAN
    assert again.history == journal.history == [ended(1).result]
    assert again.unfinished is None


def test_every_cut_of_the_file_is_a_journal(tmp_path: Path) -> None:
    """SIGKILL and power loss leave any prefix: what is whole counts, and the next record follows it."""
    journal = begin(tmp_path)
    first = journal.path.stat().st_size
    for record in (
        VisitBegan(visit=visit(1), at="t"),
        repeat(0),
        ended(1),
        VisitBegan(visit=visit(2), at="t"),
    ):
        journal.append(record)
    whole = journal.path.read_bytes()
    for length in range(first, len(whole) + 1):
        journal.path.write_bytes(whole[:length])
        cut = Journal.open(tmp_path / "run")
        lines = whole[:length].count(b"\n")
        assert len(cut.history) == (lines >= 4)
        cut.append(repeat(1))
        again = Journal.open(tmp_path / "run")
        assert journal.path.read_bytes().count(b"\n") == lines + 1
        assert again.history == cut.history


def test_an_unfinished_visit_keeps_its_repeats_over_two_starts(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    for record in (ended(1), VisitBegan(visit=visit(2), at="first"), VisitOverhead(seconds=3.0), repeat(0)):
        journal.append(record)
    journal.append(VisitBegan(visit=visit(2), at="second"))
    journal.append(VisitOverhead(seconds=4.0))
    journal.append(repeat(1))
    found = Journal.open(tmp_path / "run").unfinished
    assert found is not None
    assert (found.began.at, found.overhead_s, [each.repeat for each in found.repeats]) == (
        "first",
        7.0,
        [0, 1],
    )


def test_another_visit_begins_without_the_repeats_of_the_last(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    for record in (VisitBegan(visit=visit(1), at="t"), repeat(0), VisitBegan(visit=visit(2), at="t")):
        journal.append(record)
    assert journal.unfinished is not None
    assert journal.unfinished.repeats == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "line 1"),
        ("{}\n", "line 1"),
        ('{"event":"run-resumed","at":"t"}\n', "it is not the beginning of a run"),
        ('{"event":"ru', "line 1"),
    ],
)
def test_what_is_no_journal_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal.jsonl").write_text(text)
    with pytest.raises(LauncherError, match=why):
        Journal.open(tmp_path / "run")


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    journal.append(ended(1))
    lines = journal.path.read_bytes().splitlines()
    journal.path.write_bytes(b"\n".join([lines[0], b"\0\0\0\0", lines[1], b""]))
    with pytest.raises(LauncherError, match="line 2 of"):
        Journal.open(tmp_path / "run")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(LauncherError, match="cannot write"):
        begin(tmp_path)
    with pytest.raises(LauncherError, match="cannot resume 'none'"):
        Journal.open(tmp_path / "none")


def test_the_newest_run_has_the_latest_name(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    for name in ("20261120-100000", "20261122-100000", "20261121-100000"):
        Journal.create(tmp_path / name, BEGAN)
    assert newest(tmp_path) == tmp_path / "20261122-100000"
