"""A load generator that takes requests as `vllm bench serve` 0.32 takes them, and writes its result file.

`python small_bench.py URL FILE API MODEL REQUESTS TOKENS AT_ONCE`. In FILE.seen is what a careful client saw of the same
bytes.

vLLM's rules (benchmarks/lib/endpoint_request_func.py): an event with choices is a token, whatever it brings; a stream is
completed when one came and the body ended as HTTP wants it; without a usage the tokens are those of the text.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

Taken = dict[str, Any]
PROMPT = "word " * 8


class Request:
    """One request, as vLLM takes it, and as it was."""

    def __init__(self, url: str, api: str, model: str, tokens: int) -> None:
        self._host, self._chat = urlsplit(url).netloc, api == "chat"
        self._body: Taken = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        if self._chat:
            self._body |= {"messages": [{"role": "user", "content": PROMPT}], "max_completion_tokens": tokens}
        else:
            self._body |= {"prompt": PROMPT, "max_tokens": tokens}
        self.taken: Taken = {"ttft": 0.0, "itl": [], "latency": 0.0, "tokens": 0, "error": ""}
        self.seen: Taken = {"first": None, "last": None, "tokens": 0, "ended": False, "error": False}
        self._began = self._last = 0.0

    def ask(self) -> Request:
        connection = http.client.HTTPConnection(self._host, timeout=60)
        self._began = self._last = time.perf_counter()
        try:
            path = "/v1/chat/completions" if self._chat else "/v1/completions"
            connection.request("POST", path, json.dumps(self._body), {"Content-Type": "application/json"})
            self._read(connection.getresponse())
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            connection.close()
        return self

    def _fail(self, why: str) -> None:
        self.taken["error"], self.seen["error"] = why, True

    def _read(self, response: http.client.HTTPResponse) -> None:
        if response.status != 200:
            self._fail(response.reason)
            return
        for line in response:
            now, data = time.perf_counter(), line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                self.seen["ended"] = True
            elif data:
                self._event(json.loads(data), now)
        if not self.taken["ttft"]:
            self._fail("Never received a valid chunk to calculate TTFT.")
        self.taken["latency"] = self._last - self._began
        self.taken["tokens"] = self.taken["tokens"] or self.seen["tokens"]

    def _event(self, chunk: Taken, now: float) -> None:
        taken, seen = self.taken, self.seen
        seen["error"] |= "error" in chunk
        if not chunk.get("choices"):
            taken["tokens"] = (chunk.get("usage") or {}).get("completion_tokens", taken["tokens"])
            return
        if not taken["ttft"]:
            taken["ttft"] = now - self._began
        else:
            taken["itl"].append(now - self._last)
        self._last = now
        choice = chunk["choices"][0]
        if text := (choice["delta"].get("content") if self._chat else choice["text"]):
            seen["tokens"] += len(text.split())
            seen["first"] = seen["first"] or now - self._began
            seen["last"] = now - self._began


def main(words: list[str]) -> None:
    url, file, api, model, requests, tokens, at_once = words
    print("Starting main benchmark run...", flush=True)
    began = time.perf_counter()
    sent = [Request(url, api, model, int(tokens)) for _ in range(int(requests))]
    with ThreadPoolExecutor(int(at_once)) as pool:
        list(pool.map(Request.ask, sent))
    duration = time.perf_counter() - began
    taken = [each.taken for each in sent]
    result = {
        "duration": duration, "completed": sum(not each["error"] for each in taken),
        "latencies": [each["latency"] for each in taken], "ttfts": [each["ttft"] for each in taken],
        "itls": [each["itl"] for each in taken], "errors": [each["error"] for each in taken],
        "input_lens": [len(PROMPT.split())] * len(taken),
        "output_lens": [0 if each["error"] else each["tokens"] for each in taken],
    }  # fmt: skip
    with open(f"{file}.seen", "w", encoding="utf-8") as out:  # noqa: PTH123  no dependencies
        json.dump({"duration": duration, "requests": [each.seen for each in sent]}, out)
    with open(file, "w", encoding="utf-8") as out:  # noqa: PTH123
        json.dump(result, out)
    print("============ Serving Benchmark Result ============", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
