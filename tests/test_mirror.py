"""Tests mirror the source tree: launcher/PACKAGE/NAME.py is tested by tests/PACKAGE/test_NAME.py, or by
several test_NAME_ASPECT.py."""

from __future__ import annotations

from support.source_tree import MODULES, ROOT

TESTS = ROOT / "tests"

# Folders whose tests start programs or look at the repository, not at one module.
WHOLE_PROGRAMS = {
    "browser",
    "chaos",
    "clients",
    "engine",
    "fleet_hosts",
    "fuzz",
    "integration",
    "monitoring",
    "proxy/end_to_end",
    "scripts",
    "vm",
}
REPOSITORY = {
    "test_docs", "test_imports", "test_mirror", "test_ownership", "test_patterns", "test_planted_faults",
}  # fmt: skip

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
    "instances/test_adoption": "supervisor and slot controller after a daemon restart",
    "instances/test_spawner_contract": "what both spawners promise",
    "plan/test_amd_golden": "planner and engines against AMD's published pattern",
    "plan/test_docs": "docs/planning.md against the planner",
    "plan/test_invariants": "properties of every plan",
    "plan/test_published_models": "reader and planner on the models of published results",
    "plan/test_unusual_machines": "planner, renderings and pictures on unusual machines",
    "balancing/test_release": "what balancer, load and estimators learn when requests end",
    "proxy/continuation/test_token_ids": "plan, splicer and transcript of streams with token ids",
    "proxy/http1/test_properties": "requests and chunks against h11, for any bytes",
    "telemetry/test_malformed_pages": "merge and vllm_metrics on broken pages",
    "machine/test_captured_machines": "sysfs, snapshot and hardware against hwloc on every captured machine",
    "machine/test_synthetic_trees": "the trees that the tests write, read by sysfs",
    "machine/test_unusual_machines": "sysfs, machine and renderings against hwloc on unusual machines",
    "accounts/test_clock_steps": "budgets, caps, costs, ledger, audit trail and history while somebody sets the clock",
    "measure/tune/test_guarantees": "what docs/tuning.md promises of a search, on planted machines",
}


def files() -> list[str]:
    return sorted(path.relative_to(TESTS).with_suffix("").as_posix() for path in TESTS.rglob("test_*.py"))


def module_of(test: str) -> str | None:
    """proxy/http1/test_chunks -> proxy.http1.chunks; base/test_files_own_files -> base.files"""
    *folders, name = test.split("/")
    words = name.removeprefix("test_").split("_")
    named = (".".join([*folders, "_".join(words[:count])]) for count in range(len(words), 0, -1))
    return next((module for module in named if module in MODULES), None)


def needs_a_module(test: str) -> bool:
    return test not in REPOSITORY and not any(test.startswith(f"{folder}/") for folder in WHOLE_PROGRAMS)


def test_every_test_file_has_its_module() -> None:
    wrong = [
        test
        for test in files()
        if needs_a_module(test) and (module_of(test) is not None) == (test in SEVERAL_MODULES)
    ]
    assert not wrong, (
        f"rename each after the module it tests, move it to one of {sorted(WHOLE_PROGRAMS)}, "
        "or list it in SEVERAL_MODULES (and only there when no module has its name)"
    )


def test_the_lists_name_what_exists() -> None:
    assert not [test for test in SEVERAL_MODULES if not (TESTS / f"{test}.py").exists()]
