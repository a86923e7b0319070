from __future__ import annotations

import pytest

from launcher.measure.bench.published import Source, published, same_model, size_in_billions

SOURCES = {source.name: source for source in published().sources}


def row(source: Source, model: str) -> dict[str, float | None]:
    its = next(its for its in source.results if its.model == model)
    return {"total": its.total_tokens_per_s, "output": its.output_tokens_per_s, "ttft": its.ttft_p50_s}


def test_every_source_names_machine_stack_and_origin() -> None:
    assert len(SOURCES) == 4
    for source in SOURCES.values():
        assert source.cores > 1
        assert all((source.reference, source.machine, source.stack, source.driver, source.workload))
        assert source.core in {"core", "vCPU"}
        assert len({its.model for its in source.results}) == len(source.results)


def test_amd_publishes_total_tokens_of_256_cores() -> None:
    several = SOURCES["AMD, several pinned instances, ZenDNN"]
    assert (several.cores, len(several.results)) == (256, 9)
    assert row(several, "Llama-3.1-8B") == {"total": 3491.72, "output": None, "ttft": None}
    assert row(SOURCES["AMD, one instance, no ZenDNN"], "Llama-3.3-70B")["total"] == 142.1


def test_rackspace_publishes_output_and_total_tokens_of_24_vcpus() -> None:
    zentorch = SOURCES["Rackspace, one instance, ZenTorch"]
    assert (zentorch.cores, zentorch.core, len(zentorch.results)) == (24, "vCPU", 11)
    assert row(zentorch, "Qwen3-8B") == {"total": 79.5, "output": 39.75, "ttft": 1.72428}


@pytest.mark.parametrize("name", [name for name in SOURCES if name.startswith("Rackspace")])
def test_rackspaces_total_is_twice_its_output(name: str) -> None:
    """128 tokens in, 128 out; some tokenizers took 127."""
    for its in SOURCES[name].results:
        assert its.output_tokens_per_s is not None
        assert its.total_tokens_per_s / its.output_tokens_per_s == pytest.approx(2, rel=0.01)


def test_two_sockets_gain_more_than_one_by_amds_figures() -> None:
    (one_socket,) = published().ratios
    several, one = (
        SOURCES[f"AMD, {stack}"] for stack in ("several pinned instances, ZenDNN", "one instance, no ZenDNN")
    )
    for its in one_socket.results:
        over, under = (row(source, its.model)["total"] for source in (several, one))
        assert over is not None
        assert under is not None
        assert over / under > its.ratio > 1


@pytest.mark.parametrize(
    ("served", "same"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", True),
        ("/models/llama-3.1-8b", True),
        ("Meta-Llama-3.1-8B", True),
        ("Llama-3.1-70B", False),
        ("tiny", False),
    ],
)
def test_same_model(served: str, same: bool) -> None:
    assert same_model("Llama-3.1-8B", served) is same


@pytest.mark.parametrize(
    ("model", "size"),
    [("Mixtral-8x7B", 56), ("Qwen3-0.6B", 0.6), ("gpt-j-6b", 6), ("phi-4", 15), ("tiny", 0)],
)
def test_size_in_billions(model: str, size: float) -> None:
    assert size_in_billions(model) == size
