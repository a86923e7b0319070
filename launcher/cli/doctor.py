"""`numa-launcher doctor`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.config.schema import Config
    from launcher.doctor.facts import AskedModel

from launcher.base.errors import LauncherError
from launcher.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c", "--config", type=Path, metavar="FILE",
        help="check the engine, certificate and keys of this configuration file (default: vllm, and the files of "
        f"{options.DEFAULT_CONFIG})",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print every check and the performance tier. Exit code 1 when a check fails."""
    from msgspec.structs import replace  # noqa: PLC0415  heavy

    from launcher.base.redaction import Redactor  # noqa: PLC0415  heavy
    from launcher.config.loading import load_config  # noqa: PLC0415  heavy
    from launcher.config.schema import Engine  # noqa: PLC0415  heavy
    from launcher.doctor.checks import examine  # noqa: PLC0415  heavy
    from launcher.doctor.gather import gather  # noqa: PLC0415  heavy
    from launcher.doctor.rows import to_json, to_text  # noqa: PLC0415  heavy
    from launcher.engines.make import engine_type  # noqa: PLC0415  heavy

    config: Config | None = None
    if args.config is not None:
        config = load_config(args.config, environ=os.environ)
    else:
        # Of the service: it says what is wrong with it when it starts, and this user may not be allowed to read it.
        with contextlib.suppress(LauncherError):
            config = options.configured(None)
    named = config if args.config is not None else None
    engine = Engine() if named is None else named.engine
    facts = gather(engine, proxy=None if config is None else config.proxy)
    if named is not None:
        facts = replace(facts, models=_asked(named))
    report = examine(facts, engine_type(engine.kind).checks())
    redactor = Redactor()
    print(
        json.dumps(redactor.tree(to_json(report)), indent=2) if args.json else redactor.text(to_text(report))
    )
    return 1 if report.failed else 0


def _asked(config: Config) -> tuple[AskedModel, ...]:
    """The models of the configuration, after the engine was asked about them: seconds for each that is new to it."""
    from launcher.daemon.deployment import asked_profiles  # noqa: PLC0415  heavy
    from launcher.doctor.facts import AskedModel  # noqa: PLC0415  heavy
    from launcher.engines.checks import Trouble  # noqa: PLC0415  heavy
    from launcher.engines.make import engine_type  # noqa: PLC0415  heavy

    try:
        profiles = asked_profiles(config)
    except LauncherError as error:
        return (AskedModel(name="", doubts=(Trouble(error.message, error.remedy),)),)
    doubts_of, found = engine_type(config.engine.kind).doubts, []
    for name, profile in profiles.items():
        doubts = tuple(Trouble(its.message, its.remedy) for its in doubts_of(name, profile))
        asked = profile.engine_request
        if asked is not None:
            found.append(AskedModel(name, profile.weights_bytes, asked.request_bytes, asked.tokens, doubts))
        elif doubts:
            found.append(AskedModel(name, doubts=doubts))
    return tuple(found)
