"""The start-up phase of an engine, from its log lines. Pure."""

from __future__ import annotations

from typing import Final

# vLLM 0.32: entrypoints/openai/api_server.py, v1/engine/core.py, model_loader/, cpu_model_runner.py.
_PHASES: Final = (
    ("non-default args:", "importing"),
    ("Initializing a V1 LLM engine", "starting workers"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "weights loaded"),
    ("Warming up model for the compilation", "compiling"),
    ("for KV cache on node", "allocating KV cache"),
    ("init engine (profile, create kv cache, warmup model) took", "opening the API"),
    ("Application startup complete", "answering a first completion"),
)


def phase_of(line: str) -> str | None:
    """The phase that a log line announces, or None."""
    return next((phase for mark, phase in _PHASES if mark in line), None)
