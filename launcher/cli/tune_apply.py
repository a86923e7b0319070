"""`tune --apply`: the measured layout into the configuration file, and from there into the running service."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from launcher.cli import options, reload
from launcher.cli.screen_lines import Output
from launcher.control.client import ControlClient, UnreachableError
from launcher.daemon.deployment import build_deployment
from launcher.daemon.measured import fingerprint_of
from launcher.errors import LauncherError, RefusedError, TimedOutError
from launcher.tuning.apply import Applied, apply_layout
from launcher.tuning.best_file import recall
from launcher.tuning.fingerprint import differences
from launcher.tuning.remembered import BestLayout, choose

_POLL_S: Final = 0.5
_UNDER_WAY: Final = frozenset({"running", "rolling back"})


def file_of(args: argparse.Namespace) -> Path:
    return args.config or options.DEFAULT_CONFIG


def apply_latest(args: argparse.Namespace, state: Path) -> int:
    """Apply the remembered result for this configuration's model. Exit code 1: the service does not use it."""
    config = options.config_of(args)
    today = fingerprint_of(build_deployment(config))
    best = choose(recall(state), today)
    if best is None:
        raise LauncherError(
            f"cannot apply a layout: no finished run in '{state}'",
            "run numa-launcher tune, then tune --apply",
        )
    if changed := differences(best.fingerprint, today):
        raise RefusedError(
            f"cannot apply the layout of run '{best.run}': changed since: {'; '.join(changed)}",
            "run numa-launcher tune again",
        )
    out = Output(sys.stderr if args.json else sys.stdout)
    applied = apply(best, config.control.socket, file_of(args), out)
    if args.json:
        print(json.dumps({"run": best.run, "applied": applied}, indent=2))
    return int(not applied["in_use"])


def apply(best: BestLayout, socket: str, file: Path, out: Output) -> dict[str, Any]:
    """What was done, as JSON. `in_use` is False when a running daemon did not take the layout. Raises LauncherError."""
    found: dict[str, Any] = {"file": str(file), "changed": [], "kept": None, "reload": None, "in_use": True}
    if not best.different:
        out.print("nothing to apply: no layout differs from the default")
        return found
    applied = apply_layout(file, best.layout, now=datetime.now(UTC))
    found |= {"changed": list(applied.changed), "kept": None if applied.kept is None else str(applied.kept)}
    if applied.kept is None:
        out.print(f"{file}: has the layout already")
    else:
        out.print(
            f"{file}: written; the old file is {applied.kept}", *(f"  {line}" for line in applied.changed)
        )
    try:
        stage, text = _reload(ControlClient(socket))
    except TimedOutError:  # the reload may have begun
        raise
    except LauncherError:
        _restore(applied, out)
        raise
    found |= {"reload": stage, "in_use": stage in {"done", "not running"}}
    out.print(text)
    if stage == "rolled back":
        _restore(applied, out)
    return found


def _reload(client: ControlClient) -> tuple[str, str]:
    """The stage that it ended in, and a line for people."""
    try:
        changes = client.post("/reload?dry_run=1", reload.BEGIN_S)["changes"]
    except UnreachableError:
        return "not running", "no daemon is running: the next start uses the layout"
    if changes["needs_restart"]:
        keys = ", ".join(changes["needs_restart"])
        return "restart needed", f"only a restart applies {keys}: systemctl restart numa-launcher"
    now = client.post("/reload", reload.BEGIN_S)
    while now["stage"] in _UNDER_WAY:
        time.sleep(_POLL_S)
        now = client.get("/reload")
    return str(now["stage"]), "reload: " + "\n".join(reload.outcome_lines(now))


def _restore(applied: Applied, out: Output) -> None:
    """The service kept its old layout; so does the file."""
    if applied.kept is not None:
        applied.kept.replace(applied.file.resolve())
        out.print(f"{applied.file}: restored")
