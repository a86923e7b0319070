"""Hosts and models as people have them, from files to findings: each was planned wrongly or without help elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.model_folders import model
from support.synthetic import Machine, mask, put

from launcher.base.cpuset import CpuSet
from launcher.base.text import GIB
from launcher.cli import main

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 8, "num_hidden_layers": 4, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"

Said = dict[str, Any]


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `plan --json` on a tree, or on a machine by its name, with a small model or the one given."""

    def run(where: Path | str, *words: str, folder: str | None = None) -> Said:
        own = folder or model(tmp_path / "small", LLAMA, w=("BF16", [1024, 1024]))
        place = ("--root", str(where)) if isinstance(where, Path) else ("--machine", where)
        main(["plan", *place, "--model", own, "--json", *words])
        found: Said = json.loads(capsys.readouterr().out)
        return found

    return run


def codes(plan: Said, severity: str) -> list[str]:
    return [its["code"] for its in plan["findings"] if its["severity"] == severity]


# --- Machines. ---


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"cpu.max": "800000 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "max 100000"}, 32),
    ],
)
def test_a_limit_on_cpu_time_is_a_limit_on_cores(
    plan: Any, tmp_path: Path, files: dict[str, str], most: int
) -> None:
    root = Machine(cores=32, node_bytes=256 * GIB).write(tmp_path / "root")
    put(root / "proc/self/mountinfo", V2)
    put(root / "proc/self/cgroup", "0::/job")
    for name, text in {"memory.max": str(64 * GIB), "cpuset.cpus.effective": "0-31", **files}.items():
        put(root / "sys/fs/cgroup/job" / name, text)
    found = plan(root)
    cpus = CpuSet.parse(found["slots"][0]["cpus"])
    assert len(cpus) <= most
    assert len(cpus) >= most - 2
    assert found["ledger"][0]["total_bytes"] <= 64 * GIB


@pytest.mark.parametrize("cpuset", ["16-23", "4-11"])
def test_a_renumbered_list_of_online_cpus_is_not_believed(plan: Any, tmp_path: Path, cpuset: str) -> None:
    root = Machine(sockets=2, cores=16, allowed=CpuSet.parse(cpuset)).write(tmp_path / "root")
    put(root / "sys/devices/system/cpu/online", "0-7")
    found = plan(root)
    assert CpuSet.parse(found["usable"]) == CpuSet.parse(cpuset)
    assert not found["violations"]


def service_and_slice(root: Path, service: str, instances: str) -> Path:
    """AllowedCPUs= of the daemon's service, and of the slice of its instances."""
    Machine(cores=8, node_bytes=64 * GIB, allowed=CpuSet.parse(service)).write(root)
    put(root / "proc/self/mountinfo", V2)
    put(root / "proc/self/cgroup", "0::/system.slice/numa-launcher.service")
    group = root / "sys/fs/cgroup"
    put(group / "system.slice/numa-launcher.service/cpuset.cpus.effective", service)
    put(group / "numa.slice/numa-launcher.slice/cpuset.cpus.effective", instances)
    return root


def test_a_service_and_a_slice_without_a_common_cpu_are_named(plan: Any, tmp_path: Path) -> None:
    found = plan(service_and_slice(tmp_path / "apart", "0-1", "2-7"))
    assert codes(found, "violation") == ["no-usable-cpus"]
    (said,) = found["violations"]
    assert said["message"] == (
        "cannot place anything: this process may use cpus 0-1, the slice of its instances cpus 2-7, and no cpu is in both"
    )
    assert "AllowedCPUs=" in said["remedy"]
    # As the remedy says: the service may use the cpus of the slice, too.
    found = plan(service_and_slice(tmp_path / "both", "0-7", "2-7"))
    assert not found["violations"]
    assert CpuSet.parse(found["usable"]) == CpuSet.parse("2-7")


