"""`numa-launcher serve`."""

from __future__ import annotations

import argparse
import asyncio
import logging
from typing import TYPE_CHECKING

from launcher.base import build
from launcher.cli import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.daemon.deployment import Deployment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_config(parser)


def run(args: argparse.Namespace) -> int:
    from launcher.daemon.container_init import become_child_of_init  # noqa: PLC0415  before all that is heavy

    # As process 1 of a container; must run before threads start.
    if (ended := become_child_of_init()) is not None:
        return ended
    import uvloop  # noqa: PLC0415  heavy

    from launcher.base import log_lines, processes  # noqa: PLC0415  heavy
    from launcher.daemon.deployment import build_deployment  # noqa: PLC0415  heavy
    from launcher.daemon.main import serve  # noqa: PLC0415  heavy
    from launcher.daemon.measured import with_measured_layout  # noqa: PLC0415  heavy

    config = options.config_of(args)
    log_lines.set_up(config.logging.level, config.logging.format.value)
    try:
        if build.build() == "stale":
            logging.getLogger(__name__).warning(
                "compiled modules are stale, running the Python sources: %s", build.REMEDY
            )
        limit = processes.raise_limit()
        deployment = with_measured_layout(build_deployment(config))
        if warning := processes.too_few(limit, config.proxy.max_connections, deployment.connections):
            logging.getLogger(__name__).warning("%s", warning)

        def reread(overrides: Sequence[str]) -> Deployment:
            again = argparse.Namespace(**vars(args) | {"overrides": [*args.overrides, *overrides]})
            return with_measured_layout(build_deployment(options.config_of(again)))

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(deployment, reread, lambda: options.config_of(args)))
    finally:
        log_lines.finish()
    return 0
