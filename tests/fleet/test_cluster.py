"""What is read of Ray's nodes."""

from __future__ import annotations

from typing import Any

import pytest
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from launcher.fleet.cluster import RESOURCE, nodes_of


def node(id_: str, name: str = "h1", started_ms: int = 1, **fields: Any) -> GcsNodeInfo:
    return GcsNodeInfo(
        node_id=bytes.fromhex(id_), node_name=name, start_time_ms=started_ms, node_manager_address="10.0.0.1",
        node_manager_hostname="host-1", **{"resources_total": {RESOURCE: 1.0}, **fields},
    )  # fmt: skip


def test_a_host_is_named_by_its_node_and_known_by_all_its_names() -> None:
    (found,) = nodes_of([node("0a")])
    assert (found.id, found.host, found.address) == ("0a", "h1", "10.0.0.1")
    assert found.names == {"h1", "10.0.0.1", "host-1"}


@pytest.mark.parametrize("new", ["0a", "0f"])
def test_of_two_live_nodes_of_a_host_the_one_that_started_last_counts(new: str) -> None:
    """Power was away for less time than Ray takes to miss the old node; whatever the ids are."""
    old = node("0c", started_ms=1_000)
    for known in ([old, node(new, started_ms=2_000)], [node(new, started_ms=2_000), old]):
        assert [one.id for one in nodes_of(known)] == [new]


def test_nodes_that_are_dead_or_no_host_of_the_fleet_do_not_count() -> None:
    dead = node("0b", "h2", started_ms=9, state=GcsNodeInfo.DEAD)
    other = node("0d", "h3", resources_total={"CPU": 4.0})
    assert [one.host for one in nodes_of([dead, other, node("0a", "h4"), node("0e", "")])] == [
        "10.0.0.1",
        "h4",
    ]
