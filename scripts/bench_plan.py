"""What scripts/bench-plan runs: median, least and most of the runs, against the budgets.

Measured is the cpu time of this one thread: on an idle machine it is the wall time, and others at work do not lengthen it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.synthetic import Machine  # noqa: E402

from launcher.base.text import GIB  # noqa: E402
from launcher.config.schema import Config, Layout, Model, Strategy  # noqa: E402
from launcher.engines.make import engine_type  # noqa: E402
from launcher.machine import snapshot, sysfs  # noqa: E402
from launcher.models.profile import ModelProfile  # noqa: E402
from launcher.plan.planner import make_plan  # noqa: E402

READ_S = 0.100
PLAN_S = 0.200
PROFILE = ModelProfile(
    weights_bytes=16 * GIB,
    kv_bytes_per_token=131_072,
    max_model_len=8192,
    num_attention_heads=32,
    num_kv_heads=8,
)


def measure(what: str, work: Callable[[], object], runs: int, budget_s: float | None) -> bool:
    """Prints one row; returns whether the median is within the budget. A first run that warms the caches is not counted."""
    work()
    took = []
    for _ in range(runs):
        begin = time.process_time()
        work()
        took.append(time.process_time() - begin)
    median = statistics.median(took)
    good = budget_s is None or median <= budget_s
    budget = "" if budget_s is None else f"budget {budget_s * 1e3:5.0f}  {'ok' if good else 'OVER'}"
    print(f"{what:<44} {median * 1e3:7.1f} {min(took) * 1e3:7.1f} {max(took) * 1e3:7.1f}   {budget}".rstrip())
    return good


def main() -> int:
    """Returns 0 if all rows are within their budgets, else 1."""
    parser = argparse.ArgumentParser(prog="scripts/bench-plan", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="runs of each row (default 20)")
    parser.add_argument("--scale", type=float, default=1.0, help="multiply the budgets, for slow machines")
    args = parser.parse_args()
    runs = max(1, args.runs)
    config = Config(models=(Model(name="m", path="/m"),))
    large = Machine(sockets=2, nodes=4, l3=8, cores=8, smt=2, node_bytes=192 * GIB).topology()
    print(f"{f'{runs} runs, ms':<44} {'median':>7} {'min':>7} {'max':>7}")
    good = True
    with tempfile.TemporaryDirectory() as folder:
        root = Machine(sockets=2, nodes=4, l3=2, cores=8, smt=2).write(Path(folder) / "tree")
        good &= measure("read 256 cpus (a tree on disk)", lambda: sysfs.read(root), runs, READ_S * args.scale)
        file = Path(folder) / "snapshot.tar.gz"
        file.write_bytes(snapshot.capture(root, date="2026-01-01", version="0").data)
        measure("read the same from a snapshot", lambda: snapshot.read_snapshot(file), runs, None)
    measure("read this host", sysfs.read, runs, None)
    for strategy in Strategy:
        for count in ("auto", 32) if strategy is not Strategy.PER_NODE else ("auto",):
            layout = Layout(strategy=strategy, instances_per_socket=count)  # type: ignore[arg-type]
            asked = Config(models=config.models, layout=layout)
            good &= measure(
                f"plan 1,024 cpus {strategy.value}, {count} a socket",
                lambda asked=asked: make_plan(
                    large, asked, {"m": PROFILE}, planning=engine_type(asked.engine.kind).planning
                ),
                runs,
                PLAN_S * args.scale,
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
