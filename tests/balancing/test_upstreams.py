"""The table: ready, draining, gone, and generations that overlap."""

from __future__ import annotations

from launcher.balancing.upstreams import Upstream, UpstreamTable
from launcher.base.address import UnixAddress


def up(slot: int, generation: int = 1, model: str = "m") -> Upstream:
    return Upstream(slot, generation, model, UnixAddress("/x"), 8)


def slots(table: UpstreamTable, model: str | None = None) -> list[tuple[int, int]]:
    return [row.key for row in table.ready(model)]


def test_ready_by_model_without_tried_instances_in_order() -> None:
    table = UpstreamTable()
    for row in (up(2), up(0), up(1, model="n")):
        table.add(row)
    assert slots(table) == [(0, 1), (1, 1), (2, 1)]
    assert slots(table, "m") == [(0, 1), (2, 1)]
    assert [row.key for row in table.ready("m", {(0, 1)})] == [(2, 1)]


def test_idle_is_reported_once_per_drain() -> None:
    table = UpstreamTable()
    row = table.add(up(0))
    assert row is not None
    row.in_flight += 1
    assert not table.became_idle(row)
    table.drain(0, 1)
    assert slots(table) == []
    assert not table.became_idle(row)
    row.in_flight -= 1
    assert table.became_idle(row)
    assert not table.became_idle(row)


def test_adding_again_cancels_a_drain() -> None:
    table = UpstreamTable()
    table.add(up(0))
    row = table.drain(0, 1)
    assert table.add(up(0)) is row
    assert slots(table) == [(0, 1)]
    assert row is not None
    assert not table.became_idle(row)


def test_a_new_generation_replaces_and_stale_events_change_nothing() -> None:
    table = UpstreamTable()
    old = table.add(up(0, 1))
    assert old is not None
    old.in_flight += 1
    table.add(up(0, 2))
    assert slots(table) == [(0, 2)]
    table.drain(0, 1)
    old.in_flight -= 1
    assert table.became_idle(old)
    assert table.remove(0, 1, "exit") is old
    assert table.remove(0, 1, "exit") is None
    assert table.drain(0, 1) is None
    assert table.add(up(0, 1)) is None
    assert slots(table) == [(0, 2)]


def test_a_removed_upstream_never_becomes_idle() -> None:
    table = UpstreamTable()
    row = table.add(up(0))
    assert row is not None
    row.in_flight += 1
    table.drain(0, 1)
    table.remove(0, 1, "killed")
    row.in_flight -= 1
    assert not table.became_idle(row)


def test_models_without_instances() -> None:
    table = UpstreamTable()
    table.add(up(0, 1))
    table.add(up(0, 2))
    assert table.of("another") == []
    assert table.of("m") is table.of("m")
    table.remove(0, 2, "exit")
    assert table.of("m") == []
