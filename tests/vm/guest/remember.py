"""In the guest, as root: what `tune` would remember about the configured layout, for the service to read in its sandbox."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.base.files import state_folder
from launcher.config.loading import load_config
from launcher.daemon.deployment import build_deployment
from launcher.daemon.measured import fingerprint_of
from launcher.measure.tune.model import Layout
from launcher.measure.tune.remembered import BestLayout, cpus_of, remember

deployment = build_deployment(load_config(Path("/etc/numa-launcher/config.toml"), environ=os.environ))
its = deployment.config.layout
best = BestLayout(
    layout=Layout(
        strategy=its.strategy, instances_per_socket=its.instances_per_socket, reserve_cores=its.reserve_cores
    ),
    label=deployment.headline, different=True, ratio_to_default=1.312, interval=(1.268, 1.361),
    measured_at="2026-11-20T14:03:00+00:00", workload="chat", slo={}, run="20261120-140300",
    cpus=cpus_of(deployment.to_json()), fingerprint=fingerprint_of(deployment),
)  # fmt: skip
print(remember(state_folder(None, os.environ, os.geteuid()), best))
