"""The alerting rules: each fires by its fault alone, and all are silent on the page of a healthy daemon."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from monitoring.grafana import known, metrics_in
from prometheus_client.parser import text_string_to_metric_families
from support.prometheus import MONITORING, ROOT, promtool
from support.source_tree import anchors

from launcher.cli import VERBS

HEALTHY = (
    Path(__file__).parent / "healthy.metrics.txt"
)  # /metrics of a daemon in tests/integration/test_monitoring.py
SLOT = '{model="fake",slot="1"}'
HOURS = 7


@dataclass(frozen=True)
class Fault:
    """Series that replace those of the healthy page; `a+bxn` rises n times by b, once a minute (promtool's notation)."""

    series: dict[str, str]
    at: str = "30m"
    also: dict[str, int] = field(default_factory=dict)  # other alerts that the fault fires, and how many
    count: int = 1


def histogram(late: str) -> dict[str, str]:
    """Streams of which a share is late; 10 a minute."""
    name = "numa_launcher_first_token_seconds"
    return {
        f'{name}_bucket{{le="2.0",model="fake"}}': late,
        f'{name}_bucket{{le="+Inf",model="fake"}}': "0+10x420",
        f'{name}_count{{model="fake"}}': "0+10x420",
    }


def state(slot: int, name: str) -> dict[str, str]:
    others = {"ready", "starting", "failed"} - {name}
    return {
        f'numa_launcher_slot_state{{model="fake",slot="{slot}",state="{other}"}}': "0x420" for other in others
    } | {f'numa_launcher_slot_state{{model="fake",slot="{slot}",state="{name}"}}': "1x420"}


FAULTS = {
    "NumaLauncherDown": Fault({"up": "0x420"}),
    "NumaLauncherNoInstance": Fault({'numa_launcher_ready_instances{model="fake"}': "0x420"}),
    "NumaLauncherDegraded": Fault(state(1, "starting")),
    "NumaLauncherCrashLoop": Fault({f"numa_launcher_slot_failures_total{SLOT}": "0x25 1 2 3 4x420"}, at="32m"),
    "NumaLauncherHung": Fault({
        'numa_launcher_slot_last_failure_timestamp_seconds{cause="hung",model="fake",slot="1"}': "1750x420"
    }),
    "NumaLauncherNotWatched": Fault({f"numa_launcher_slot_watched{SLOT}": "0x420"}),
    "NumaLauncherRequestsFail": Fault({'numa_launcher_requests_ended_total{outcome="failed"}': "0+5x420"}),
    "NumaLauncherMemoryOffNode": Fault({f"numa_launcher_slot_memory_on_node_ratio{SLOT}": "0.7x420"}),
    "NumaLauncherThreadsMisplaced": Fault({f"numa_launcher_slot_misplaced_threads{SLOT}": "3x420"}),
    "NumaLauncherZenTorchLost": Fault({f"numa_launcher_slot_zentorch_active{SLOT}": "1x10 0x410"}),
    "NumaLauncherMachineChanged": Fault({"numa_launcher_machine_differences": "2x420"}),
    "NumaLauncherQueueFull": Fault({'numa_launcher_queue_rejected_total{reason="requests"}': "0x28 1x400"}),
    "NumaLauncherFirstTokenBurnFast": Fault(
        histogram("0+8x420"), at="2h", also={"NumaLauncherFirstTokenBurnSlow": 1}
    ),
    "NumaLauncherFirstTokenBurnSlow": Fault(histogram("0+9x420"), at="6h30m"),
    "NumaLauncherOverflowNearCap": Fault({
        'numa_launcher_overflow_max_per_day{endpoint="cloud"}': "20x420",
        'numa_launcher_overflow_spent_today{endpoint="cloud"}': "18x420",
        'numa_launcher_overflow_reserved{endpoint="cloud"}': "0.5x420",
    }),
    "NumaLauncherCertificateEndsSoon": Fault({
        "numa_launcher_tls_certificate_not_after_timestamp_seconds": f"{13 * 86400}x420"
    }),
    "NumaLauncherCertificateEnds": Fault(
        {"numa_launcher_tls_certificate_not_after_timestamp_seconds": f"{86400}x420"},
        also={"NumaLauncherCertificateEndsSoon": 1},
    ),
    "NumaLauncherFileUnusable": Fault({'numa_launcher_file_usable{file="TLS certificate"}': "0x420"}),
    "NumaLauncherDiskFull": Fault(
        {'numa_launcher_disk_free_bytes{folder="usage"}': "1000000000x420"},
    ),
    "NumaLauncherLedgerNotWritten": Fault({"numa_launcher_usage_ledger_ok": "0x420"}),
    "NumaLauncherAuditNotWritten": Fault({"numa_launcher_audit_ok": "0x420"}),
}  # fmt: skip
VARIANTS = {
    "a slot that has failed for good": ("NumaLauncherCrashLoop", Fault(
        state(1, "failed"), also={"NumaLauncherDegraded": 1})),
    "a request that waited too long": ("NumaLauncherQueueFull", Fault(
        {'numa_launcher_queue_rejected_total{reason="deadline"}': "0x28 1x400"})),
    "ZenTorch installed and never used": ("NumaLauncherZenTorchLost", Fault({
        f"numa_launcher_slot_zentorch_active{SLOT}": "0x420",
        'numa_launcher_build_info{build="python",torch="2.13",version="1",vllm="0.32",zentorch="5.2"}': "1x420"})),
    "audit entries lost": ("NumaLauncherAuditNotWritten", Fault({"numa_launcher_audit_lost_total": "0x28 2x400"})),
}  # fmt: skip


def expressions() -> Iterator[str]:
    """Of all rules."""
    for name in ("rules.yml", "alerts.yml"):
        for group in yaml.safe_load((MONITORING / name).read_text(encoding="utf-8"))["groups"]:
            yield from (rule["expr"] for rule in group["rules"])


READ = frozenset[str]().union(*map(metrics_in, expressions()))


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def healthy() -> dict[str, str]:
    """What the rules read of the recorded page, as series of seven hours: what has been counted rises on."""
    series = {"up": "1x420", **histogram("0+10x420")}
    for family in text_string_to_metric_families(HEALTHY.read_text(encoding="utf-8")):
        for sample in family.samples:
            if sample.name not in READ:
                continue
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            rises = family.type in {"counter", "histogram"} and sample.value > 0
            step = f"+{sample.value}" if rises else ""
            value = 90 * 86400.0 if "not_after" in sample.name else sample.value
            series.setdefault(name, f"{value:f}{step}x{HOURS * 60}")
    return series


Case = tuple[str, Fault, dict[str, int]]
"""Instance, its fault, and how many of which alerts it fires."""


def groups(cases: list[Case]) -> list[dict[str, Any]]:
    """One test of promtool's for each time at which faults are looked at: each costs it as much as many daemons."""
    times = sorted({fault.at for _, fault, _ in cases})
    return [group(at, [case for case in cases if case[1].at == at]) for at in times]


def group(at: str, cases: list[Case]) -> dict[str, Any]:
    return {
        "name": at,
        "interval": "1m",
        "input_series": [
            {"series": _with(each, f'instance="{name}",job="numa-launcher"'), "values": values}
            for name, fault, _ in cases
            for each, values in (healthy() | fault.series).items()
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname, instance) (ALERTS{alertstate="firing"})',
                "eval_time": at,
                "exp_samples": [
                    {"labels": f'{{alertname="{alert}",instance="{name}"}}', "value": count}
                    for name, _, firing in cases
                    for alert, count in firing.items()
                ],
            }
        ],
    }