def test_nodes_without_memory_share_the_others_by_room(plan: Any, tmp_path: Path) -> None:
    machine = Machine(nodes=4, cores=8, memoryless=frozenset({0, 3}))
    found = plan(machine.write(tmp_path / "root"), "--instances-per-socket", "4")
    assert sorted(slot["membind"] for slot in found["slots"]) == ["1", "1", "2", "2"]
    assert not found["violations"]
    away = [slot for slot in found["slots"] if str(slot["node"]) != slot["membind"]]
    assert len(away) == 2
    assert all(slot["env"]["CPU_VISIBLE_MEMORY_NODES"] == slot["membind"] for slot in away)
    said = [its for its in found["warnings"] if its["code"] == "remote-memory"]
    assert len(said) == 2
    assert all("vLLM 0.32 does not start there" in its["message"] for its in said)
    without = plan(tmp_path / "root", "--instances-per-socket", "4", "--set", "models.0.nodes=[1,2]")
    assert not without["findings"] or "remote-memory" not in codes(without, "warning")


def test_memory_that_may_not_be_used_is_told_from_memory_that_is_not_there(plan: Any, tmp_path: Path) -> None:
    """vLLM 0.32 starts there: the cpus' own node has free memory that it can look at."""
    root = Machine(nodes=2, cores=8).write(tmp_path / "root")
    put(root / "proc/self/mountinfo", V2)
    put(root / "proc/self/cgroup", "0::/job")
    put(root / "sys/fs/cgroup/job/cpuset.mems.effective", "1")
    found = plan(root)
    (said,) = (its for its in found["warnings"] if its["code"] == "remote-memory")
    assert "node 0 has no memory that may be used here" in said["message"]
    assert "AllowedMemoryNodes=" in said["remedy"]


