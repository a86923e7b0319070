"""`bench` on real vLLM: what its result says is what its load generator and the endpoint say."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from support.daemon_process import DaemonProcess
from support.engine_runs import bench, stored

approx = partial(pytest.approx, rel=1e-9)
pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

REQUESTS = 8


def test_figures_are_those_of_the_load_generator_and_of_the_endpoint(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """No probe request; the spread over the instances is that of the measured requests alone."""
    done = bench(
        daemon,
        tmp_path,
        "--concurrency",
        "1,4",
        "--requests",
        str(REQUESTS),
        "--slo",
        "ttft_p99=60s",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    result = stored(tmp_path)
    assert json.loads(done.stdout)["id"] == result.id
    assert [point.concurrency for point in result.points] == [1, 4]
    for point in result.points:
        file = json.loads((tmp_path / "bench" / point.driver_file).read_text())
        # Both add up the same floats, in another order.
        assert point.output_tokens_per_s == approx(file["output_throughput"])
        assert point.total_tokens_per_s == approx(file["total_token_throughput"])
        assert point.requests_per_s == point.goodput_per_s == approx(file["request_throughput"])
        for name, key in (("ttft_s", "ttft"), ("tpot_s", "tpot"), ("itl_s", "itl"), ("e2e_s", "e2el")):
            its = getattr(point, name)
            assert (its.mean, its.p50, its.p95, its.p99) == approx(
                tuple(file[f"{part}_{key}_ms"] / 1000 for part in ("mean", "p50", "p95", "p99"))
            )
        assert point.output_tokens == REQUESTS * 128
        assert point.requests_by_instance is not None
        assert sum(point.requests_by_instance.values()) == REQUESTS
        assert point.kv_use_max is not None
        assert point.prefix_hit_share is not None
    assert min(result.points[1].requests_by_instance.values()) > 0, "four at once: both instances take part"
    assert result.cores == 2
    assert result.software is not None
    assert result.software.vllm
    assert result.plan is not None
    assert "<svg" in (result.picture_svg or "")
