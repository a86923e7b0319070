"""An instance with a rank on each of 2 and 4 nodes, in virtual hosts; guest/ranks.py records the facts.

vLLM itself needs more memory than such a host has: guest/ranked_vllm.py binds itself as vLLM does."""

from __future__ import annotations

import re
from typing import Any

from launcher.base.cpuset import CpuSet

Facts = dict[str, Any]


def placed(verified: Facts) -> None:
    """Each rank is on its node, and nothing differs."""
    assert verified["status"] == 0, verified
    (slot,) = verified["slots"]
    assert slot["verified"]["differences"] == []
    for rank in slot["verified"]["ranks"]:
        assert rank["policies"] == [f"bind:{rank['node']}"]
        assert rank["bound_share"] > 0.95
        assert rank["cpus"] == rank["planned_cpus"]
    assert len({rank["pid"] for rank in slot["verified"]["ranks"]}) == len(slot["verified"]["ranks"])


def test_the_plan_has_a_rank_on_each_node(ranks: Facts) -> None:
    plan, nodes = ranks["plan"], {node["id"]: node["cpus"] for node in ranks["topology"]["numa_nodes"]}
    assert plan["status"] == 0, plan
    (chosen,) = plan["chosen_ranks"]
    assert chosen["tensor_parallel_size"] == len(nodes)
    assert f"it fits on {len(nodes)} nodes, a rank on each" in chosen["why"]
    (slot,) = plan["slots"]
    lists = [CpuSet.parse(cpus) for cpus in slot["omp_cpus"].split("|")]
    assert all(cpus <= CpuSet.parse(nodes[node]) for node, cpus in enumerate(lists))
    assert CpuSet.parse(slot["membind"]) == CpuSet(nodes)
    assert "tensor_parallel_size of large: " in ranks["plan-text"]["out"]


def test_the_ledger_has_a_row_with_its_part_for_each_rank(ranks: Facts) -> None:
    rows = ranks["plan"]["ledger"]
    assert len({row["weights_bytes"] for row in rows}) == 1
    assert {row["kv_bytes"] for row in rows} == {8 << 20}
    assert sum(row["weights_bytes"] for row in rows) == {2: 100 << 20, 4: 200 << 20}[len(rows)]
    assert all(row["left_bytes"] >= 0 for row in rows)


def test_each_rank_is_verified_on_its_node(ranks: Facts) -> None:
    assert ranks["ready"], ranks["journal"][-3000:]
    placed(ranks["verify"])
    found = ranks["verify"]["slots"][0]["verified"]["ranks"]
    assert [rank["node"] for rank in found] == ranks["nodes"]
    assert len(
        re.findall(
            r"^  rank \d+: .* memory bind:\d+, \d+% of its pages", ranks["verify-text"]["out"], re.MULTILINE
        )
    ) == len(found)


def test_the_kernel_says_the_same(ranks: Facts) -> None:
    for node, maps in enumerate(ranks["maps"]):
        assert set(re.findall(r"^[0-9a-f]+ (\S+) .*N\d+=", maps, re.MULTILINE)) == {f"bind:{node}"}


def test_pages_of_one_rank_on_another_s_node_are_reported(ranks: Facts) -> None:
    moved = ranks["migratepages"]
    assert moved["status"] == 1
    (difference,) = moved["slots"][0]["verified"]["differences"]
    last = len(ranks["nodes"]) - 1
    assert difference["what"].startswith(f"memory of rank {last}, ")
    assert difference["planned"] == f"at least 95% on node {last}"
    assert "MiB on node 0" in difference["found"]


def test_a_killed_rank_takes_its_instance_along_and_is_the_cause(ranks: Facts) -> None:
    killed = ranks["killed"]
    assert len(killed["before"]) == 2 + len(ranks["nodes"])
    assert killed["left"] == []
    assert killed["slot"]["generation"] == 2
    last = len(ranks["nodes"]) - 1
    # The unit may not read the kernel's log: then a killed process counts as one that the kernel may have killed.
    assert killed["slot"]["last_cause"]["name"] in {"killed-by-operator", "node-oom"}
    assert killed["slot"]["last_cause"]["message"].endswith(
        f"(signal 9); the process of rank {last} ended first"
    )
    assert f"the process of rank {last} ended first" in killed["why"]
    placed(ranks["killed-verify"])


def test_a_drain_ends_no_stream_and_a_restart_leaves_no_process(ranks: Facts) -> None:
    assert ranks["drain"]["done"]["status"] == 0, ranks["drain"]
    assert ranks["drain"]["stream"].rstrip().endswith("data: [DONE]")
    assert ranks["restart"]["done"]["status"] == 0, ranks["restart"]
    assert ranks["restart"]["left"] == []
    assert ranks["restart"]["slot"]["generation"] == 3
    placed(ranks["restart-verify"])


def test_a_stop_leaves_no_process(ranks: Facts) -> None:
    assert ranks["stop"]["status"] == 0, ranks["stop"]
    assert ranks["left"] == []
