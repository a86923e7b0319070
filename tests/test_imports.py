"""Which package may import which: one table, checked against the imports in the code."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path

from support.source_tree import parsed

from launcher.engines.vllm.arguments import _READ, _RESERVED, _SHORT

ROOT = Path(__file__).resolve().parents[1] / "launcher"

# What the verbs that need no daemon may use; a machine's files may lie under any root.
OFFLINE = {
    "base", "cli", "config", "control", "daemon.deployment", "daemon.measured", "doctor", "engines.base", "engines.make",
    "machine", "plan",
}  # fmt: skip
# A package or module, and what it may import of ours: a package's name stands for all of it. A package may always
# import itself.
MAY_IMPORT: dict[str, set[str]] = {
    "base": set(),
    "machine": {"base"},
    "config": {"base"},
    "models": {"base"},
    "telemetry": {"base"},
    "plan": {"base", "config.schema", "machine.topology", "models"},
    "engines": {
        "base", "config.schema", "machine.hardware", "machine.topology", "models", "plan.plan", "plan.rules_host",
    },
    "instances": {
        "base", "config.schema", "engines", "machine", "models.identity", "plan.plan", "telemetry.engine_metrics",
    },
    "accounts": {"base", "config.schema", "config.usage_schema", "telemetry.load_table"},
    "keys": {"base", "accounts.budgets", "accounts.spending"},
    "balancing": {"base.address", "config.schema"},
    "proxy": {
        "base", "accounts.budgets", "accounts.ended_request", "accounts.spending", "accounts.timeline", "balancing",
        "config.schema", "keys", "telemetry",
    },
    "control": {"base"},
    # The composition root knows all that a daemon is made of; of `measure` it reads results.
    "daemon": {
        "accounts", "base", "config", "control", "engines", "instances", "machine", "models", "plan", "proxy", "telemetry",
        "measure.bench.figures", "measure.bench.result", "measure.tune.identity", "measure.tune.remembered",
    },
    "daemon.deployment": {
        "accounts.report_values", "base", "config", "engines", "machine", "measure.tune.remembered", "models", "plan",
        "instances.choose_spawner", "instances.state_file",
    },
    # The command line gives `tune` its plans: `measure` knows neither planner nor daemon.
    "measure": {
        "base", "config.schema", "control.client", "engines.make", "machine.hardware", "machine.topology",
        "proxy.sse.ends", "telemetry",  # first output: the reader of the proxy
    },
    # It reads the files of a configuration as the daemon does.
    "doctor": {
        "base", "config", "engines", "keys.api_keys", "machine", "measure.tune.remembered",
        "proxy.downstream.tls",
        "proxy.upstream.overflow_endpoint",
    },
    # Clients of a daemon's control socket. The ingress takes the balancer, and how request and certificate are read.
    "fleet": {
        "base", "accounts.spending", "balancing", "config", "control.client", "keys.key_file", "proxy.downstream.tls",
        "proxy.request.beginning",
    },
    "dashboard": {"base", "control"},
    # Verbs talk through control.client, except the offline ones and serve.
    "cli": {"base", "config", "control"},
    "cli.serve": {"base", "cli", "daemon"},
    "cli.dashboard": {"base", "cli", "config", "dashboard", "fleet"},
    **{
        f"cli.{verb}": OFFLINE
        for verb in ("bundle", "options", "plan", "quickstart", "top", "top_frame", "topology")
    },
    "cli.doctor": OFFLINE | {"engines.checks"},
    **{
        f"cli.fleet{part}": OFFLINE | {"accounts", "fleet", "keys"}
        for part in ("", "_bench", "_keys", "_operations", "_status", "_upgrade")
    },
    **{f"cli.{verb}": OFFLINE | {"engines.vllm.installed", "measure"} for verb in ("bench", "bench_target")},
    **{f"cli.{part}": OFFLINE | {"measure"} for part in ("tune", "tune_plan")},
    **{f"cli.{verb}": {"accounts", "base", "cli", "config", "control", "keys"} for verb in ("key", "key_budgets")},
    **{
        f"cli.{verb}": OFFLINE | {"accounts", "measure.bench"}
        for verb in ("audit", "cost", "cost_estimate", "cost_text", "usage", "usage_table")
    },
    "__main__": {"cli"},
}  # fmt: skip

# Decisions: clock, randomness, paths and processes come in as arguments.
PURE = {
    "accounts.audit_chain", "accounts.budgets", "accounts.sums", "accounts.ended_request", "accounts.latency",
    "accounts.report_values", "accounts.spending", "accounts.timeline",
    "base.address", "base.api_errors", "base.cpuset", "base.errors", "base.foreign_json", "base.intervals", "base.money",
    "base.redaction", "base.text", "config.proxy_schema", "config.schema", "config.values",
    "control.messages", "control.verdict",
    "dashboard.changes",
    "doctor.checks", "doctor.facts", "doctor.rows",
    "instances.diagnosis", "instances.lifecycle", "instances.ports", "instances.unit", "instances.verify",
    "keys.key_record", "keys.rate_limits",
    "machine.topology",
    *(f"measure.bench.{name}" for name in (
        "charts", "compare", "figures", "outcomes", "page", "page_parts", "setting")),
    *(f"measure.tune.{name}" for name in (
        "identity", "layout", "model", "search", "search_record")),
    "proxy.dispatch.traffic", "proxy.downstream.origin", "proxy.routes", "proxy.sse.fast_path", "proxy.sse.tracker",
    *(f"{package}.{name.stem}" for package in ("balancing", "models", "plan")
      for name in (ROOT / package).glob("[a-z]*.py") if name.stem not in {"reader", "weight_files"}),
    *(f"proxy.{package}.{name.stem}" for package in ("http1", "openai", "continuation", "request")
      for name in (ROOT / "proxy" / package).glob("[a-z]*.py") if name.stem != "template_probe"),
    "telemetry.engine_metrics", "telemetry.history", "telemetry.history_columns", "telemetry.load_rows", "telemetry.merge",
    "telemetry.quantiles",
}  # fmt: skip
EFFECTS = {"asyncio", "os", "subprocess", "socket", "time", "random"}

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}


def imported(path: Path, *, typing_too: bool = True) -> Iterator[str]:
    """Every module that a file imports, also inside functions; absolute names."""
    tree = parsed(path) if path.is_relative_to(ROOT) else ast.parse(path.read_text(encoding="utf-8"))
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


@cache
def ours(path: Path) -> frozenset[str]:
    """Our modules that a file imports: `from launcher.base import errors` is base.errors."""
    found = set()
    for name in imported(path):
        if not name.startswith("launcher."):
            continue
        parts = name.split(".")[1:]
        while parts and ".".join(parts) not in MODULES:
            parts.pop()  # the last words are a name inside the module
        if parts:
            found.add(".".join(parts))
    return frozenset(found)


# Modules that import one another in a circle today. This list only shrinks.
IN_A_CIRCLE: set[str] = set()


def reachable(start: str, graph: Mapping[str, AbstractSet[str]]) -> set[str]:
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


def test_imports_keep_to_the_table() -> None:
    strays = {}
    for module in MODULES.keys() - {"", "__init__"}:
        allowed = MAY_IMPORT[entry_of(module)] | {module.split(".", maxsplit=1)[0]}
        found = {
            other for other in ours(MODULES[module]) if not any(inside(other, package) for package in allowed)
        }
        if found:
            strays[module] = sorted(found)
    assert not strays, "module: what it may not import"


def test_no_circles_between_packages() -> None:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        package = module.split(".")[0]
        graph.setdefault(package, set()).update(
            other.split(".")[0] for other in ours(path) if not inside(other, package)
        )
    circular = {package for package in graph if package in reachable(package, graph)}
    assert not circular, {package: sorted(graph[package] & circular) for package in sorted(circular)}


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
        if inside(module, "engines") and "Pure." in (ast.get_docstring(parsed(path)) or "")
    ]
    assert said
    return sorted(PURE | set(said))


def test_decisions_have_no_effects() -> None:
    found = {
        module: sorted(effects)
        for module in pure()
        if (effects := {name.split(".")[0] for name in imported(MODULES[module], typing_too=False)} & EFFECTS)
    }
    assert not found, "module that decides: what it imports"


def test_the_package_docstring_names_every_package() -> None:
    text = ast.get_docstring(parsed(MODULES[""])) if "" in MODULES else None
    text = text or ast.get_docstring(parsed(ROOT / "__init__.py"))
    assert text is not None
    for package in {module.split(".")[0] for module in MODULES} - {"", "__init__", "__main__"}:
        assert package in text, f"launcher/__init__.py does not say what '{package}' may import"


# Parsing all tests takes seconds.
STRAY = re.compile(r"^\s*(?:from|import)\s.*(?:test_|conftest)", re.MULTILINE)


def test_no_test_imports_from_another() -> None:
    """Builders and fakes that several tests use are in tests/support."""
    tests = ROOT.parent / "tests"
    strays = [
        f"{path.relative_to(tests)}: {name}"
        for path in tests.rglob("*.py")
        if STRAY.search(path.read_text(encoding="utf-8"))
        for name in imported(path)
        if any(part.startswith("test_") or part == "conftest" for part in name.split(".")[:-1])
        and not name.startswith("aiohttp.")
    ]
    assert not strays


def test_scripts_import_names_that_are_there() -> None:
    """Some of them run in no lane of the gate."""
    folder = ROOT.parent / "scripts"
    missing = []
    for path in folder.rglob("*.py"):
        for name in imported(path):
            module, _, attribute = name.rpartition(".")
            if not module.startswith("launcher") or name in sys.modules:
                continue
            found = importlib.import_module(module)
            is_module = hasattr(found, "__path__") and importlib.util.find_spec(name) is not None
            if not is_module and not hasattr(found, attribute):
                missing.append(f"{path.name}: {name}")
    assert missing == []


# --- engines.make tells kinds of engines apart, engines.vllm names vLLM's options and variables. ---

KINDS = re.compile(r"\bEngineKind\b|\bis_vllm\b|\bengine\.kind(?:\.value)?\s*(?:[=!]=|is\b|in\b|not\b)")
# The descriptions of configuration keys; vLLM's client of a measurement.
NAMES_VLLMS = {"config.schema", "measure.bench.load_generator"}


def test_kinds_of_engines_are_told_apart_in_one_place() -> None:
    asking = {module for module, path in MODULES.items() if KINDS.search(path.read_text(encoding="utf-8"))}
    assert asking == {"config.schema", "config.values", "engines.make"}
    # There in the table alone.
    text = MODULES["engines.make"].read_text(encoding="utf-8")
    table = text[text.index("TYPES: Final") : text.index("def probe_stack")]
    assert not KINDS.search(text.replace(table, "").replace("import Config, EngineKind,", ""))


def test_vllms_options_and_variables_are_named_in_its_folder() -> None:
    """In code; a comment or docstring may name the source of a rule."""
    known = _READ | _RESERVED.keys() | set(_SHORT.values())
    # Other programs have these, too.
    common = {"--host", "--port", "--api-key", "--model", "--config", "--dtype"}
    word = re.compile(rf"VLLM_[A-Z]|(?:{'|'.join(sorted(known - common))})(?![\w-])")
    naming = {
        module
        for module, path in MODULES.items()
        if not module.startswith("engines.vllm") and any(map(word.search, literals(path)))
    }
    assert naming == NAMES_VLLMS


def literals(path: Path) -> Iterator[str]:
    """The strings of a file, but for docstrings and other statements that are only a string."""
    tree = parsed(path)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value
