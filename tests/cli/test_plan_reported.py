"""Public reports about hosts and models, each from the reporter's files through the whole `plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import reported_hosts as reported

from launcher.base.cpuset import CpuSet
from launcher.base.text import GIB
from launcher.cli import main

Said = dict[str, Any]


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `plan --json` on a host that is written here, or on a machine by its name. The exit code is in `exit`."""

    def run(host: reported.ReportedHost | str, *words: str) -> Said:
        if isinstance(host, str):
            place = ("--machine", host)
        else:
            root = tmp_path / "root"
            place = ("--root", str(root if root.exists() else host.write(root)))
        code = main(["plan", *place, *words, "--json"])
        found: Said = json.loads(capsys.readouterr().out)
        return found | {"exit": code}

    return run


def codes(plan: Said) -> list[str]:
    return [its["code"] for its in plan["findings"]]


def finding(plan: Said, code: str) -> Said:
    (found,) = (its for its in plan["findings"] if its["code"] == code)
    said: Said = found
    return said


def cpus_of(plan: Said) -> CpuSet:
    return CpuSet(cpu for slot in plan["slots"] for cpu in CpuSet.parse(slot["cpus"]))


def threads_of(plan: Said) -> int:
    return sum(len(CpuSet.parse(each)) for slot in plan["slots"] for each in slot["omp_cpus"].split("|"))


# --- Machines. ---


@pytest.mark.parametrize(("quota", "most"), [("800000 100000", 8), ("750000 100000", 7), ("100000 50000", 2)])
def test_no_more_threads_than_the_cgroup_gives_time(plan: Any, quota: str, most: int) -> None:
    found = plan(reported.cpu_time(quota))
    assert found["exit"] == 0
    assert 0 < threads_of(found) <= len(cpus_of(found)) <= most
    assert "allows the time of" in finding(found, "cpu-quota")["message"]
    assert found["ledger"][0]["total_bytes"] == 64 * GIB, "memory.max of the same cgroup"


@pytest.mark.parametrize(
    ("cpuset", "online", "node"),
    [("16-23", range(8), 1), ("4-11", range(8), 0), ("16-23", range(16, 24), 1)],
    ids=["disjoint", "overlap", "plain"],
)
def test_the_cpus_of_the_affinity_mask_are_online(plan: Any, cpuset: str, online: range, node: int) -> None:
    found = plan(reported.renumbered(cpuset, online))
    assert found["exit"] == 0
    assert CpuSet.parse(found["usable"]) == cpus_of(found) == CpuSet.parse(cpuset)
    assert [slot["node"] for slot in found["slots"]] == [node]


def test_instances_of_empty_nodes_divide_the_memory_that_is_equally_far(plan: Any, tmp_path: Path) -> None:
    found = plan(reported.THREADRIPPER, "--model", reported.llama(tmp_path / "model"))
    assert found["exit"] == 0
    assert sorted(slot["membind"] for slot in found["slots"]) == ["1", "1", "2", "2"]
    assert all(row["left_bytes"] >= 0 for row in found["ledger"])


def test_an_engine_on_an_empty_node_is_told_its_memory_node(plan: Any, tmp_path: Path) -> None:
    found = plan(reported.HALF_POPULATED, "--model", reported.llama(tmp_path / "model"))
    assert found["exit"] == 0
    bound = {
        slot["node"]: (slot["membind"], slot["env"].get("CPU_VISIBLE_MEMORY_NODES"))
        for slot in found["slots"]
    }
    assert bound == {0: ("0", None), 1: ("0", "0"), 2: ("2", None), 3: ("2", "2")}
    assert {row["node"]: row["slots"] for row in found["ledger"]} == {0: [0, 1], 2: [2, 3]}


def test_emulated_nodes_are_said_with_the_boot_option(plan: Any, tmp_path: Path) -> None:
    model = reported.small_qwen(tmp_path / "model")
    found = plan(reported.RASPBERRY, "--model", model, "--set", "models.0.max_model_len=4096")
    assert found["exit"] == 1
    assert "nodes 0-7" in finding(found, "emulated-nodes")["message"]
    assert finding(found, "out-of-memory")["remedy"].startswith("boot without numa=fake")
    assert "firmware-contradicts" not in codes(found)


def test_a_limit_that_only_meminfo_shows_is_the_memory(plan: Any, tmp_path: Path) -> None:
    found = plan(reported.PROXMOX, "--model", reported.llama(tmp_path / "model"))
    assert found["exit"] == 0
    (row,) = found["ledger"]
    assert row["total_bytes"] == 64 * GIB
    assert row["left_bytes"] >= 0


