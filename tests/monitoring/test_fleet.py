"""The Prometheus example for a fleet, with the list that `fleet targets` prints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import yaml
from support.prometheus import MONITORING, promtool

from launcher.cli.fleet_operations import targets


def test_promtool_takes_configuration_and_list(tmp_path: Path) -> None:
    folder = tmp_path / "monitoring"
    shutil.copytree(MONITORING, folder)
    found = targets({"h1": "10.0.0.1:8000", "h2": "10.0.0.2:8000"}, "fleet", tls=True)
    (folder / "fleet-hosts.json").write_text(json.dumps(found))
    promtool("check", "config", str(folder / "prometheus-fleet.yml"))


def test_the_job_is_the_one_that_alerts_select() -> None:
    one = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    fleet = yaml.safe_load((MONITORING / "prometheus-fleet.yml").read_text())
    for name in ("job_name", "scrape_timeout"):
        assert fleet["scrape_configs"][0][name] == one["scrape_configs"][0][name]
    assert fleet["rule_files"] == one["rule_files"]
