"""scripts/time-start: seconds until vLLM answers, for one instance and several, before and after compiling."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launcher.base.errors import LauncherError  # noqa: E402
from launcher.control.client import ControlClient  # noqa: E402
from launcher.engines import tiny_model  # noqa: E402

READY_S: Final = 1800.0
BUDGET: Final = 1.3
_STALLED: Final = re.compile(r"^some .*total=(\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Took:
    """One start of all instances."""

    first_s: float
    all_s: float
    others_waited: float
    """Share of the time in which some task of this host waited for a cpu."""


def config(args: argparse.Namespace, folder: Path, instances: int) -> str:
    """The quickstart's configuration with another number of instances."""
    return f"""
[[models]]
name = "m"
path = {json.dumps(str(args.model))}
max_model_len = 2048
max_num_seqs = 16
[layout]
instances_per_socket = {instances}
reserve_cores = 0
[engine]
command = {json.dumps([args.vllm])}
cache_dir = {json.dumps(str(folder / "cache"))}
[proxy]
listen = ["unix:{folder}/api.sock"]
[control]
socket = "{folder}/control.sock"
[supervision]
spawner = "direct"
probe_interval_s = 1
"""


def stalled_us() -> int:
    """Microseconds since boot in which some task waited for a cpu; 0 where the kernel does not count."""
    try:
        found = _STALLED.search(Path("/proc/pressure/cpu").read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0


def start(args: argparse.Namespace, folder: Path, instances: int) -> Took:
    """Starts a daemon, waits until all instances are ready, stops it. Raises SystemExit if they do not become ready."""
    file = folder / "config.toml"
    file.write_text(config(args, folder, instances))
    client = ControlClient(str(folder / "control.sock"))
    began, stalled = time.monotonic(), stalled_us()
    first = None
    with (folder / "serve.log").open("ab") as log:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "launcher", "serve", "-c", str(file)],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env=os.environ | {"STATE_DIRECTORY": str(folder / "state")},
        )
        try:
            while True:
                ready, slots = count_ready(client)
                now = time.monotonic() - began
                first = now if first is None and ready else first
                if 0 < slots == ready:
                    waited = (stalled_us() - stalled) / 1e6 / now
                    return Took(first or now, now, waited)
                if daemon.poll() is not None or now > READY_S:
                    raise SystemExit(f"cannot time the start: it failed\n{log_tail(folder)}")
                time.sleep(0.1)
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait()


def count_ready(client: ControlClient) -> tuple[int, int]:
    """Ready instances, and all instances; (0, 0) while the daemon does not answer."""
    try:
        status: dict[str, Any] = client.get("/status")
    except LauncherError:
        return 0, 0
    return int(status["ready"]), len(status["slots"])


def log_tail(folder: Path) -> str:
    """The end of the daemon's log, for the error message."""
    return "\n".join((folder / "serve.log").read_text(errors="replace").splitlines()[-20:])


def main() -> int:
    """Returns 0 if N instances are ready within the budget, else 1."""
    parser = argparse.ArgumentParser(prog="scripts/time-start", description=__doc__)
    parser.add_argument("--instances", type=int, default=2, metavar="N", help="per socket (default 2)")
    parser.add_argument("--model", type=Path, help="model directory (default: a tiny one, made here)")
    parser.add_argument("--vllm", default=str(Path(sys.executable).with_name("vllm")), help="vLLM's command")
    args = parser.parse_args()
    print(f"{'what':<44} {'first':>7} {'all':>7} {'cpus waited for':>16}", flush=True)
    rows: dict[tuple[int, str], Took] = {}
    with tempfile.TemporaryDirectory() as top:
        if args.model is None:
            args.model = Path(top) / "model"
            tiny_model.make(args.model)
        for instances in (1, args.instances):
            folder = Path(top) / str(instances)
            folder.mkdir()
            for caches in ("nothing compiled", "all compiled"):
                rows[instances, caches] = took = start(args, folder, instances)
                what = f"{instances} instance{'s' * (instances > 1)}, {caches}"
                waited = f"{took.others_waited * 100:.0f} %"
                print(f"{what:<44} {took.first_s:>5.1f} s {took.all_s:>5.1f} s {waited:>16}", flush=True)
    good = True
    for caches in ("nothing compiled", "all compiled"):
        ratio = rows[args.instances, caches].all_s / rows[1, caches].all_s
        good = good and ratio <= BUDGET
        print(f"{args.instances} ÷ 1, {caches}: {ratio:.2f} (budget {BUDGET})")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
