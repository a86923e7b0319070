"""A vLLM's load, from its page."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.telemetry.vllm_metrics import EngineLoad, read_load

REAL = (Path(__file__).parent / "vllm-0.32.0.metrics.txt").read_text()


def test_a_real_page() -> None:
    load = read_load(REAL)
    assert load is not None
    assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)
    assert load.kv_tokens is not None
    assert load.kv_tokens % 128 == 0


def test_engines_are_summed() -> None:
    page = (
        'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4.0\n'
        'vllm:num_requests_waiting{engine="0"} 1.0\nvllm:num_requests_waiting_by_reason{engine="0"} 7.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 5e-1\n'
        'vllm:cache_config_info{block_size="128",num_cpu_blocks="None",num_gpu_blocks="10"} 1.0\n'
    )
    assert read_load(page) == EngineLoad(7, 1, 0.5, 1280)


def test_a_page_of_llama_server() -> None:
    page = "llamacpp:n_decode_total 7\nllamacpp:requests_processing 3\nllamacpp:requests_deferred 2\n"
    assert read_load(page) == EngineLoad(3, 2)
    assert read_load("llamacpp:requests_processing 3\n") is None


@pytest.mark.parametrize(
    "page", ["", "x 1\n", "vllm:num_requests_running 1\n", "vllm:num_requests_running nan\n"]
)
def test_no_vllm(page: str) -> None:
    assert read_load(page) is None


@given(st.text("vllm:nu_requests 0.e+-\n{}", max_size=200))
def test_anything_is_read(text: str) -> None:
    read_load(f"vllm:num_requests_running {text}\nvllm:num_requests_waiting {text}\n")
