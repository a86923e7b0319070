"""Which package may import which: one table, checked against the imports in the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "launcher"

LEAVES = {"cpuset", "address", "sizes", "errors", "text_table", "printable", "redaction", "money"}
# What the verbs that need no daemon may use; a machine's files may lie under any root.
OFFLINE = {
    "cli", "control.client", "config", "daemon.deployment", "daemon.measured", "doctor", "planning", "plan", "topology",
    "engines.environment", "verdict", *LEAVES,
}  # fmt: skip
# A package or module, and what it may import of ours: a package's name stands for all of it. A package may always
# import itself, except where an entry below names one of its parts.
MAY_IMPORT: dict[str, set[str]] = {
    **{leaf: set() for leaf in LEAVES},
    "plan": {"config.schema", "topology.model", *LEAVES},
    "background": {"errors"},
    # What the proxy keeps of a request is read by the control socket and by tracing.
    "timeline": {"usage.entry"},
    "budget": {"money"},
    "build": set(),
    "intervals": set(),
    "verdict": set(),
    "config": {"cpuset", "sizes", "errors", "money", "redaction"},
    "config.schema": {"config.values", "config.proxy_schema", "config.telemetry_schema", "config.usage_schema"},
    "config.values": set(),
    "topology": {"cpuset", "sizes", "errors", "text_table"},
    "planning": {
        "plan", "topology.model", "config.schema", "engines.base", "engines.arguments", *(LEAVES - {"address"}),
    },
    "engines": {"plan", "config.schema", "topology.model", *LEAVES},
    "engines.sampling_defaults": {"config.schema", "engines.arguments", "errors", "planning.model_profile"},
    "instances": {
        "plan", "engines", "config.schema", "host", "background", "telemetry.engine_pages",
        "telemetry.vllm_metrics", *LEAVES,
    },
    "usage": {"config.schema", "config.usage_schema", "budget", "intervals", "host.replace_file", "telemetry", *LEAVES},
    "proxy": {
        "config.schema", "telemetry", "address", "background", "errors", "printable", "budget", "money", "timeline", "usage",
    },
    "control": {"errors", "printable", "redaction"},
    # The dashboard is a client of the control socket and of the ingress' status: it knows nothing of the daemon's parts,
    # and nothing of the fleet's.
    "dashboard": {"address", "control.client", "control.messages", "errors", "printable", "verdict"},
    "history": {"background", "errors"},
    "tracing": {"errors", "printable", "redaction", "timeline", "usage.entry"},
    "telemetry": {"address", "errors"},
    "host": {"cpuset", "errors", "printable", "background"},
    "host.hardware": {"topology.model"},
    # The command line gives tuning its plans: tuning never imports daemon or planning.
    "bench": {
        "config.schema", "control.client", "host.child", "host.hardware", "host.replace_file", "host.state_folder",
        "intervals", "telemetry", *LEAVES,
    },
    "tuning": {"bench", "config.schema", "control.client", "host", "intervals", "plan", "topology.model", *LEAVES},
    "doctor": {
        "build", "config", "topology", "plan", "planning", "engines", "host", "tuning.best_file", *LEAVES,
    },
    "rollout": {
        "daemon.deployment", "config.schema", "engines", "instances", "plan", "redaction", "cpuset", "errors",
    },
    "fleet": {
        "config.explain", "config.load", "control.client", "control.messages", "host.replace_file", "proxy.auth",
        "ingress.status", "usage.elsewhere", *LEAVES,
    },
    # Of the daemon's code the ingress takes the balancer and how a request's body is read; of the fleet its lists.
    "ingress": {
        "background", "config.schema", "fleet.config", "fleet.members", "proxy.balancing", "proxy.openai",
        "proxy.request", *LEAVES,
    },
    "daemon": {
        "background", "build", "config.schema", "config.shown", "control", "engines", "host", "instances", "plan",
        "planning", "proxy", "rollout", "telemetry", "topology", "bench.figures", "bench.result", "tuning", "usage",
        "budget", "history", "tracing", "timeline", *LEAVES,
    },
    "daemon.deployment": {
        "config.schema", "engines", "host", "plan", "planning", "topology", "tuning.remembered", "usage.spans", *LEAVES,
    },
    # Verbs talk through control.client, except the offline ones and serve.
    "cli": {
        "control.client", "control.messages", "config.schema", "config.load", "errors", "money", "sizes", "text_table",
        "printable", "redaction", "verdict",
    },
    "cli.dashboard": {"cli", "dashboard", "errors", "fleet.config", "ingress.status"},
    **{f"cli.{part}": {"cli", "fleet", "ingress", "host.journal", *OFFLINE} for part in ("fleet", "fleet_status")},
    **{
        f"cli.fleet_{part}": {
            "cli", "control.messages", "fleet", "host.replace_file", "ingress.loads", "usage", "proxy.auth", *OFFLINE,
        }
        for part in ("operations", "tables", "upgrade", "keys", "bench")
    },
    "cli.serve": {"build", "daemon", "host", "cli", "errors"},
    **{
        f"cli.{verb}": OFFLINE
        for verb in (
            "options", "machine", "topology", "plan", "doctor", "quickstart", "bundle", "bundle_parts", "top_frame",
        )
    },
    "cli.top": OFFLINE | {"host.cpu_busy"},
    "cli.bench": {"bench", "host.state_folder", *OFFLINE},
    "cli.bench_target": {"bench", "engines.probe_stack", *OFFLINE},
    **{
        f"cli.{part}": OFFLINE | {"bench", "tuning", "host.state_folder", "daemon.measured"}
        for part in ("tune", "tune_plan", "tune_apply")
    },
    "cli.key": {
        "budget", "cli", "config.load", "errors", "money", "proxy.auth.key_record", "proxy.auth.key_store", "text_table",
    },
    "cli.key_budgets": {
        "budget", "cli", "config.load", "config.schema", "control.client", "errors", "usage",
    },
    "cli.ledger": {"config.schema", "host.state_folder", "usage.schema"},
    **{
        f"cli.{verb}": {"usage", "money", "budget", "host.state_folder", "bench.result", *OFFLINE}
        for verb in ("usage", "usage_table", "cost", "audit")
    },
    **{
        f"cli.{part}": {"bench", "usage", "money", "host.state_folder", *OFFLINE}
        for part in ("cost", "cost_estimate", "cost_slo", "cost_text")
    },
    "__main__": {"cli"},
}  # fmt: skip

# Decisions: clock, randomness, paths and processes come in as arguments.
PURE = {
    "verdict", "dashboard.changes", "dashboard.fleet_frame", "dashboard.frame", "dashboard.security",
    "rollout.diff", "plan", "timeline", "cpuset", "sizes", "errors", "address", "text_table", "printable", "redaction",
    "tuning.model", "tuning.layout", "tuning.search", "tuning.stages", "tuning.score", "tuning.fit", "tuning.eta",
    "tuning.allowance", "tuning.record", "tuning.rounds", "tuning.verdict",
    "intervals", "bench.compare", "bench.figures", "bench.setting", "bench.report", "bench.report_charts",
    "bench.report_published", "bench.report_tables", "bench.charts", "bench.axes", "bench.markup",
    "config.schema", "config.proxy_schema", "config.values", "topology.model", "money", "budget",
    "usage.audit_chain",
    "usage.budget_rules", "usage.budgets", "usage.entry",
    "usage.columns", "usage.latency", "usage.spending", "usage.spans", "usage.question", "usage.figures",
    "instances.lifecycle", "instances.backoff", "instances.diagnosis", "instances.unit", "instances.ports",
    "instances.verify", "daemon.machine_status", "host.smbios", "tuning.fingerprint", "tuning.remembered",
    "proxy.sse.tracker", "proxy.sse.fast_path", "proxy.errors", "proxy.routes", "proxy.dispatch.occupancy",
    *(f"proxy.{package}.{name.stem}" for package in ("http1", "balancing", "openai", "continuation")
      for name in (ROOT / "proxy" / package).glob("[a-z]*.py")),
    "proxy.auth.key_record", "proxy.auth.rate_limits", "proxy.downstream.cors",
    *(f"proxy.request.{name.stem}" for name in (ROOT / "proxy" / "request").glob("[a-z]*.py")),
    *(f"history.{name.stem}" for name in (ROOT / "history").glob("[a-z]*.py") if name.stem not in {"file", "recorder"}),
    "control.messages", "telemetry.merge", "telemetry.vllm_metrics", "telemetry.rolling_quantiles",
    "doctor.report", "doctor.facts", "doctor.rules", "doctor.rules_host", "doctor.rules_software",
    "doctor.compatibility",
    *(f"planning.{name.stem}" for name in (ROOT / "planning").glob("[a-z]*.py")
      if name.stem not in {"model_profile", "model_files"}),
}  # fmt: skip
EFFECTS = {"asyncio", "os", "subprocess", "socket", "time", "random"}

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}


def imported(path: Path, *, typing_too: bool = True) -> Iterator[str]:
    """Every module that a file imports, also inside functions; absolute names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[int] = set()
    if not typing_too:
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.If)
                and isinstance(node.test, ast.Name)
                and node.test.id == "TYPE_CHECKING"
            ):
                skipped |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(path: Path) -> set[str]:
    """Our modules that a file imports: `from launcher.host import journal` is host.journal."""
    found = set()
    for name in imported(path):
        if not name.startswith("launcher."):
            continue
        parts = name.split(".")[1:]
        while parts and ".".join(parts) not in MODULES:
            parts.pop()  # the last words are a name inside the module
        if parts:
            found.add(".".join(parts))
    return found


