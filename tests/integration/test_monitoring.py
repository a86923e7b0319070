"""A real Prometheus with configs/monitoring scrapes a real daemon: silent in health, and alerts by real faults."""

from __future__ import annotations

import json
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from monitoring.grafana import expressions
from support.cloud import make_certificate
from support.daemon_process import DaemonProcess, eventually
from support.ports import free_port
from support.prometheus import Prometheus, promtool, running
from support.verbs import run_verb

pytestmark = pytest.mark.timeout(300)

Start = Callable[..., DaemonProcess]
MORE = """
[supervision]
backoff_initial_s = 0.1
backoff_max_s = 0.1
probe_interval_s = 0.2
probe_timeout_s = 1
verify_interval_s = 1
stall_timeout_s = 1.5
canary_interval_s = 0.5
crash_limit = 3
[cost]
hourly = 1.0
# Its cap is less than a request may cost: none is sent.
[[proxy.overflow]]
name = "cloud"
url = "http://127.0.0.1:9/v1"
models = { fake = "big" }
input = 1.0
output = 4.0
max_per_day = 0.000001
max_output_tokens = 100
"""
OF_FAULTS = re.compile(r"^ALERTS|numa_launcher_(failures|slot_last_failure)")
PAGES = Path(__file__).parents[1] / "telemetry" / "vllm-0.32.0.metrics.txt"


@dataclass
class Endpoint:
    """The daemon's endpoint with TLS and an API key."""

    daemon: DaemonProcess
    context: ssl.SSLContext
    key: str

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(f"https://localhost:{self.daemon.port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60, context=self.context) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def complete(self, tokens: int, *, stream: bool = True) -> int:
        messages = [{"role": "user", "content": "how?"}]
        body = {"model": "fake", "messages": messages, "max_tokens": tokens, "stream": stream}
        return self.ask("/v1/chat/completions", body)[0]


@pytest.fixture
def endpoint(start: Start, tmp_path: Path) -> Endpoint:
    certificate = make_certificate(tmp_path, days=90)
    keys = tmp_path / "api-keys"
    made = run_verb("key", "add", "ann", "--file", str(keys))
    assert made.returncode == 0, made.stderr
    proxy = {
        "TLS_CERTIFICATE": str(certificate.path),
        "TLS_KEY": str(certificate.key),
        "API_KEYS_FILE": str(keys),
        "QUEUE_MAX_REQUESTS": "2",
    }
    environ = {f"NUMA_LAUNCHER_PROXY__{name}": value for name, value in proxy.items()}
    environ["NUMA_LAUNCHER_AUDIT__PATH"] = str(tmp_path / "audit")
    daemon = start(
        "--token-s", "0.01", "--metrics", str(PAGES), more=MORE, environ=environ, max_num_seqs=2
    )  # fmt: skip
    [key] = re.findall(r"\S{20,}", made.stdout)
    return Endpoint(daemon, ssl.create_default_context(cafile=certificate.path), key)


@pytest.fixture
def prometheus(endpoint: Endpoint, tmp_path: Path) -> Iterator[Prometheus]:
    """With the shipped configuration: only target, files and times differ."""
    folder = tmp_path / "prometheus"
    folder.mkdir()
    (folder / "ca.pem").symlink_to(tmp_path / "cloud.pem")
    (folder / "key").write_text(endpoint.key)
    with running(folder, f"localhost:{endpoint.daemon.port}", free_port()) as found:
        yield found


@pytest.mark.long
def test_silent_in_health_and_alerts_by_faults(
    endpoint: Endpoint, prometheus: Prometheus, tmp_path: Path
) -> None:
    daemon = endpoint.daemon
    daemon.wait_ready(2)  # Prometheus starts meanwhile
    assert [endpoint.complete(5) for _ in range(4)] == [200] * 4
    page = endpoint.ask("/metrics")[1]
    own = page[: page.index("# HELP vllm:")]
    assert promtool("check", "metrics", text=own) == ""
    folders = re.findall(r'^numa_launcher_disk_free_bytes{folder="(\w+)"}', own, flags=re.MULTILINE)
    assert sorted(folders) == ["audit", "usage"]
    eventually(
        lambda: prometheus.query("numa_launcher:requests_failed:ratio_rate5m"), what="rules over a scrape"
    )
    assert endpoint.complete(5, stream=False) == 200
    eventually(lambda: not prometheus.query("ALERTS"), what="the alerts of the start end")
    time.sleep(2)  # two evaluations
    # On a machine whose CPUs others use, a scrape may take a second: the endpoint counts as down then.
    assert prometheus.query('ALERTS{alertname!="NumaLauncherDown"}') == []
    grafana_has_data(prometheus)

    with ThreadPoolExecutor(10) as pool:  # 4 run, 2 wait
        # 3 s each: on a busy machine ten TLS handshakes may take one.
        statuses = [each.result() for each in [pool.submit(endpoint.complete, 300) for _ in range(10)]]
    assert 429 in statuses
    make_certificate(tmp_path, days=1)
    os.sched_setaffinity(daemon.slot(0)["pid"], range(os.cpu_count() or 1))
    for generation in range(1, 4):
        slot = eventually(
            lambda of=generation: (s := daemon.slot(1))["generation"] == of and s["state"] == "ready" and s
        )
        daemon.post(slot["slot"], "/fault", {"kind": "exit 3"})
    wanted = named("QueueFull", "CrashLoop", "Degraded", "CertificateEndsSoon", "CertificateEnds")
    eventually(lambda: wanted | named("ThreadsMisplaced") <= prometheus.firing(), what=f"{wanted}")
    daemon.post(0, "/fault", {"kind": "hang"})
    wanted |= named("Hung")
    eventually(lambda: wanted <= prometheus.firing(), what=f"{wanted}")
    # For a moment there may be no ready instance.
    assert prometheus.firing() <= wanted | named("Down", "NoInstance", "ThreadsMisplaced")
    have_data(prometheus, [each for each in expressions() if OF_FAULTS.search(each)])

    daemon.process.terminate()
    eventually(lambda: "NumaLauncherDown" in prometheus.firing(), what="down")


def named(*alerts: str) -> set[str]:
    return {f"NumaLauncher{alert}" for alert in alerts}


def grafana_has_data(prometheus: Prometheus) -> None:
    """Each expression of the Grafana dashboard is understood, and has data unless it shows faults."""
    wanted = [each for each in expressions() if not OF_FAULTS.search(each)]
    for other in set(expressions()) - set(wanted):
        prometheus.query(other)
    have_data(prometheus, wanted)


def have_data(prometheus: Prometheus, wanted: Sequence[str]) -> None:
    """A scrape that fails leaves all series without data until the next one."""
    eventually(lambda: all(map(prometheus.query, wanted)), what=f"data of each of {wanted}")
