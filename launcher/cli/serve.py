"""`numa-launcher serve`."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
from typing import TYPE_CHECKING, Final, TypeVar

from launcher.base import build
from launcher.cli import options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from launcher.base.errors import PassingError
    from launcher.daemon.deployment import Deployment

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_config(parser)


# Between two looks at a model that is not there: a late mount comes within seconds, a server that is away in hours.
FIRST_WAIT_S: Final = 1.0
LONGEST_WAIT_S: Final = 30.0


def when_there(
    build: Callable[[], T], wait: Callable[[float], object], tell: Callable[[PassingError], None]
) -> T:
    """What `build` makes, as soon as what it needs is there: after a PassingError it is asked again, `wait` seconds later.

    `tell` gets each new error. Raises LauncherError for any other."""
    from launcher.base.errors import PassingError  # noqa: PLC0415  heavy

    delay_s, told = FIRST_WAIT_S, ""
    while True:
        try:
            return build()
        except PassingError as error:
            if error.message != told:
                told = error.message
                tell(error)
        wait(delay_s)
        delay_s = min(LONGEST_WAIT_S, 2 * delay_s)


def run(args: argparse.Namespace) -> int:
    from launcher.daemon.container_init import become_child_of_init  # noqa: PLC0415  before all that is heavy

    # As process 1 of a container; must run before threads start.
    if (ended := become_child_of_init()) is not None:
        return ended
    # Nothing that is imported is garbage: looking for it takes a tenth of the time.
    gc.disable()
    import uvloop  # noqa: PLC0415  heavy

    from launcher.base import log_lines, processes  # noqa: PLC0415  heavy
    from launcher.cli import told  # noqa: PLC0415  it imports this module
    from launcher.daemon import process  # noqa: PLC0415  heavy
    from launcher.daemon.deployment import (  # noqa: PLC0415  heavy
        asking_at_start,
        build_deployment,
        require_models,
    )
    from launcher.daemon.main import serve  # noqa: PLC0415  heavy
    from launcher.daemon.measured import with_measured_layout  # noqa: PLC0415  heavy
    from launcher.daemon.waiting import StandbyServer, require  # noqa: PLC0415  heavy

    gc.enable()
    config = options.config_of(args)
    log_lines.set_up(config.logging.level, config.logging.format.value)
    try:
        if build.build() == "stale":
            logging.getLogger(__name__).warning(
                "compiled modules are stale, running the Python sources: %s", build.REMEDY
            )
        limit = processes.raise_limit()
        hangup = process.note_hangups()

        def build_now() -> Deployment:
            hangup.clear()
            now = options.config_of(args)
            require(now)
            return with_measured_layout(build_deployment(now, asking=asking_at_start(now)))

        def tell(text: str) -> None:
            logging.getLogger(__name__).warning("%s", text)
            process.status(text)

        with StandbyServer(config.control, tell) as standby:
            deployment = when_there(build_now, hangup.wait, standby.tell)
        config = deployment.config
        if warning := processes.too_few(limit, config.proxy.max_connections, deployment.connections):
            logging.getLogger(__name__).warning("%s", warning)

        def reread(overrides: Sequence[str]) -> Deployment:
            again = argparse.Namespace(**vars(args) | {"overrides": [*args.overrides, *overrides]})
            after = options.config_of(again)
            require_models(after)
            return with_measured_layout(build_deployment(after))

        with (
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            process.loop_threads(runner.get_loop(), told),
        ):
            runner.run(serve(deployment, reread, lambda: options.config_of(args), hung_up=hangup.is_set))
    finally:
        log_lines.finish()
    return 0