@pytest.mark.parametrize(
    ("host", "fast"), [(reported.INTEL, "0-11"), (reported.ARM, "5-9,15-19")], ids=["intel", "arm"]
)
@pytest.mark.parametrize("count", [1, 2])
def test_cores_of_one_instance_are_of_one_kind(
    plan: Any, host: reported.ReportedHost, fast: str, count: int
) -> None:
    found = plan(host, "--instances-per-socket", f"{count}")
    assert found["exit"] == 0
    kinds = CpuSet.parse(fast)
    its = [CpuSet.parse(slot["cpus"]) for slot in found["slots"]]
    assert len(its) == count
    assert all(cpus <= kinds or cpus.isdisjoint(kinds) for cpus in its)
    assert any(cpus <= kinds for cpus in its)


def test_nodes_smaller_than_the_model_are_refused_once_with_advice_that_the_next_run_takes(
    plan: Any, tmp_path: Path
) -> None:
    model = reported.llama(tmp_path / "model", large=True)
    found = plan(reported.SMALL_NODES, "--model", model, "--set", "models.0.tensor_parallel_size=1")
    assert found["exit"] == 1
    assert codes(found).count("out-of-memory") == 1
    remedy = finding(found, "out-of-memory")["remedy"]
    assert 'tensor_parallel_size = "auto"' in remedy
    auto = plan(reported.SMALL_NODES, "--model", model)
    assert auto["exit"] == 0
    assert "idle-nodes" not in codes(auto)
    assert "max_model_len" not in remedy, "the weights alone are larger than a node"
    spread = ("--set", "layout.span_nodes=true", "--instances-per-socket", "1")
    eight = plan(reported.SMALL_NODES, "--model", model, "--set", "models.0.tensor_parallel_size=8", *spread)
    assert eight["exit"] == 0
    assert not any("tensor_parallel_size to 12" in its["remedy"] for its in eight["findings"]), "64 heads"
    twelve = plan(
        reported.SMALL_NODES, "--model", model, "--set", "models.0.tensor_parallel_size=12", *spread
    )
    assert twelve["exit"] == 1


# --- Models. ---


@pytest.mark.parametrize(
    ("size", "layers"),
    [
        ("4b", [("full", 5, 4, 256, None), ("sliding", 29, 4, 256, 1024)]),
        ("12b", [("full", 8, 8, 256, None), ("sliding", 40, 8, 256, 1024)]),
        ("27b", [("full", 10, 16, 128, None), ("sliding", 52, 16, 128, 1024)]),
        ("4b-full", [("full", 5, 4, 256, None), ("sliding", 29, 4, 256, 1024)]),
    ],
)
def test_the_class_fills_in_what_a_description_leaves_out(
    plan: Any, tmp_path: Path, size: str, layers: list[tuple[object, ...]]
) -> None:
    words = ("--model", reported.gemma3(tmp_path / size, size), "--set", "models.0.max_num_seqs=2")
    found = plan("epyc-9755-1p", *words)
    assert found["exit"] == 0
    (its,) = found["models"]
    assert its["max_model_len"] == 131072, "not multiplied by the factor"
    keys = ("kind", "count", "kv_heads", "head_size", "window")
    assert [tuple(layer[key] for key in keys) for layer in its["layers"]] == layers
    assert all(slot["kv_cache_bytes"] >= its["request_bytes"] for slot in found["slots"])
    assert plan("epyc-9755-1p", *words, "--kv-cache", "64GiB")["exit"] == 0


@pytest.mark.parametrize(
    ("write", "kept", "request_bytes"),
    [
        (reported.pruned_llama, [("full", 49, 8)], 24.5 * GIB),
        (reported.kimi_linear, [("latent", 7, 1), ("state", 20, None)], None),
        (reported.minimax, [("full", 10, 8), ("state", 70, None)], 40 * GIB),
    ],
    ids=["nas", "kimi", "minimax"],
)
def test_layers_differ_by_other_keys_than_layer_types(
    plan: Any, tmp_path: Path, write: Any, kept: list[tuple[object, ...]], request_bytes: float | None
) -> None:
    found = plan("epyc-9755-1p", "--model", write(tmp_path / "model"))
    assert found["exit"] == 0
    (its,) = found["models"]
    assert [(layer["kind"], layer["count"], layer["kv_heads"]) for layer in its["layers"]] == kept
    if request_bytes is not None:
        assert abs(its["request_bytes"] / request_bytes - 1) < 0.01
    assert plan("epyc-9755-1p", "--model", write(tmp_path / "model"), "--kv-cache", "100GiB")["exit"] == 0


@pytest.mark.parametrize(
    ("write", "layers", "length"),
    [(reported.mistral, ("full", 36, 8, 128), 262144), (reported.omni, ("full", 28, 4, 128), 32768)],
    ids=["params.json", "thinker_config"],
)
def test_descriptions_of_other_forms_are_read(
    plan: Any, tmp_path: Path, write: Any, layers: tuple[object, ...], length: int
) -> None:
    for more in ((), ("--kv-cache", "64GiB")):
        found = plan("epyc-9755-1p", "--model", write(tmp_path / "model"), *more)
        assert found["exit"] == 0
        (its,) = found["models"]
        (kept,) = its["layers"]
        assert (kept["kind"], kept["count"], kept["kv_heads"], kept["head_size"]) == layers
        assert its["max_model_len"] == length
