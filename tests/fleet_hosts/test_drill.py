"""The failure table of docs/fleet.md, played by scripts/fleet-drill: one test for each row."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fleet_hosts import rows

DRILL = Path(__file__).resolve().parents[2] / "scripts" / "fleet-drill"
# 400 s on two free cores.
WITHIN_S = 1200


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Each row by its name."""
    folder = tmp_path_factory.mktemp("drill")
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    done = subprocess.run(
        [*as_root, str(DRILL), "--json", str(folder / "table.json"), "--keep", str(folder / "logs")],
        check=False, capture_output=True, text=True, timeout=WITHIN_S,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    assert (folder / "table.json").exists(), done.stderr[-3000:]
    told: list[dict[str, Any]] = json.loads((folder / "table.json").read_text())
    return {row["name"]: row for row in told}


@pytest.mark.timeout(WITHIN_S + 30)
@pytest.mark.parametrize("name", ["nothing fails", *rows.ROWS])
def test_the_failure_costs_what_it_may_and_no_more(table: dict[str, dict[str, Any]], name: str) -> None:
    assert table[name]["broken"] == [], table[name]
    # Afterwards every request is whole again.
    after = table.get(f"after {name}", table["nothing fails"])
    assert after["broken"] == [], after


def test_what_is_planned_fails_no_request(table: dict[str, dict[str, Any]]) -> None:
    planned = [table[name] for name in rows.PLANNED if name in rows.ROWS]
    assert planned
    assert sum(row["failed"] + row["cut"] + row["told"] for row in planned) == 0


def test_no_answer_is_dishonest(table: dict[str, dict[str, Any]]) -> None:
    assert sum(row["dishonest"] for row in table.values()) == 0
    assert sum(row["whole"] for row in table.values()) > 500
    assert sum(row["real"] for row in table.values()) > 100
