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
# 400 s on two free cores, with all rows.
WITHIN_S = 1200
# Minutes more, for failures whose parts the other rows have. With them two hosts have real vLLM, otherwise all have
# stand-ins for it.
LONG = {"agent", "director", "head", "slow", "partition", "power", "ingress"}


@pytest.fixture(scope="module")
def table(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Each row of the selected tests by its name."""
    selected = [item.name for item in request.session.items]
    test = test_the_failure_costs_what_it_may_and_no_more.__name__
    names = [name for name in rows.ROWS if f"{test}[{name}]" in selected]
    folder = tmp_path_factory.mktemp("drill")
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    options = [
        "--rows",
        ",".join(names),
        "--json",
        str(folder / "table.json"),
        "--keep",
        str(folder / "logs"),
    ]
    if not set(names) >= LONG:
        options.append("--without-vllm")
    if not rows.OF_RAY & set(names):
        options.append("--without-ray")
    done = subprocess.run(
        [*as_root, str(DRILL), *options], check=False, capture_output=True, text=True, timeout=WITHIN_S
    )
    print(done.stdout, done.stderr)
    assert (folder / "table.json").exists(), done.stderr[-3000:]
    told: list[dict[str, Any]] = json.loads((folder / "table.json").read_text())
    return {row["name"]: row for row in told}


@pytest.mark.timeout(WITHIN_S + 30)
@pytest.mark.parametrize(
    "name",
    [
        "nothing fails",
        *(pytest.param(name, marks=pytest.mark.release if name in LONG else ()) for name in rows.ROWS),
    ],
)
def test_the_failure_costs_what_it_may_and_no_more(table: dict[str, dict[str, Any]], name: str) -> None:
    assert table[name]["broken"] == [], table[name]
    # Afterwards every request is whole again.
    after = table.get(f"after {name}", table["nothing fails"])
    assert after["broken"] == [], after


@pytest.mark.timeout(WITHIN_S + 30)
def test_what_is_planned_fails_no_request(table: dict[str, dict[str, Any]]) -> None:
    planned = [table[name] for name in rows.PLANNED if name in table]
    assert planned
    assert sum(row["failed"] + row["cut"] + row["told"] for row in planned) == 0


@pytest.mark.timeout(WITHIN_S + 30)
def test_no_answer_is_dishonest(table: dict[str, dict[str, Any]]) -> None:
    assert sum(row["dishonest"] for row in table.values()) == 0
    assert sum(row["whole"] for row in table.values()) > 300
    if table.keys() >= LONG:
        assert sum(row["real"] for row in table.values()) > 100
