"""The script that shows that the gate sees faults: its faults are lines that there are, and it sees one."""

from __future__ import annotations

from support.planted_faults import FAULTS, copied, first_failure, plant

TESTS = "tests/base/test_writer.py"


def test_faults_are_planted_and_one_is_seen() -> None:
    with copied() as tree:
        assert first_failure(tree, (TESTS,)) is None
        for fault in FAULTS:
            plant(tree, fault)
        assert str(first_failure(tree, (TESTS,))).startswith(f"FAILED {TESTS}::")
