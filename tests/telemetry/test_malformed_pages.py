"""Metrics pages of engines that are broken, hostile, or no engines: read without an error, and no number that is none."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from launcher.telemetry.engine_metrics import EngineMetrics, parse
from launcher.telemetry.merge import Merger, Page

NAMES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:generation_tokens_total",
    "vllm:iteration_tokens_total_count",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:cache_config_info",
    "llamacpp:requests_processing",
    "llamacpp:n_decode_total",
    "llamacpp:prompt_tokens_total",
    "python_info",
)
LABELS = (
    "",
    "{}",
    '{engine="0"}',
    '{engine="}"}',
    '{engine="0',
    'engine="0"}',
    '{block_size="16",num_gpu_blocks="64"}',
    f'{{block_size="{"9" * 5000}",num_gpu_blocks="2"}}',
    f'{{kv_cache_size_tokens="{"9" * 5000}"}}',
)
VALUES = st.one_of(
    st.sampled_from(["NaN", "+Inf", "-Inf", "inf", "nan", "-1", "1e308", "9" * 400, "1e-400", "", "0x1", "1_0", "1.0 1795"]),
    st.floats().map(repr),
    st.integers().map(str),
    st.text(max_size=8),
)  # fmt: skip
LINE = st.one_of(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(LABELS), st.sampled_from((" ", "\t", "", "  ")), VALUES).map("".join),
    st.sampled_from(["# TYPE vllm:num_requests_running gauge", "# HELP", "#", "\r", "\0"]),
    st.text(max_size=20),
)  # fmt: skip
WELL = "\n".join(f"{name} 1.0" for name in NAMES[:7])
PAGE = st.one_of(
    st.lists(LINE, max_size=12).map("\n".join),
    st.lists(LINE, max_size=3).map(lambda lines: "\n".join([WELL, *lines])),
    st.binary(max_size=200).map(lambda page: page.decode(errors="replace")),
)


def is_count(value: float) -> bool:
    return math.isfinite(value) and 0 <= value < 2**63


@given(PAGE)
def test_the_values_of_any_page_are_counts(page: str) -> None:
    found = parse(page)
    if found is not None:
        counts = (
            found.running, found.waiting, found.generated, found.steps, found.prefix_queries, found.prefix_hits,
            found.kv_usage or 0, found.kv_tokens or 0,
        )  # fmt: skip
        assert all(is_count(value) for value in counts)


@given(st.lists(PAGE, max_size=3))
def test_any_pages_can_be_merged(pages: list[str]) -> None:
    merger = Merger()
    for generation in (1, 2):
        merger.begin()
        for slot, page in enumerate(pages):
            merger.add(Page(page, {"slot": str(slot)}, slot, generation))
        merger.end()


def test_a_value_that_is_not_a_count_is_not_read_as_zero() -> None:
    """Two engine cores on one page, and one of them reports NaN: the sum is not known."""
    assert parse(WELL) == EngineMetrics(1, 1, 1, 1, 1.0, 1, 1)
    for odd in (
        'vllm:num_requests_running{engine="1"} NaN',
        'vllm:kv_cache_usage_perc{engine="1"} NaN',
        f"vllm:cache_config_info{LABELS[-1]} 1.0",
    ):
        assert parse(f"{WELL}\n{odd}") is None


def test_a_label_may_contain_a_brace() -> None:
    page = WELL.replace(" 1.0", '{model_name="a}b"} 2.0')
    found = parse(page)
    assert found is not None
    assert found.running == 2
