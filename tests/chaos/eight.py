"""`numa-launcher serve` with a made-up topology of eight slots.

    python -m chaos.eight CONFIG [--nodes N]

Nothing is tied to cpus that are not there: neither numactl nor taskset starts the instances.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

import uvloop
from msgspec.structs import replace
from support.synthetic import Machine

from launcher.base import log_lines
from launcher.config.loading import load_config
from launcher.daemon.deployment import build_deployment
from launcher.daemon.main import serve
from launcher.engines.make import make_engine
from launcher.engines.numactl import Binding, MemPolicy


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("config", type=Path)
    parser.add_argument("--nodes", type=int, default=8)
    args = parser.parse_args()
    config = load_config(args.config, environ=os.environ)
    log_lines.set_up(config.logging.level, config.logging.format.value)
    deployment = build_deployment(
        config, machine=Machine(nodes=args.nodes, cores=1).topology(), cpus_only=True
    )
    binding = Binding(MemPolicy.NONE)
    engine = make_engine(config, deployment.stack, binding, deployment.run_dir)
    deployment = replace(deployment, binding=binding, engine=engine)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(deployment))


if __name__ == "__main__":
    main()
