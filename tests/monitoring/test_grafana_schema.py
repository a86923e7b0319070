"""The Grafana dashboard against the types that Grafana publishes: misspelt keys, wrong types, unknown values.

Node's packages are fetched from the npm registry; the test runs with `scripts/test release`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from monitoring.grafana import DASHBOARD

pytestmark = [pytest.mark.release, pytest.mark.timeout(300)]

# Pinned: a newer schema may know other keys.
PACKAGES = ("@grafana/schema@13.2.3", "typescript@7.0.2")
# Types of a panel's options and of its field configuration, by the panel's type.
PANELS = {
    "stat": ("StatPanelCfg", "stat.Options", "unknown"),
    "timeseries": ("TimeSeriesPanelCfg", "timeseries.Options", "timeseries.FieldConfig"),
    "statetimeline": ("StateTimelinePanelCfg", "statetimeline.Options", "statetimeline.FieldConfig"),
    "table": ("TablePanelCfg", "table.Options", "Partial<table.FieldConfig>"),
}
# Grafana reads JSON: a value of an enumeration is its text or number there.
HEAD = """
import type { Dashboard, Panel, RowPanel, FieldConfigSource, AnnotationQuery, VariableModel } from '@grafana/schema';
type Plain<T> = T extends string ? `${T}` : T extends number | boolean | null | undefined ? T
  : T extends Array<infer U> ? Plain<U>[] : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
type Of<Options, Custom> = Plain<Omit<Panel, 'options' | 'fieldConfig' | 'targets'>>
  & { options: Plain<Options>, targets: object[],
      fieldConfig: Plain<Omit<FieldConfigSource<Custom>, 'defaults'>>
        & { defaults: Plain<Omit<FieldConfigSource['defaults'], 'custom' | 'mappings' | 'thresholds'>>
            & { custom?: Plain<Custom>, mappings?: object[], thresholds?: object } } };
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("npm") is None:
        pytest.fail("cannot find npm: scripts/test release installs it")
    made = tmp_path_factory.mktemp("grafana")
    (made / "package.json").write_text('{"private": true}')
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *PACKAGES],
        cwd=made, check=True, capture_output=True,
    )  # fmt: skip
    return made


def source(dashboard: dict[str, Any]) -> str:
    """A program that assigns each part of the dashboard to its type."""
    imports, lines = [], []
    for kind, (module, _, _) in PANELS.items():
        path = f"@grafana/schema/dist/esm/raw/composable/{kind}/panelcfg/x/{module}_types.gen"
        imports.append(f"import type * as {kind} from '{path}';")
    for panel in dashboard["panels"]:
        kind = panel["type"].replace("-", "")
        type_ = "Plain<RowPanel>"
        if kind != "row":
            _, options, custom = PANELS[kind]
            type_ = f"Of<Partial<{options}>, Partial<{custom}>>"
        lines.append(f"const panel{panel['id']}: {type_} = {json.dumps(panel)};")
    for number, annotation in enumerate(dashboard["annotations"]["list"]):
        own = "{ expr: string, step: string, titleFormat: string, textFormat: string, useValueForTime: boolean }"
        lines.append(f"const annotation{number}: Plain<AnnotationQuery> & {own} = {json.dumps(annotation)};")
    for number, variable in enumerate(dashboard["templating"]["list"]):
        own = "{ definition?: string }"
        lines.append(f"const variable{number}: Plain<VariableModel> & {own} = {json.dumps(variable)};")
    rest = {
        key: value for key, value in dashboard.items() if key not in {"panels", "annotations", "templating"}
    }
    lines.append(f"const dashboard: Plain<Dashboard> = {json.dumps(rest)};")
    return "\n".join([*imports, HEAD, *lines, "export {};"])


def problems(folder: Path, dashboard: dict[str, Any]) -> str:
    (folder / "dashboard.ts").write_text(source(dashboard))
    done = subprocess.run(
        ["node_modules/.bin/tsc", "--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "dashboard.ts"],
        cwd=folder, check=False, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout + done.stderr


def changed(key: str, value: object, *path: str) -> dict[str, Any]:
    """The dashboard with one value changed in its first panel that has this path."""
    copy: dict[str, Any] = json.loads(json.dumps(DASHBOARD))
    for panel in copy["panels"]:
        node = panel
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[key] = value
            return copy
    raise AssertionError(path)


def test_the_dashboard_fits_the_schema(folder: Path) -> None:
    assert problems(folder, DASHBOARD) == ""


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (changed("titel", "x"), "'\"titel\"' does not exist"),
        (changed("colorMode", "colourful", "options"), "'\"colourful\"' is not assignable"),
        (changed("unit", 5, "fieldConfig", "defaults"), "'number' is not assignable to type 'string'"),
        (
            changed("stacking", {"mode": "high"}, "fieldConfig", "defaults", "custom"),
            "'\"high\"' is not assignable",
        ),
        (changed("wide", True, "options"), "'\"wide\"' does not exist"),
        ({**DASHBOARD, "graphTooltip": 7}, "'7' is not assignable"),
        ({**DASHBOARD, "refresh": 30}, "'number' is not assignable to type 'string'"),
    ],
    ids=["key", "value", "type", "enumeration", "option", "number", "refresh"],
)
def test_a_fault_is_found(folder: Path, wrong: dict[str, Any], said: str) -> None:
    assert said in problems(folder, wrong)
