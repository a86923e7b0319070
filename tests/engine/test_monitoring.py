"""The Grafana dashboard over a real vLLM: each panel has data in a real Prometheus, and no alert fires."""

from __future__ import annotations

from pathlib import Path

import pytest
from monitoring.grafana import expressions
from support.daemon_process import DaemonProcess, eventually
from support.engine_runs import READY_S, Configure, chat
from support.ports import free_port
from support.prometheus import running

pytestmark = [pytest.mark.engine, pytest.mark.release, pytest.mark.timeout(1800)]

# Of faults, and of what this configuration does not have.
ABSENT = (
    "ALERTS",
    "failures_total",
    "last_failure",
    "numa_launcher_key_",
    "overflow",
    "numa_launcher_cost_total",
)
# The annotation of a start holds for a minute, and a real engine takes longer to be ready: the series is asked for.
JUST_STARTED = " < 60"


def test_each_panel_has_data(configure: Configure, tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, configure(instances=1, max_model_len=512))
    folder = tmp_path / "prometheus"
    folder.mkdir()
    try:
        daemon.wait_ready(1, READY_S)
        assert chat(daemon.url, stream=True)
        with running(folder, f"127.0.0.1:{daemon.port}", free_port(), tls=False) as prometheus:
            eventually(lambda: prometheus.query("numa_launcher:first_token_seconds:p99_rate5m"), what="rules")
            assert chat(daemon.url, stream=True)
            shown = [
                each.removesuffix(JUST_STARTED)
                for each in expressions()
                if not any(part in each for part in ABSENT)
            ]
            assert len(shown) > 20

            def all_have_data() -> bool:
                print(empty := [each for each in shown if not prometheus.query(each)])
                return not empty

            eventually(all_have_data, what="data in each panel")
            assert prometheus.firing() == set()
    finally:
        daemon.end()
