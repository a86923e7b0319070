"""A short measurement of one host, to compare it with itself: streamed requests, one after the other."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from statistics import median
from typing import Final

from launcher.base.errors import LauncherError, reason
from launcher.fleet.loads import trust

REQUESTS: Final = 8
TOKENS: Final = 32
TIMEOUT_S: Final = 120.0


def measure(address: str, model: str, key: str | None, ca: str | None) -> tuple[float, float]:
    """Medians of the seconds to the first token and per token after it. Raises LauncherError."""
    try:
        found = [_stream(address, model, key, ca, number) for number in range(REQUESTS + 1)]
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error) or type(error).__name__
        raise LauncherError(
            f"cannot measure {address}: {why}", "see the daemon's log, or leave out --bench"
        ) from None
    # The first one warms up.
    return median(first for first, _ in found[1:]), median(each for _, each in found[1:])


def _stream(address: str, model: str, key: str | None, ca: str | None, number: int) -> tuple[float, float]:
    began = time.monotonic()
    times = [at - began for at in _tokens(address, model, key, ca, number)]
    if not times:
        raise ValueError("a stream without tokens")
    return times[0], (times[-1] - times[0]) / max(1, len(times) - 1)


def _tokens(address: str, model: str, key: str | None, ca: str | None, number: int) -> Iterator[float]:
    """The times of a stream's events that bring text. Prompts differ, so that no prefix cache has them."""
    connection = _connection(address, ca)
    body = {
        "model": model, "prompt": f"{number} {time.time_ns()}: count to ten", "max_tokens": TOKENS, "stream": True,
        "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise ValueError(f"status {response.status}")
        for line in response:
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError("the stream ended in an error")
                if any(choice.get("text") for choice in event.get("choices", ())):
                    yield time.monotonic()
        raise ValueError("a stream was broken off")
    finally:
        connection.close()


def _connection(address: str, ca: str | None) -> http.client.HTTPConnection:
    if (context := trust(ca)) is None:
        return http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    return http.client.HTTPSConnection(address, timeout=TIMEOUT_S, context=context)
