"""`plan --json` and the terminal table."""

from __future__ import annotations

import json

from msgspec.structs import replace
from support.plans import make_plan
from support.synthetic import Machine

from launcher.base.text import GIB
from launcher.config.schema import Config, Layout, Model
from launcher.models.profile import ModelProfile
from launcher.plan.plan import Plan
from launcher.plan.plan_text import plan_json, short_list, slot_json, to_text

PROFILE = ModelProfile(
    weights_bytes=GIB, kv_bytes_per_token=1024, max_model_len=4096, num_attention_heads=8, num_kv_heads=8
)
MACHINE = Machine(cores=128, node_bytes=256 * GIB)


def make(machine: Machine = MACHINE, **model: object) -> tuple[object, ...]:
    config = Config(
        models=(Model(name="m", path="/m", **model),),  # type: ignore[arg-type]
        layout=Layout(instances_per_socket=2, reserve_cores=2),
    )
    return make_plan(machine.topology(), config, {"m": PROFILE}), machine.topology()


def test_json_form() -> None:
    plan, _ = make(tensor_parallel_size=2)
    shown = plan_json(plan, {0: {"argv": ["numactl"], "env": {"A": "b"}}})  # type: ignore[arg-type]
    assert json.loads(json.dumps(shown)) == shown
    slot = shown["slots"][0]
    assert list(slot) == [
        "slot", "model", "socket", "node", "cpus", "omp_cpus", "membind", "kv_cache_bytes", "dtype",
        "tensor_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "argv", "env",
    ]  # fmt: skip
    assert (slot["dtype"], slot["tensor_parallel_size"], slot["max_num_seqs"]) == ("bfloat16", 2, 64)
    assert slot["cpus"].startswith("0,2,4,")
    assert slot["omp_cpus"].count("|") == 1
    assert slot["membind"] == "0"
    assert shown["reserved"] == "126-127"
    assert [set(entry) for entry in shown["warnings"]] == [{"code", "message", "remedy"}]
    assert shown["violations"] == []
    assert shown["ledger"][0]["slots"] == [0, 1]


def test_slot_without_kv_or_node() -> None:
    plan, _ = make()
    assert slot_json(plan.slots[1])["slot"] == 1  # type: ignore[attr-defined]


def test_text() -> None:
    plan, topology = make()
    text = to_text(plan, topology)  # type: ignore[arg-type]
    assert "interleaved: 2 instances on 1 socket\n" in text
    assert "reserved for proxy and OS: 126-127" in text
    assert max(map(len, text.splitlines())) < 130
    refused, topology = make(Machine(cores=128, node_bytes=GIB))
    shown = to_text(refused, topology)  # type: ignore[arg-type]
    assert "\ncannot fit 2 instances on node 0: " in shown


def test_long_lists_are_shortened_for_a_column() -> None:
    assert short_list("0-63") == "0-63"
    assert short_list(",".join(map(str, range(0, 128, 2)))) == "0,2,4,6,8,10,12,14,...,126"


def test_where_the_figures_come_from() -> None:
    plan, topology = make()
    text = to_text(plan, topology)  # type: ignore[arg-type]
    assert "\nsources of the figures:\n  reserve 8 GiB (node 0): 5 %, at most 8 GiB\n" in text
    assert "\n  weights 1 GiB (slot 0-1): unknown\n" in text
    assert "starts: " not in text
    lines = plan_json(plan)["ledger"][0]["lines"]  # type: ignore[arg-type]
    assert lines[0] == {
        "what": "reserve",
        "slot": None,
        "size_bytes": 8 * GIB,
        "source": "5 %, at most 8 GiB",
    }
    assert plan_json(plan)["start_order"] == [[0, 1]]  # type: ignore[arg-type]


def test_a_node_with_little_free_memory_starts_one_at_a_time() -> None:
    plan, topology = make()
    assert isinstance(plan, Plan)
    tight = replace(plan, ledger=tuple(replace(row, available_bytes=GIB) for row in plan.ledger))
    assert plan_json(tight)["start_order"] == [[0], [1]]
    assert "starts: slots 0, then 1: less memory is free now" in to_text(tight, topology)  # type: ignore[arg-type]


def test_one_instance_without_numa() -> None:
    config = Config(models=(Model(name="m", path="/m"),), layout=Layout(instances_per_socket=1))
    topology = replace(Machine(cores=4).topology(), has_numa=False)
    text = to_text(make_plan(topology, config, {"m": PROFILE}), topology)
    assert "\n  reserve 3.2 GiB: 5 %" in text
    assert "starts:" not in text
