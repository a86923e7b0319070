#!/opt/venv/bin/python
"""What a host's test starts in vLLM's place: `vllm serve MODEL --uds PATH ...`. It compiles, and serves as fake_engine.

A kernel is a file as Inductor leaves it: written elsewhere, then renamed; one that is there is not compiled again.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, "/srv")
import fake_engine

KERNELS = ("aa", "bb", "cc")


def compiled() -> int:
    """Compile what is not there; how much that was."""
    made = 0
    inductor, root = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]), Path(os.environ["VLLM_CACHE_ROOT"])
    for name in KERNELS:
        kernel = inductor / name / f"c{name}.so"
        if not kernel.exists():
            kernel.parent.mkdir(parents=True, exist_ok=True)
            part = kernel.with_suffix(f".{os.getpid()}.tmp")
            part.write_bytes(os.urandom(64))
            part.rename(kernel)
            made += 1
    graph = root / "torch_compile_cache" / "0123" / "rank_0_0" / "computation_graph.py"
    graph.parent.mkdir(parents=True, exist_ok=True)
    graph.touch(mode=0o600)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--uds", required=True)
    parser.add_argument("--served-model-name", required=True)
    args, _ = parser.parse_known_args(sys.argv[3:])
    try:
        print(f"stand-in: {compiled()} kernels compiled", flush=True)
    except OSError as error:
        print(f"stand-in: no cache: {error}", flush=True)
    print("init engine (profile, create kv cache, warmup model) took 1.00 seconds", flush=True)
    scratch = Path(os.environ["VLLM_RPC_BASE_PATH"])
    (scratch / "left-behind").touch(exist_ok=False)
    sys.argv = ["fake_engine", "--uds", args.uds, "--model", args.served_model_name]
    fake_engine.main()


if __name__ == "__main__":
    main()
