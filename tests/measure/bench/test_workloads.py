"""The table of workloads, and data sets of the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.base.errors import LauncherError
from launcher.measure.bench import workloads


def test_the_published_loads_are_as_published() -> None:
    rackspace, amd = workloads.named("rackspace-128"), workloads.named("amd-128")
    assert (rackspace.input_tokens, rackspace.output_tokens, rackspace.requests) == (128, 128, 20)
    assert (rackspace.concurrency, rackspace.temperature) == (4, 0.7)
    assert (amd.input_tokens, amd.output_tokens, amd.requests, amd.concurrency) == (128, 128, 1024, 128)


def test_every_workload_says_where_its_figures_come_from() -> None:
    assert set(workloads.all_workloads()) == {
        "rackspace-128",
        "amd-128",
        "chat",
        "rag",
        "batch",
        "embeddings",
    }
    for workload in workloads.all_workloads().values():
        assert workload.source
        assert workload.what
        assert workload.longest is not None


def test_an_unknown_workload_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LauncherError, match="'chess'") as caught:
        workloads.named("chess")
    assert "rackspace-128" in caught.value.remedy


def test_a_data_set_is_known_by_its_first_character(tmp_path: Path) -> None:
    file = tmp_path / "set.json"
    file.write_text('  [{"conversations": []}]')
    assert workloads.of_dataset(file).prompts == "sharegpt"
    file.write_text('{"prompt": "a"}\n')
    assert workloads.of_dataset(file).prompts == "requests"


def test_an_empty_data_set_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text("\n")
    with pytest.raises(LauncherError, match="it is empty"):
        workloads.of_dataset(file)
