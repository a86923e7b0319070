"""Prometheus and promtool for tests: on PATH, or unpacked by scripts/test (fetch_prometheus in scripts/lib.sh)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.tools import TOOLS

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "configs" / "monitoring"


def program(name: str) -> str:
    """Path of `prometheus` or `promtool`; fails the test where it is missing."""
    folder = os.environ.get("NUMA_LAUNCHER_TEST_PROMETHEUS") or TOOLS / "prometheus"
    found = shutil.which(name) or shutil.which(name, path=str(Path(folder) / "usr/bin"))
    if found is None:
        pytest.fail(f"cannot find {name}: run scripts/test unit, which fetches it")
    return found


def promtool(*arguments: str, text: str | None = None, cwd: Path = MONITORING) -> str:
    """Run promtool; its output. A failure of it fails the test."""
    done = subprocess.run(
        [program("promtool"), *arguments],
        input=text,
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@dataclass(frozen=True)
class Prometheus:
    """A running one."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query; none before it listens."""
        query = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query?{query}", timeout=30) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return found
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from None
        except OSError:
            return []

    def firing(self) -> set[str]:
        return {found["metric"]["alertname"] for found in self.query('ALERTS{alertstate="firing"}')}


@contextlib.contextmanager
def running(folder: Path, target: str, port: int, *, tls: bool = True) -> Iterator[Prometheus]:
    """Prometheus with the shipped configuration on a port of loopback. Only target, times and, without `tls`, what
    docs/monitoring.md says to remove differ. `folder` has ca.pem and key."""
    config = (MONITORING / "prometheus.yml").read_text(encoding="utf-8")
    config = re.sub(r"(interval: )15s", r"\g<1>1s", config).replace(
        "scrape_timeout: 10s", "scrape_timeout: 1s"
    )
    if not tls:
        config = re.sub(r"    (tls_config|authorization):\n      .*\n", "", config)
        config = config.replace("scheme: https", "scheme: http")
    (folder / "prometheus.yml").write_text(config.replace("llm.example.org:8000", target))
    (folder / "rules.yml").write_text((MONITORING / "rules.yml").read_text(encoding="utf-8"))
    alerts = (MONITORING / "alerts.yml").read_text(encoding="utf-8")
    (folder / "alerts.yml").write_text(re.sub(r"\bfor: \d+m", "for: 1s", alerts))
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml", cwd=folder)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [program("prometheus"), "--config.file=prometheus.yml", "--storage.tsdb.path=data",
             f"--web.listen-address=127.0.0.1:{port}", "--scrape.discovery-reload-interval=500ms"],
            cwd=folder, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(30)
