"""A remembered verdict, and the fingerprint of the machine that it was measured on."""

from __future__ import annotations

from msgspec.structs import replace

from launcher.config.schema import Strategy
from launcher.machine.hardware import read_hardware
from launcher.machine.named import find_topology
from launcher.measure.bench.result import Software
from launcher.measure.tune.identity import Fingerprint, ModelFingerprint
from launcher.measure.tune.model import Layout
from launcher.measure.tune.remembered import BestLayout

HARDWARE = replace(
    read_hardware(find_topology("epyc-9755-1p"), None),
    memory_modules=12, memory_speed_mts=6000, governor="performance", boost=True,
    transparent_hugepages="madvise", kernel="6.8.0-45-generic",
)  # fmt: skip
SOFTWARE = Software(
    numa_launcher="0.1.0",
    engine="vllm",
    vllm="0.32.0",
    torch="2.13.0+cpu",
    zentorch="2.13.0.1",
    python="3.12.3",
)
MODEL = ModelFingerprint(path="/srv/models/llama", config_sha256="c0ffee", weights_bytes=16_000_000_000)
FINGERPRINT = Fingerprint(hardware=HARDWARE, software=SOFTWARE, models=(MODEL,))
BEST = BestLayout(
    layout=Layout(strategy=Strategy.INTERLEAVED, instances_per_socket=4, reserve_cores=2),
    label="interleaved × 4, 2 cores reserved", different=True, ratio_to_default=1.312, interval=(1.268, 1.361),
    measured_at="2026-11-20T14:03:00+00:00", workload="chat", slo={"ttft_p99": 2.0}, run="20261120-140300",
    cpus=("0,2", "1,3"), fingerprint=FINGERPRINT,
)  # fmt: skip
