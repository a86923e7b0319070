"""Engines' metrics pages: vLLM's and llama-server's."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.telemetry.engine_metrics import EngineMetrics, parse

REAL = (Path(__file__).parent / "vllm-0.32.0.metrics.txt").read_text()
# vLLM 0.32's page, shortened.
PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:generation_tokens_total{engine="0",model_name="tiny"} 413.0
vllm:generation_tokens_created{engine="0",model_name="tiny"} 1.7952161791400313e+09
vllm:iteration_tokens_total_bucket{engine="0",le="8.0",model_name="tiny"} 7.0
vllm:iteration_tokens_total_count{engine="0",model_name="tiny"} 400.0
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 100.0
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 40.0
"""
# Of a llama-server of build 11434, started with --metrics, in the midst of an answer.
LLAMA_PAGE = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 60
llamacpp:prompt_tokens_cached_total 40
llamacpp:prompt_seconds_total 0.0525
llamacpp:tokens_predicted_total 413
llamacpp:n_decode_total 1.23457e+06
llamacpp:n_tokens_max 58
llamacpp:requests_processing 1
llamacpp:requests_deferred 2
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 7
"""


def test_a_real_page() -> None:
    found = parse(REAL)
    assert found is not None
    assert (found.running, found.waiting, found.generated, found.kv_usage) == (0, 0, 72, 0.0)
    assert found.kv_tokens is not None
    assert found.kv_tokens % 128 == 0


def test_a_page_of_vllm() -> None:
    assert parse(PAGE) == EngineMetrics(1, 2, 413, 400, 0.25, 100, 40)
    two = PAGE + PAGE.replace('engine="0"', 'engine="1"')
    assert parse(two) == EngineMetrics(2, 4, 826, 800, 0.25, 200, 80)


def test_the_limit_of_adapters() -> None:
    labels = 'max_lora="{}",running_lora_adapters="sql",waiting_lora_adapters=""'
    page = PAGE + "".join(f"vllm:lora_requests_info{{{labels.format(n)}}} 1.7e+09\n" for n in (2, 4, "x"))
    found = parse(page)
    assert found is not None
    assert found.max_adapters == 4


def test_a_page_of_llama_server() -> None:
    expected = EngineMetrics(1, 2, 413, 1_234_570, prefix_queries=100, prefix_hits=40)
    assert parse(LLAMA_PAGE) == expected
    old = "llamacpp:prompt_tokens_total 60\nllamacpp:requests_processing 0\n"
    assert parse(old) == EngineMetrics(0, 0, 0, 60, prefix_queries=60)
    assert parse("llamacpp:requests_processing nan\n") is None


def test_llama_server_rounds_large_counters() -> None:
    found = parse(LLAMA_PAGE.replace("1.23457e+06", "1.23457e+08"))
    assert found is not None
    assert found.rounded


def test_kv_cache_of_several_engine_cores() -> None:
    page = PAGE + (
        'vllm:kv_cache_usage_perc{engine="1"} 5e-1\n'
        'vllm:cache_config_info{block_size="128",num_cpu_blocks="None",num_gpu_blocks="10"} 1.0\n'
        'vllm:cache_config_info{kv_cache_size_tokens="20",block_size="128",num_gpu_blocks="10"} 1.0\n'
    )
    found = parse(page)
    assert found is not None
    assert (found.kv_usage, found.kv_tokens) == (0.5, 1300)


@pytest.mark.parametrize(
    "page",
    [
        "", "x 1\n", "<html>404</html>", "python_info 1.0\n",
        "vllm:num_requests_running 1.0", "vllm:num_requests_running nan\n",
    ],
)  # fmt: skip
def test_other_pages_are_not_read(page: str) -> None:
    assert parse(page) is None


@given(st.text("vllm:nu_requests 0.e+-\n{}", max_size=200))
def test_any_text_is_read_without_an_error(text: str) -> None:
    parse(f"vllm:num_requests_running {text}\nvllm:generation_tokens_total {text}\n")
