"""The tables of columns."""

from __future__ import annotations

from pathlib import Path

from launcher.instances.slot_state import State
from launcher.telemetry.history_columns import HOST, KEPT, SLOT, STATES, SlotValues

PROMISED = (
    "requests_per_s", "failed_per_s", "prompt_tokens_per_s", "output_tokens_per_s", "first_token_p50_s",
    "first_token_p99_s", "queued", "oldest_queued_s", "in_flight", "ready", "kv_usage", "prefix_hit_rate", "cpu_busy",
    "memory_free_bytes", "overflow_per_s", "queue_rejected_per_s", "cost_per_hour",
)  # fmt: skip


def test_the_promised_columns_are_there() -> None:
    assert HOST == PROMISED
    assert set(KEPT) - set(HOST) == {"prefix_queries_per_s", "prefix_hits_per_s"}
    assert set(SLOT) == set(SlotValues.__struct_fields__) - {"slot"}


def test_every_state_of_a_slot_can_be_kept() -> None:
    assert set(STATES) == {state.value for state in State}


def test_every_column_is_explained() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "history.md").read_text(encoding="utf-8")
    for name in (*HOST, *(f"slot.N.{name}" for name in SLOT)):
        assert f"`{name}`" in page