def emulated(root: Path, nodes: int, links: str = "0", gib: int = 16) -> Path:
    """numa=fake of a machine with one node: each lists the same cpus."""
    Machine(cores=4, node_bytes=gib * GIB // nodes).write(root)
    one = root / "sys/devices/system/node"
    put(one / "online", f"0-{nodes - 1}")
    meminfo = (one / "node0/meminfo").read_text()
    for node in range(nodes):
        put(one / f"node{node}/cpulist", "0-3")
        put(one / f"node{node}/cpumap", mask(CpuSet(range(4))))
        put(one / f"node{node}/distance", " ".join(["10"] * nodes))
        put(one / f"node{node}/meminfo", meminfo.replace("Node 0", f"Node {node}").strip())
    for cpu in range(4):
        for node in links.split():
            (root / f"sys/devices/system/cpu/cpu{cpu}/node{node}").mkdir()
    return root


@pytest.mark.parametrize("links", ["0", "0 1 2 3", ""])
def test_emulated_nodes_are_named_and_the_remedy_is_true(plan: Any, tmp_path: Path, links: str) -> None:
    found = plan(emulated(tmp_path / "root", 8, links))
    assert codes(found, "violation") == ["out-of-memory"]
    assert found["violations"][0]["remedy"].startswith(
        "boot without numa=fake (numa=off on the kernel's command"
    )
    (said,) = (its for its in found["warnings"] if its["code"] == "emulated-nodes")
    assert said["message"].startswith(
        "the kernel emulates nodes 0-7 (numa=fake): they are one node with the same cpus"
    )
    assert "firmware-contradicts" not in codes(found, "warning")


def test_an_emulated_node_that_has_room_is_planned(plan: Any, tmp_path: Path) -> None:
    found = plan(emulated(tmp_path / "root", 2))
    assert not found["violations"]
    assert found["slots"][0]["membind"] == "0"
    assert "emulated-nodes" in codes(found, "warning")


@pytest.mark.parametrize(
    ("nodes", "count", "bound"),
    [(4, 2, ["1", "2"]), (3, 4, ["1", "2", "1", "2"]), (2, 2, ["0", "0"]), (4, 1, ["0"])],
)
def test_instances_take_the_memory_of_several_emulated_nodes(
    plan: Any, tmp_path: Path, nodes: int, count: int, bound: list[str]
) -> None:
    """vLLM binds each to one, and compares its KV cache with the free memory of the lowest, which takes none."""
    found = plan(
        emulated(tmp_path / "root", nodes, gib=256),
        "--instances-per-socket",
        f"{count}",
        "--kv-cache",
        "8GiB",
    )
    assert not found["violations"]
    assert [slot["membind"] for slot in found["slots"]] == bound
    for slot in found["slots"]:
        assert slot["env"].get("CPU_VISIBLE_MEMORY_NODES") == (
            None if slot["membind"] == "0" else slot["membind"]
        )
    charged = {f"{row['node']}": len(row["slots"]) for row in found["ledger"]}
    assert charged == {node: bound.count(node) for node in bound}


def test_a_command_of_ones_own_gets_all_emulated_nodes(plan: Any, tmp_path: Path) -> None:
    root = emulated(tmp_path / "root", 8)
    found = plan(root, "--set", "engine.kind=command", "--set", 'engine.command=["serve","{uds}"]')
    assert found["slots"][0]["membind"] == "0-7"
    assert not found["violations"]
    assert "emulated-nodes" not in codes(found, "warning")


def test_nodes_that_list_the_same_cpus_farther_apart_are_firmware_that_contradicts_itself(
    plan: Any, tmp_path: Path
) -> None:
    root = emulated(tmp_path / "root", 2)
    for node, far in enumerate(("10 20", "20 10")):
        put(root / f"sys/devices/system/node/node{node}/distance", far)
    found = plan(root)
    assert "firmware-contradicts" in codes(found, "warning")
    assert "emulated-nodes" not in codes(found, "warning")


def test_a_limit_that_nodes_share_is_named_with_what_helps(plan: Any, tmp_path: Path) -> None:
    root = Machine(nodes=2, cores=8).write(tmp_path / "root")
    put(root / "proc/self/mountinfo", V2)
    put(root / "proc/self/cgroup", "0::/job")
    put(root / "sys/fs/cgroup/job/memory.max", f"{4 * GIB}")
    found = plan(root)
    assert codes(found, "violation") == ["out-of-memory"]
    remedy = found["violations"][0]["remedy"]
    assert remedy.startswith("raise the memory limit of this cgroup, 4 GiB (MemoryMax=")
    assert "set models.nodes = [0], which then has all of it" in remedy
    assert "BIOS" not in remedy
    assert not plan(root, "--set", "models.0.nodes=[0]")["violations"]


def test_a_memory_limit_that_only_meminfo_shows_counts(plan: Any, tmp_path: Path) -> None:
    root = Machine(cores=16, node_bytes=256 * GIB).write(tmp_path / "root")
    put(root / "proc/meminfo", f"MemTotal: {64 * GIB // 1024} kB\nMemFree: {64 * GIB // 1024} kB")
    assert plan(root)["ledger"][0]["total_bytes"] == 64 * GIB


def test_fast_and_slow_cores_are_not_mixed(plan: Any, tmp_path: Path) -> None:
    root = Machine(cores=20).write(tmp_path / "root")
    for cpu in range(20):
        put(root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", "1024" if cpu < 10 else "718")
    found = plan(root, "--instances-per-socket", "2", "--reserve-cores", "0")
    assert [slot["cpus"] for slot in found["slots"]] == ["0-9", "10-19"]


def test_nodes_smaller_than_the_model_are_one_finding_whose_remedy_is_accepted(
    plan: Any, tmp_path: Path
) -> None:
    large = {**LLAMA, "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80}
    folder = model(tmp_path / "large", large, w=("BF16", [70 << 10, 1 << 20]))
    machine = "socket:2 node:12(memory=64GiB,near=11) l3:1(size=32MiB) core:8 smt:2"
    found = plan(machine, "--set", "models.0.tensor_parallel_size=1", folder=folder)
    assert codes(found, "violation") == ["out-of-memory"]
    assert 'set tensor_parallel_size = "auto": ' in found["violations"][0]["remedy"]
    again = plan(machine, "--set", "models.0.tensor_parallel_size=auto", folder=folder)
    assert not again["violations"]
    (chosen,) = again["chosen_ranks"]
    assert {slot["tensor_parallel_size"] for slot in again["slots"]} == {chosen["tensor_parallel_size"]}
    assert chosen["tensor_parallel_size"] > 1


# --- Models. ---

GEMMA = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
QWEN = {
    "model_type": "qwen2_5_omni_text", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "max_position_embeddings": 32768,
}  # fmt: skip
NAS = {
    **LLAMA, "architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas", "num_key_value_heads": None,
    "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 4, "max_position_embeddings": 131072,
    "block_configs": [
        {"attention": {"n_heads_in_group": 8, "no_op": False}},
        {"attention": {"no_op": True}},
        {"attention": {"replace_with_linear": True, "no_op": False}},
        {"attention": {"n_heads_in_group": 8}},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "layers", "length"),
    [
        (
            {**GEMMA, "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}},
            [("full", 5, 4, 256), ("sliding", 29, 4, 256)],
            131072,
        ),
        (
            {
                **GEMMA,
                "text_config": {
                    "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "head_dim": 128,
                    "num_attention_heads": 32, "num_key_value_heads": 16,
                    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                },
            },
            [("full", 10, 16, 128), ("sliding", 52, 16, 128)],
            131072,
        ),
        (NAS, [("full", 2, 8, 128)], 131072),
        (
            {
                **LLAMA, "architectures": ["MiniMaxText01ForCausalLM"], "model_type": "minimax_text_01",
                "attn_type_list": [0, 0, 0, 1], "head_dim": 128,
            },
            [("full", 1, 8, 128), ("state", 3, None, None)],
            4096,
        ),
        (
            {
                "architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni",
                "thinker_config": {"model_type": "qwen2_5_omni_thinker", "text_config": QWEN},
            },
            [("full", 28, 4, 128)],
            32768,
        ),
    ],
)  # fmt: skip
def test_layers_are_those_of_the_class(
    plan: Any, tmp_path: Path, config: Said, layers: list[tuple[object, ...]], length: int
) -> None:
    found = plan("epyc-9755-1p", "--kv-cache", "64GiB", folder=model(tmp_path / "model", config))
    (its,) = found["models"]
    shown = [(its["kind"], its["count"], its["kv_heads"], its["head_size"]) for its in its["layers"]]
    assert shown == layers
    assert its["max_model_len"] == length
    assert not found["violations"]


def test_a_decoder_keeps_its_encoders_tokens_though_only_its_class_says_that_there_is_one(
    plan: Any, tmp_path: Path
) -> None:
    whisper = {
        "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 512, "decoder_layers": 6,
        "encoder_layers": 6, "decoder_attention_heads": 8, "encoder_attention_heads": 8, "max_source_positions": 1500,
        "max_target_positions": 448,
    }  # fmt: skip
    (its,) = plan("epyc-9755-1p", folder=model(tmp_path / "model", whisper))["models"]
    assert [(layer["kind"], layer["count"]) for layer in its["layers"]] == [("full", 6), ("cross", 6)]


def test_mistrals_own_files_are_enough(plan: Any, tmp_path: Path) -> None:
    folder = Path(model(tmp_path / "model", LLAMA))
    (folder / "config.json").unlink()
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    params = {"dim": 1024, "n_layers": 4, "n_heads": 8, "n_kv_heads": 2, "head_dim": 128, "vocab_size": 1000}
    (folder / "params.json").write_text(json.dumps(params))
    found = plan("epyc-9755-1p", "--kv-cache", "64GiB", folder=str(folder))
    (its,) = found["models"]
    assert [(layer["count"], layer["kv_heads"]) for layer in its["layers"]] == [(4, 2)]
    assert not found["violations"]


def test_what_engine_args_override_in_a_description_is_planned(plan: Any, tmp_path: Path) -> None:
    folder = model(tmp_path / "model", LLAMA)
    words = ("--hf-overrides", '{"num_key_value_heads": 2}', "--hf-overrides.max_position_embeddings", "8192")
    found = plan("epyc-9755-1p", "--set", f"engine.args={json.dumps(words)}", folder=folder)
    (its,) = found["models"]
    assert (its["max_model_len"], its["layers"][0]["kv_heads"]) == (8192, 2)
    assert not found["violations"]


def test_weights_whose_headers_are_not_read_are_a_warning(plan: Any, tmp_path: Path) -> None:
    folder = Path(model(tmp_path / "model", LLAMA))
    (folder / "model.safetensors").rename(folder / "model.tensors")
    found = plan("epyc-9755-1p", folder=str(folder))
    assert not found["violations"]
    assert "weights-format" in codes(found, "warning")


@pytest.mark.parametrize("config", [{"model_type": "nobody_knows"}, {"num_hidden_layers": "many"}, {}])
def test_what_is_not_understood_starts_with_an_explicit_cache(
    plan: Any, tmp_path: Path, config: Said
) -> None:
    found = plan("epyc-9755-1p", "--kv-cache", "16GiB", folder=model(tmp_path / "model", config or {"x": 1}))
    assert not found["violations"]
    assert "memory-unchecked" in codes(found, "warning")
