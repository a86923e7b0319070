"""A machine's speed as a command for `tune --measure`: the same for the same candidate, visit and repeat.

    python -I -S surface.py LOG [SECONDS]

LOG gets a line when a call begins and one when it has printed its figures."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

# Of each repeat, as a share of the rate.
NOISE = 0.01


def rate_of(plan: dict[str, Any]) -> float:
    """Several instances win, up to eight."""
    count = len(plan["slots"])
    return 100.0 * (1 + 0.1 * min(count, 8) - 0.05 * max(0, count - 8))


def note(log: str, *words: object) -> None:
    """One write of a line shorter than a page: whole, whoever else writes."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, (" ".join(map(str, words)) + "\n").encode())
    os.close(file)


def main() -> None:
    plan = json.load(sys.stdin)
    its, log = plan["candidate"], sys.argv[1]
    call = (its["visit"], its["repeat"], its["seed"], its["label"].replace(" ", "_"))
    note(log, "begin", *call)
    time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
    noise = random.Random(its["seed"]).gauss(0.0, NOISE)  # noqa: S311
    figures = {
        "output_tokens_per_s": rate_of(plan) * (1 + noise),
        "ttft_p99_s": 0.5,
        "itl_p99_s": 0.02,
        "failed": 0,
    }
    print(json.dumps(figures), flush=True)
    note(log, "end", *call)


if __name__ == "__main__":
    main()
