"""scripts/bench-ledger measures both proxies, and writes a month that can be asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support.daemon_process import SOON_S
from support.ports import free_port

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench.ours import put_in_place

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> str:
    done = subprocess.run(
        [ROOT / "scripts" / "bench-ledger", *arguments],
        env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.budget
def test_both_proxies_are_measured(tmp_path: Path) -> None:
    kept = tmp_path / "run.json"
    text = run("--rounds", "2", "--seconds", "0.5", "--rate", "300", "--no-pin", "--json", str(kept))
    assert "threads of the ledger" in text
    rows = json.loads(kept.read_text())
    assert sorted((row["round"], row["ledger"]) for row in rows) == [
        (1, "off"),
        (1, "on"),
        (2, "off"),
        (2, "on"),
    ]
    for row in rows:
        assert row["failures"] == 0
        assert row["requests"] > 10
        assert 1 < row["cpu_us"] < 100_000
    assert all(row["threads_us"] > 0 for row in rows if row["ledger"] == "on")


@pytest.mark.budget
def test_a_month_is_written_and_asked(tmp_path: Path) -> None:
    file = tmp_path / "month.db"
    text = run("month", str(file), "--requests", "4000")
    assert text.count("usage --since 30d --by key") == 3
    again = run("month", str(file), "--requests", "4000")
    assert "written" not in again


@pytest.mark.parametrize("entries", [True, False])
def test_the_proxy_to_compare_with_makes_no_entries(tmp_path: Path, entries: bool) -> None:
    """Its access log would have the line of a request that is refused: it is made of the request's record."""
    port, log = free_port(), tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "bench.ours", "--listen", f"127.0.0.1:{port}",
                *([] if entries else ["--no-entries"]), str(tmp_path / "no engine.sock"),
            ],
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}"}, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        assert refused(f"http://127.0.0.1:{port}/v1/chat/completions", process) == 404
    finally:
        process.terminate()
        process.wait(SOON_S)
    assert ("POST /v1/chat/completions 404" in log.read_text()) is entries


def refused(url: str, process: subprocess.Popen[bytes]) -> int:
    """The status of a request for a model that is not there."""
    body = b'{"model": "none", "messages": []}'
    until = time.monotonic() + SOON_S
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(url, body), timeout=SOON_S).close()
        except urllib.error.HTTPError as error:
            return error.code
        except urllib.error.URLError:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_method_that_has_another_name_now_is_not_put_in_place() -> None:
    with pytest.raises(AttributeError, match="entry_of"):
        put_in_place(Path, "entry_of", lambda *_: None)


def test_help() -> None:
    assert "usage: scripts/bench-ledger [requests]" in run("--help")
