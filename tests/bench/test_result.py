"""Stored results can be read again: what one version writes, it reads."""

from __future__ import annotations

import msgspec

from launcher.bench.result import BenchResult, ClientCost, Percentiles, Point, Software

POINT = Point(
    concurrency=4,
    rate=None,
    seed=1,
    duration_s=2.0,
    completed=20,
    failed=0,
    input_tokens=2560,
    output_tokens=2560,
    requests_per_s=10.0,
    output_tokens_per_s=1280.0,
    total_tokens_per_s=2560.0,
    ttft_s=Percentiles(mean=0.1, p50=0.1, p95=0.2, p99=0.3),
    tpot_s=None,
    itl_s=None,
    e2e_s=None,
    goodput_per_s=None,
    kv_use_max=None,
    prefix_hit_share=None,
    requests_by_instance={"0": 10, "1": 10},
    client=ClientCost(cpu_s=0.2, share=0.1, limited=False),
    ttft_samples_s=[0.1, 0.2],
    itl_samples_s=[],
    e2e_samples_s=[],
    driver_file="",
)
RESULT = BenchResult(
    id="20261122-170000",
    started_at="2026-11-22T17:00:00+00:00",
    url="http://127.0.0.1:8000",
    model="demo",
    workload="rackspace-128",
    workload_options={"input_len": 128},
    driver="vllm",
    driver_version="0.32.0",
    slo={"ttft_p99": 2.0},
    cores=2,
    hardware=None,
    software=Software(
        numa_launcher="0.1.0", engine="vllm", vllm="0.32.0", torch="2.13.0", zentorch=None, python="3.11"
    ),
    plan=None,
    picture_svg=None,
    points=[POINT],
)


def test_a_result_is_read_as_it_was_written() -> None:
    assert msgspec.json.decode(msgspec.json.encode(RESULT), type=BenchResult) == RESULT
