"""The way in: `python -m bench.main COMMAND ARGUMENT...`, as scripts/bench-proxy and bench-balance call it."""

from __future__ import annotations

import importlib
import signal
import sys
from typing import Final

COMMANDS: Final = frozenset(
    {
        "proxies",
        "soak",
        "balance",
        "sim_balance",
        "ablation",
        "predictions",
        "ledger",
        "history",
        "polling",
        "fleet",
        "ingress",
        "serving",
    }
)


def main() -> int:
    """Run the command's module."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in COMMANDS:
        print(
            f"cannot run '{name}': there is none of that name\n  what to do: choose from {sorted(COMMANDS)}"
        )
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started is ended
    try:
        return int(importlib.import_module(f"bench.{name}").run(sys.argv[2:]))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
