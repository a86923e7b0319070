from __future__ import annotations

import msgspec
import pytest
from support.bench_results import GENOA, SOFTWARE, result

from launcher.measure.bench.setting import (
    conditions_that_differ,
    cpu_count,
    hardware_facts,
    plan_in_words,
    slo_in_words,
    versions_that_differ,
)

PLAN = {"strategy": "interleaved", "slots": [{"cpus": "0,2,4-5"}, {"cpus": "1,3,6"}]}


def test_equal_settings_do_not_differ() -> None:
    assert conditions_that_differ(result(), result(first_seed=9)) == []
    assert versions_that_differ(result(), result(first_seed=9)) == []


def test_every_condition_that_differs_is_said_in_words() -> None:
    a = result()
    b = result(
        model="Qwen3-8B", workload="chat", workload_options={"input_tokens": 256, "turns": 3}, driver="guidellm",
        slo={"ttft_p99": 2.0}, cores=None,
        hardware=msgspec.structs.replace(
            GENOA, governor="powersave", smt=False, memory_bytes=768 * 1024**3, memory_speed_mts=None
        ),
    )  # fmt: skip
    assert [str(difference) for difference in conditions_that_differ(a, b)] == [
        "hardware memory: 1.5 TiB in A, 768 GiB in B",
        "hardware memory speed: 6400 MT/s in A, not known in B",
        "hardware governor: performance in A, powersave in B",
        "hardware SMT: on in A, off in B",
        "model: Llama-3.1-8B in A, Qwen3-8B in B",
        "workload: amd-128 in A, chat in B",
        "workload's input_tokens: 128 in A, 256 in B",
        "workload's output_tokens: 128 in A, not known in B",
        "load generator: vllm 0.32.0 in A, guidellm 0.32.0 in B",
        "SLO: none in A, TTFT p99 ≤ 2.00 s in B",
        "cores: 252 in A, not known in B",
        "workload's turns: not known in A, 3 in B",
    ]


def test_plan_and_versions_are_what_a_comparison_may_be_about() -> None:
    a, b = (
        result(),
        result(plan=PLAN, software=msgspec.structs.replace(SOFTWARE, vllm="0.33.0", zentorch=None)),
    )
    assert conditions_that_differ(a, b) == []
    assert [str(difference) for difference in versions_that_differ(a, b)] == [
        "plan: not known in A, interleaved: 2 instances, 3 to 4 cpus each in B",
        "vLLM: 0.32.0 in A, 0.33.0 in B",
        "ZenTorch: 2.13.0.1 in A, not known in B",
    ]


def test_a_foreign_endpoint_is_described_by_what_is_known() -> None:
    foreign = result(hardware=None, software=None, plan=None)
    assert hardware_facts(foreign) == {}
    assert plan_in_words(foreign) == "not known"
    assert plan_in_words(result(plan={"strategy": "whole", "slots": []})) == "not known"
    assert (
        plan_in_words(result(plan={"slots": "0-3"}))
        == plan_in_words(result(plan={"slots": [3]}))
        == "not known"
    )


def test_a_hostile_name_cannot_write_to_the_terminal() -> None:
    (difference,) = conditions_that_differ(result(), result(model="a\x1b[2Jb"))
    assert str(difference) == "model: Llama-3.1-8B in A, a\\x1b[2Jb in B"


@pytest.mark.parametrize(("cpulist", "count"), [("", 0), ("3", 1), ("0-3,8", 5), ("all", 0)])
def test_cpu_count(cpulist: str, count: int) -> None:
    assert cpu_count(cpulist) == count


def test_slo_in_words() -> None:
    assert (
        slo_in_words(result(slo={"ttft_p99": 2.0, "itl_p99": 0.15})) == "TTFT p99 ≤ 2.00 s, ITL p99 ≤ 150 ms"
    )
