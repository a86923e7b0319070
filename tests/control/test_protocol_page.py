"""docs/control-protocol.md says what the code does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.accounts.cost import CostReport, OverflowCost, PerMillion
from launcher.accounts.references import Comparison
from launcher.accounts.report_values import UsageReport, UsageRequest, UsageRequests, UsageRow
from launcher.accounts.timeline import Step, Timeline, TimelineTokens
from launcher.base.watched_file import FileState
from launcher.control.messages import ENDPOINTS, PREFIX, SlotCommand
from launcher.control.protocol_page import examples, fields_of, to_markdown
from launcher.daemon.machine import Disk, MachineStatus, Misplaced, NodeUse, SlotPlaces
from launcher.daemon.measured import Measurement
from launcher.daemon.status import Resident, SlotStatus, Status, Zentorch
from launcher.measure.tune.remembered import MeasuredLayout
from launcher.proxy.readings import KeyTotals, QueueState, TokenTotals

TYPES = (
    Status, QueueState, TokenTotals, KeyTotals, SlotStatus, Zentorch, Resident, MeasuredLayout, FileState,
    MachineStatus, NodeUse, SlotPlaces, Misplaced, Disk, Measurement,
    UsageReport, UsageRow, UsageRequests, UsageRequest,
    Timeline, TimelineTokens, Step, CostReport, PerMillion, Comparison, OverflowCost,
)  # fmt: skip
PAGE = Path(__file__).resolve().parents[2] / "docs" / "control-protocol.md"


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text() == to_markdown(TYPES), "run scripts/docs"


def test_every_verb_is_an_endpoint_and_every_endpoint_has_an_example() -> None:
    paths = [endpoint.path for endpoint in ENDPOINTS]
    for verb in SlotCommand:
        assert f"/slots/{{slot}}/{verb}" in paths
    shown = [line for _, line in examples()]
    for endpoint in ENDPOINTS:
        url = f"http://localhost{PREFIX}{endpoint.path.replace('{slot}', '0').replace('{request}', 'req-1')}"
        assert any(url in line for line in shown)
    assert all(line in PAGE.read_text().splitlines() for line in shown)


def test_methods_are_those_that_the_page_gives_a_role() -> None:
    assert {endpoint.method for endpoint in ENDPOINTS} == {"GET", "POST"}


def test_every_field_of_status_is_explained() -> None:
    names = [name for name, _, meaning in fields_of(SlotStatus) if meaning]
    assert names == list(SlotStatus.__struct_fields__)


def test_every_promised_field_is_on_the_page() -> None:
    """Also the inner ones of types that are not of launcher/control."""
    promised = json.loads((Path(__file__).resolve().parents[1] / "cli" / "status-v1.json").read_text())
    page = PAGE.read_text()
    for path in promised:
        name = path.rpartition(".")[2].removesuffix("[]")
        assert f"`{name}`" in page or name == "status", path


def test_a_field_without_docstring_is_found() -> None:
    @dataclass
    class Bare:
        named: int
        """With words."""
        other: int

    with pytest.raises(ValueError, match=r"Bare.other has no docstring"):
        list(fields_of(Bare))
