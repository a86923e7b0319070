"""The Grafana dashboard: every metric that it asks for exists, here or in vLLM, and its panels lie side by side."""

from __future__ import annotations

import yaml
from monitoring.grafana import DASHBOARD, expressions, known, metrics_in
from support.prometheus import MONITORING


def test_every_metric_exists() -> None:
    groups = yaml.safe_load((MONITORING / "rules.yml").read_text(encoding="utf-8"))["groups"]
    recorded = {rule["record"] for group in groups for rule in group["rules"]}
    asked = set[str]().union(*map(metrics_in, expressions()))
    assert len(asked) > 25
    assert asked <= known() | recorded | {"up"}


def test_it_answers_the_three_questions_in_their_order() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Is it well?", "Where is the bottleneck?", "What changed?"]


def test_no_panel_covers_another() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not own & cells, panel["title"]
        cells |= own
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_every_query_goes_to_the_chosen_prometheus() -> None:
    allowed = {"datasource", "expr", "legendFormat", "refId", "editorMode", "instant", "range", "format"}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            assert target.keys() <= allowed
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
