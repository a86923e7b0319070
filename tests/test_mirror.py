"""Tests mirror the source tree: launcher/PACKAGE/NAME.py is tested by tests/PACKAGE/test_NAME.py."""

from __future__ import annotations

import pytest
from source_tree import MODULES, ROOT

TESTS = ROOT / "tests"

# Folders whose tests start programs or look at the repository, not at one module.
WHOLE_PROGRAMS = {
    "browser",
    "chaos",
    "engine",
    "fleet_hosts",
    "fuzz",
    "integration",
    "monitoring",
    "proxy/end_to_end",
    "scripts",
    "vm",
}
REPOSITORY = {"test_docs", "test_imports", "test_language", "test_mirror", "test_ownership", "test_patterns"}

# Tests of several modules of a package at once.
SEVERAL_MODULES = {
    "cli/test_command_line": "every verb, from argv to text and exit code",
    "cli/test_terminal_escapes": "every verb that prints what instances and clients wrote",
    "control/test_limits": "size and time limits of the socket's server, by raw connections",
    "control/test_log_injection": "server and operations, by hostile peers",
    "control/test_roles": "server and peers, by processes of other users",
    "dashboard/test_palette": "the colours of static/style.css",
    "dashboard/test_picture_colours": "the colours of static/picture.css",
    "fleet/test_kubernetes": "configs/kubernetes",
    "history/test_kill": "recorder, history and file, by a process that is killed",
    "instances/test_adoption": "supervisor and slot controller after a daemon restart",
    "instances/test_spawner_contract": "what both spawners promise",
    "planning/test_amd_golden": "planner and engines against AMD's published pattern",
    "planning/test_docs": "docs/planning.md against the planner",
    "planning/test_invariants": "properties of every plan",
    "planning/test_unusual_machines": "planner, renderings and pictures on unusual machines",
    "proxy/balancing/test_release": "what balancer, load and estimators learn when requests end",
    "proxy/continuation/test_token_ids": "plan, splicer and transcript of streams with token ids",
    "proxy/http1/test_properties": "requests and chunks against h11, for any bytes",
    "proxy/upstream/test_overflow_spending": "endpoint, cost and daily cap over any sequence of requests",
    "telemetry/test_malformed_pages": "merge and vllm_metrics on broken pages",
    "topology/test_captured_machines": "sysfs and machine against hwloc on every captured machine",
    "topology/test_synthetic_trees": "the trees that the tests write, read by sysfs",
    "topology/test_unusual_machines": "sysfs, machine and renderings against hwloc on unusual machines",
    "tuning/test_guarantees": "what docs/tuning.md promises of a search, on planted machines",
}

# Modules shorter than this need no test file of their own.
SMALL = 100