def _with(series: str, labels: str) -> str:
    name, brace, rest = series.partition("{")
    return f"{name}{{{labels},{rest}" if brace else f"{name}{{{labels}}}"


def run(folder: Path, tests: list[dict[str, Any]]) -> None:
    files = [str(MONITORING / name) for name in ("rules.yml", "alerts.yml")]
    (folder / "test.yml").write_text(
        json.dumps({"rule_files": files, "evaluation_interval": "1m", "tests": tests})
    )
    promtool("test", "rules", "test.yml", cwd=folder)


def test_every_alert_has_a_fault() -> None:
    assert [rule["alert"] for rule in rules()] == list(FAULTS)


def test_health_is_silent(tmp_path: Path) -> None:
    run(tmp_path, groups([(at, Fault({}, at=at), {}) for at in ("30m", "6h30m")]))


def test_each_alert_fires_by_its_fault_alone(tmp_path: Path) -> None:
    cases = [(alert, alert, fault) for alert, fault in FAULTS.items()]
    cases += [(name, alert, fault) for name, (alert, fault) in VARIANTS.items()]
    run(tmp_path, groups([(name, fault, {alert: fault.count, **fault.also}) for name, alert, fault in cases]))


def test_a_rule_test_can_fail(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="FAILED"):
        run(tmp_path, groups([("x", FAULTS["NumaLauncherDown"], {})]))


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_each_alert_says_what_is_wrong_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning"}
    said = rule["annotations"]
    assert said.keys() == {"summary", "remedy", "runbook_url"}
    assert said["summary"].startswith("{{ $labels.instance }}: ")
    page, _, anchor = said["runbook_url"].partition("#")
    assert anchor == rule["alert"].lower()
    assert anchor in anchors(ROOT / page)


def test_a_summary_in_words(tmp_path: Path) -> None:
    fault = FAULTS["NumaLauncherMemoryOffNode"]
    expected = {
        "eval_time": fault.at,
        "alertname": "NumaLauncherMemoryOffNode",
        "exp_alerts": [{
            "exp_labels": {
                "severity": "warning", "instance": "h", "job": "numa-launcher", "model": "fake", "slot": "1",
            },
            "exp_annotations": {
                "summary": "h: only 70% of the memory of slot 1 (fake) is on its NUMA node",
                "remedy": "numa-launcher verify 1, then numa-launcher restart 1",
                "runbook_url": "docs/monitoring.md#numalaunchermemoryoffnode",
            },
        }],
    }  # fmt: skip
    run(
        tmp_path,
        [group(fault.at, [("h", fault, {"NumaLauncherMemoryOffNode": 1})]) | {"alert_rule_test": [expected]}],
    )


def test_the_rules_read_metrics_that_exist() -> None:
    groups = yaml.safe_load((MONITORING / "rules.yml").read_text(encoding="utf-8"))["groups"]
    assert known() | {rule["record"] for group in groups for rule in group["rules"]} | {"up"} >= READ


def test_the_remedies_name_verbs_that_exist() -> None:
    for rule in rules():
        named = re.findall(r"numa-launcher ([a-z]+)", rule["annotations"]["remedy"])
        assert set(named) <= set(VERBS)