# Modules that import one another in a circle today. This list only shrinks.
IN_A_CIRCLE: set[str] = set()


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    """Every module that `start` imports, directly or through others."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting.extend(new)
    return found


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}}
    assert {module for module in graph if module in reachable(module, graph)} == {"b", "c"}


def test_no_import_circles() -> None:
    """TYPE_CHECKING imports count: a module must be readable without the modules above it."""
    graph = {module: ours(path) for module, path in MODULES.items()}
    circular = {module for module in graph if module in reachable(module, graph)}
    new, stale = circular - IN_A_CIRCLE, IN_A_CIRCLE - circular
    arrows = {module: sorted(graph[module] & circular) for module in sorted(new)}
    assert not new, f"new import circle: {arrows}"
    assert not stale, f"no longer in a circle, remove from IN_A_CIRCLE: {sorted(stale)}"


def entry_of(module: str) -> str:
    """The narrowest entry of the table that speaks of a module."""
    parts = module.split(".")
    while ".".join(parts) not in MAY_IMPORT:
        parts.pop()
        assert parts, f"{module}: no entry of the table covers it"
    return ".".join(parts)


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"", "__init__"}))
def test_imports_keep_to_the_table(module: str) -> None:
    entry = entry_of(module)
    allowed = MAY_IMPORT[entry]
    itself = module.split(".", maxsplit=1)[0] if entry.split(".")[0] != "cli" else "cli"
    strays = {
        other
        for other in ours(MODULES[module])
        if not any(inside(other, package) for package in allowed)
        and not (inside(other, itself) and entry != "config.schema" and other != "cli.serve")
    }
    assert not strays, f"launcher.{module} (entry '{entry}') may not import {', '.join(sorted(strays))}"


def test_instances_and_proxy_know_nothing_of_each_other() -> None:
    for module, path in MODULES.items():
        if inside(module, "instances"):
            assert not [other for other in ours(path) if inside(other, "proxy")], module
        if inside(module, "proxy"):
            assert not [other for other in ours(path) if inside(other, "instances")], module


def test_only_serve_imports_the_daemon() -> None:
    assert [module for module, path in MODULES.items() if "daemon.main" in ours(path)] == ["cli.serve"]


def test_the_shim_imports_the_standard_library_only() -> None:
    assert not ours(MODULES["instances.shim"])


def pure() -> list[str]:
    """The table's, and the modules of engines whose docstring says so."""
    said = [
        module
        for module, path in MODULES.items()
        if inside(module, "engines") and "Pure." in (ast.get_docstring(ast.parse(path.read_text())) or "")
    ]
    assert said
    return sorted(PURE | set(said))


@pytest.mark.parametrize("module", pure())
def test_decisions_have_no_effects(module: str) -> None:
    found = {name.split(".")[0] for name in imported(MODULES[module], typing_too=False)} & EFFECTS
    assert not found, f"launcher.{module} decides, and imports {', '.join(sorted(found))}"


def test_the_package_docstring_names_every_package() -> None:
    text = ast.get_docstring(ast.parse(MODULES[""].read_text(encoding="utf-8"))) if "" in MODULES else None
    text = text or ast.get_docstring(ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8")))
    assert text is not None
    for package in {module.split(".")[0] for module in MODULES} - {"", "__init__", "__main__"}:
        assert package in text, f"launcher/__init__.py does not say what '{package}' may import"