# Larger modules that other tests cover, and which. A name may be a file or a folder of tests/.
COVERED_BY = {
    "bench.driver": "bench/test_vllm_driver.py",
    "bench.endpoint": "bench/test_run.py",
    "bench.process": "bench/test_run.py",
    "cli.bench_target": "cli/test_bench.py",
    "cli.fleet_tables": "cli/test_fleet_operations.py",
    "bench.report_charts": "bench/test_report.py",
    "bench.report_published": "bench/test_report.py",
    "bench.report_tables": "bench/test_report.py",
    "cli.key_budgets": "cli/test_key.py",
    "cli.bundle_parts": "cli/test_bundle.py",
    "cli.cost_estimate": "cli/test_cost.py",
    "cli.cost_slo": "cli/test_cost.py",
    "cli.cost_text": "cli/test_cost.py",
    "cli.options": "cli/test_command_line.py",
    "cli.quickstart": "cli/test_command_line.py",
    "cli.reload": "cli/test_command_line.py",
    "cli.screen": "cli/test_top.py",
    "cli.slot_verbs": "cli/test_command_line.py",
    "cli.status_table": "cli/test_status.py",
    "cli.why": "cli/test_command_line.py",
    "tracing.collector": "tracing/test_exporter.py",
    "tracing.otlp": "tracing/test_exporter.py",
    "cli.tune": "integration/test_tune.py",
    "cli.usage_table": "cli/test_usage.py",
    "cli.tune_plan": "integration/test_tune.py",
    "config.explain": "config/test_load.py",
    "config.proxy_schema": "config/test_schema.py",
    "telemetry.machine_metrics": "daemon/test_slot_values.py",
    "control.answers": "control/test_server.py",
    "control.arguments": "control/test_server.py",
    "control.connections": "control/test_limits.py",
    "control.messages": "control/test_server.py",
    "daemon.operations": "integration/test_control_protocol.py",
    "daemon.status": "cli/test_status.py",
    "doctor.rules_host": "doctor/test_rules.py",
    "doctor.rules_software": "doctor/test_rules.py",
    "host.systemd_bus": "instances/test_adopt_units.py",
    "instances.cache_files": "instances/test_compile_cache.py",
    "instances.instance": "instances/test_slot_controller.py",
    "instances.instance_monitor": "instances/test_slot_controller.py",
    "instances.ports": "instances/test_spawner_contract.py",
    "instances.shim": "instances/test_spawn_direct.py",
    "instances.slot_state": "instances/test_lifecycle.py",
    "instances.spawn_systemd": "instances/test_spawner_contract.py",
    "instances.systemd_units": "instances/test_adopt_units.py",
    "instances.transitions": "instances/test_lifecycle.py",
    "plan": "planning/test_planner.py",
    "planning.demand": "planning/test_memory.py",
    "planning.gguf": "planning/test_weights.py",
    "planning.profile": "planning/test_model_profile.py",
    "planning.rules_host": "planning/test_lint.py",
    "planning.rules_model": "planning/test_lint.py",
    "planning.rules_placement": "planning/test_lint.py",
    "planning.zones": "planning/test_planner.py",
    "proxy.auth.key_store": "proxy/auth/test_api_keys.py",
    "proxy.continuation.eligibility": "proxy/continuation/test_plan.py",
    "proxy.continuation.next_request": "proxy/continuation/test_plan.py",
    "proxy.continuation.splicer": "proxy/continuation/test_plan.py",
    "proxy.dispatch.attempts": "proxy/end_to_end",
    "proxy.dispatch.authorize": "proxy/end_to_end/test_access_control.py",
    "proxy.dispatch.registry": "proxy/end_to_end",
    "proxy.downstream.handshakes": "proxy/end_to_end/test_file_descriptors.py",
    "proxy.http1.fields": "proxy/http1/test_requests.py",
    "proxy.pages.models": "proxy/pages/test_renderer.py",
    "proxy.upstream.overflow_endpoint": "proxy/upstream/test_overflow.py",
    "proxy.readings": "proxy/test_accounting.py",
    "proxy.request.model_traits": "proxy/test_accounting.py",
    "proxy.request.actions": "proxy/request/test_lifecycle.py",
    "proxy.request.answer": "proxy/request/test_lifecycle.py",
    "proxy.request.decisions": "proxy/request/test_lifecycle.py",
    "proxy.request.events": "proxy/request/test_lifecycle.py",
    "proxy.request.ports": "proxy/request/test_lifecycle.py",
    "proxy.request.record": "proxy/request/test_lifecycle.py",
    "topology.cores": "topology/test_machine.py",
    "topology.files": "topology/test_snapshot.py",
    "topology.model": "topology/test_machine.py",
    "topology.numa_nodes": "topology/test_unusual_machines.py",
    "topology.packages": "topology/test_machine.py",
    "topology.svg": "topology/test_picture.py",
    "tuning.model": "tuning/test_search.py",
    "tuning.record": "tuning/test_search.py",
    "tuning.stages": "tuning/test_search.py",
    "tuning.verdict": "tuning/test_search.py",
    "usage.audit_folder": "usage/test_audit_writer.py",
    "usage.figures": "usage/test_report.py",
}


def files() -> list[str]:
    return sorted(path.relative_to(TESTS).with_suffix("").as_posix() for path in TESTS.rglob("test_*.py"))


def module_of(test: str) -> str:
    """proxy/http1/test_chunks -> proxy.http1.chunks"""
    *folders, name = test.split("/")
    return ".".join([*folders, name.removeprefix("test_")])


def needs_a_module(test: str) -> bool:
    return test not in REPOSITORY and not any(test.startswith(f"{folder}/") for folder in WHOLE_PROGRAMS)


@pytest.mark.parametrize("test", [test for test in files() if needs_a_module(test)])
def test_every_test_file_has_its_module(test: str) -> None:
    assert (module_of(test) in MODULES) != (test in SEVERAL_MODULES), (
        f"tests/{test}.py: rename it after the module it tests, move it to one of {sorted(WHOLE_PROGRAMS)}, "
        "or list it in SEVERAL_MODULES (and only there when no module has its name)"
    )


def test_every_module_has_its_tests() -> None:
    own = {module_of(test) for test in files()}
    modules = {module: path for module, path in MODULES.items() if path.name != "__init__.py"}
    large = {
        module
        for module, path in modules.items()
        if len(path.read_text(encoding="utf-8").splitlines()) > SMALL
    }
    missing = large - own - COVERED_BY.keys()
    stale = COVERED_BY.keys() - (modules.keys() - own)
    assert not missing, (
        f"write tests/PACKAGE/test_NAME.py, or say in COVERED_BY what covers it: {sorted(missing)}"
    )
    assert not stale, f"gone, or tested by a file of its own: remove from COVERED_BY: {sorted(stale)}"


def test_the_lists_name_what_exists() -> None:
    assert not [test for test in SEVERAL_MODULES if not (TESTS / f"{test}.py").exists()]
    assert not [name for name in COVERED_BY.values() if not (TESTS / name).exists()]
