"""Results of measurements that never ran: planted throughput and latencies, for the tests of report and comparison."""

from __future__ import annotations

from typing import Any

import numpy as np

from launcher.measure.bench.result import BenchResult, ClientCost, Hardware, Percentiles, Point, Software

GENOA = Hardware(
    cpu_model="AMD EPYC 9755 128-Core Processor", sockets=2, cores=256, cpus=512, allowed_cpus=512, numa_nodes=2,
    nodes_per_socket=1.0, memory_bytes=1536 * 1024**3, memory_limit_bytes=None, memory_speed_mts=6400,
    memory_modules=24, governor="performance", boost=True, smt=True, transparent_hugepages="madvise", kernel="6.12.0",
    virtual=False,
)  # fmt: skip
SOFTWARE = Software(
    numa_launcher="0.1.0", engine="vllm", vllm="0.32.0", torch="2.13.0", zentorch="2.13.0.1", python="3.12.3"
)


def percentiles(samples: list[float]) -> Percentiles:
    p50, p95, p99 = (float(each) for each in np.quantile(samples, [0.5, 0.95, 0.99]))
    return Percentiles(mean=float(np.mean(samples)), p50=p50, p95=p95, p99=p99)


def point(
    *,
    concurrency: int | None = 4,
    rate: float | None = None,
    seed: int = 0,
    speed: float = 1.0,
    noise: float = 0.02,
    requests: int = 64,
    **fields: Any,
) -> Point:
    """One run of an endpoint that is `speed` times as fast as that of speed 1, give or take `noise`."""
    generator = np.random.default_rng([seed, concurrency or 0, round((rate or 0) * 100), requests])
    speed *= 1 + float(generator.normal(0, noise))
    load = concurrency or 8
    gap = 0.04 * (1 + load / 64) / speed
    ttft = [
        0.2 * (1 + load / 16) / speed * float(each) for each in np.exp(generator.normal(0, 0.3, requests))
    ]
    itl = [gap * float(each) for each in np.exp(generator.normal(0, 0.2, requests * 16))]
    e2e = [
        first + 127 * gap * float(each)
        for first, each in zip(ttft, 1 + generator.normal(0, 0.03, requests), strict=True)
    ]
    per_s = load / float(np.mean(e2e))
    values: dict[str, Any] = {
        "concurrency": concurrency, "rate": rate, "seed": seed, "duration_s": requests / per_s, "completed": requests,
        "failed": 0, "input_tokens": 128 * requests, "output_tokens": 128 * requests, "requests_per_s": per_s,
        "output_tokens_per_s": 128 * per_s, "total_tokens_per_s": 256 * per_s, "ttft_s": percentiles(ttft),
        "tpot_s": percentiles(itl), "itl_s": percentiles(itl), "e2e_s": percentiles(e2e), "goodput_per_s": None,
        "kv_use_max": 0.1 + load / 200, "prefix_hit_share": 0.0,
        "requests_by_instance": {"0": requests // 2, "1": requests - requests // 2},
        "client": ClientCost(cpu_s=1.0, share=0.1, limited=False), "ttft_samples_s": ttft, "itl_samples_s": itl,
        "e2e_samples_s": e2e, "driver_file": "0.json",
    }  # fmt: skip
    return Point(**{**values, **fields})


def result(
    *,
    concurrencies: tuple[int, ...] = (4,),
    runs: int = 3,
    first_seed: int = 0,
    speed: float = 1.0,
    noise: float = 0.02,
    requests: int = 64,
    **fields: Any,
) -> BenchResult:
    points = [
        point(concurrency=each, seed=first_seed + run, speed=speed, noise=noise, requests=requests)
        for run in range(runs)
        for each in concurrencies
    ]
    values: dict[str, Any] = {
        "id": "20261122-171200", "started_at": "2026-11-22T17:12:00+00:00", "url": "http://127.0.0.1:8000",
        "model": "Llama-3.1-8B", "workload": "amd-128", "workload_options": {"input_tokens": 128, "output_tokens": 128},
        "driver": "vllm", "driver_version": "0.32.0", "slo": {}, "cores": 252, "hardware": GENOA, "software": SOFTWARE,
        "plan": None, "picture_svg": None, "points": points,
    }  # fmt: skip
    return BenchResult(**{**values, **fields})


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
