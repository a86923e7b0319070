"""scripts/bench-proxy measures what it says, and writes its tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "bench-proxy"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_one_point(tmp_path: Path) -> None:
    kept = tmp_path / "run.json"
    done = run("--quick", "--only", "ours", "--points", "requests", "--no-pin", "--json", str(kept))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CPU µs per request" in done.stdout
    [row] = json.loads(kept.read_text())["rows"]
    assert (row["proxy"], row["failures"]) == ("ours", 0)
    assert row["units"] > 0
    assert row["cpu_us"] > 0

    # The same row again, as a table.
    again = run("--report", str(kept))
    assert again.returncode == 0
    assert again.stdout == done.stdout


@pytest.mark.budget
def test_quick(tmp_path: Path) -> None:
    kept = tmp_path / "run.json"
    done = run("--quick", "--only", "direct,ours", "--no-pin", "--json", str(kept))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CPU µs per event" in done.stdout
    assert "CPU µs per request" in done.stdout
    rows = {(row["proxy"], row["point"]): row for row in json.loads(kept.read_text())["rows"]}
    assert len(rows) == 6
    for row in rows.values():
        assert row["failures"] == 0
        assert row["units"] > 50
        assert 0 < row["ttft_p50_s"] <= row["ttft_p99_s"]
    ours = rows["ours", "32 streams"]
    assert 0.0 < ours["gap_p50_s"] < 0.5
    assert 1 < ours["cpu_us"] < 20_000
    assert 10e6 < ours["rss_bytes"] < 500e6
    assert rows["direct", "32 streams"]["cpu_us"] is None

    # The same rows again, as tables.
    again = run("--report", str(kept))
    assert again.returncode == 0
    assert again.stdout == done.stdout


@pytest.mark.budget
def test_the_ingress_of_a_fleet(tmp_path: Path) -> None:
    """HAProxy with its picker; apart from it, the picker ends with it."""
    kept = tmp_path / "run.json"
    only = ("--only", "fleet,fleet-haproxy", "--points", "requests")
    done = run("--quick", *only, "--no-pin", "--json", str(kept))
    rows = json.loads(kept.read_text())["rows"]
    assert [row["failures"] for row in rows] == [0, 0], done.stderr
    assert all(1 < row["cpu_us"] < 20_000 for row in rows)


@pytest.mark.budget
def test_another_version_beside_it(tmp_path: Path) -> None:
    kept = tmp_path / "run.json"
    arguments = ("--quick", "--only", "ours", "--points", "requests", "--no-pin", "--json", str(kept))
    done = run(*arguments, "--before", str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "÷ before" in done.stdout
    assert {row["proxy"] for row in json.loads(kept.read_text())["rows"]} == {"ours", "before"}


@pytest.mark.budget
def test_bursts_without_late_binding(tmp_path: Path) -> None:
    kept = tmp_path / "run.json"
    done = run(
        *("--quick", "--only", "ours,ours-early", "--points", "bursts", "--no-pin"), "--json", str(kept)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(kept.read_text())["rows"]
    assert {(row["proxy"], row["point"]) for row in rows} == {
        ("ours", "burst of 32 streams"),
        ("ours-early", "burst of 32 streams"),
    }
    assert [row["failures"] for row in rows] == [0, 0]


def test_another_version_that_is_not_there(tmp_path: Path) -> None:
    done = run("--quick", "--before", str(tmp_path))
    assert done.returncode != 0
    assert f"cannot measure '{tmp_path}': it is no checkout of this project" in done.stderr


def test_a_name_that_is_not_there() -> None:
    done = run("--only", "apache")
    assert done.returncode != 0
    assert "cannot measure 'apache'" in done.stderr


def test_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "bench"]:
        monkeypatch.delitem(sys.modules, name)  # tests/bench has the same name
    from bench import pages  # noqa: PLC0415  on the path only here

    common = {
        "seconds": 1.0,
        "failures": 0,
        "failure": "",
        "rss_bytes": 50e6,
        "gap_p50_s": 0.025,
        "gap_p99_s": 0.03,
    }
    rows = [
        {"proxy": proxy, "round": number, "point": "256 streams", "units": 9, "cpu_us": cpu and cpu * number}
        | common
        | {"ttft_p50_s": 0.001 * (cpu or 1.0), "ttft_p99_s": 0.004}
        for number in (1, 2, 3)
        for proxy, cpu in (("direct", None), ("nginx", 6.0), ("ours", 9.0))
    ]
    (tmp_path / "performance.md").write_text(f"# before\n\n{pages.BEGIN}\nold\n{pages.END}\n\nafter\n")
    result = {"rows": rows, "machine": "a machine", "pinned": True, "versions": {"nginx": "1.22.1"}}
    pages.write(result, tmp_path)
    page = (tmp_path / "performance.md").read_text()
    assert page.startswith("# before\n")
    assert page.endswith("\n\nafter\n")
    assert "old" not in page
    assert "1.50" in page  # ours / nginx, in each round
    assert "18.00 (9.00–27.00)" in page
    picture = (tmp_path / pages.PICTURE).read_text()
    assert picture.count("<rect") == 2
    pages.write(result, tmp_path)
    assert (tmp_path / "performance.md").read_text() == page
