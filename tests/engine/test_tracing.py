"""One trace of a request: the proxy's spans, and vLLM's own below the attempt."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from support.daemon_process import DaemonProcess, eventually
from support.engine_runs import READY_S, Configure
from support.otlp_receiver import receiving, uncovered

pytestmark = [pytest.mark.engine, pytest.mark.release, pytest.mark.timeout(1200)]

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "00f067aa0ba902b7"


def ask(url: str, parent: str | None) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "stream": True,
    }
    headers = {"Content-Type": "application/json"} | ({} if parent is None else {"traceparent": parent})
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        assert b"[DONE]" in answer.read()


def test_vllm_s_span_is_below_the_attempt(tmp_path: Path, configure: Configure) -> None:
    with receiving() as receiver:
        args = ["--otlp-traces-endpoint", f"{receiver.url}/v1/traces"]
        more = (
            '[engine.env]\nOTEL_EXPORTER_OTLP_TRACES_PROTOCOL = "http/protobuf"\nOTEL_BSP_SCHEDULE_DELAY = "200"\n'
            f'[telemetry]\notlp_endpoint = "{receiver.url}"\notlp_sampling = 0\n'
        )
        daemon = DaemonProcess(tmp_path, configure(instances=1, args=args) + more)
        try:
            daemon.wait_ready(1, READY_S)
            ask(daemon.url, None)  # not sampled: vLLM must not trace it either
            ask(daemon.url, f"00-{TRACE}-{SPAN}-01")
            eventually(lambda: len(receiver.of(TRACE)) >= 4, what="spans of both")
        finally:
            daemon.end()
        spans = receiver.of(TRACE)
        own = [span for span in spans if span.service == "numa-launcher"]
        (theirs,) = [span for span in spans if span.service != "numa-launcher"]
        assert [span.name for span in own] == ["chat tiny", "queue", "attempt"]
        assert (own[0].parent_id, theirs.name, theirs.parent_id) == (SPAN, "llm_request", own[2].span_id)
        # The event loop's clock has milliseconds.
        assert own[2].begin - 0.01 <= theirs.begin <= theirs.end <= own[2].end + 0.05
        assert theirs.attributes["gen_ai.usage.completion_tokens"] == 8
        assert uncovered(own) < 0.01
        # vLLM also traces its own start and the supervisor's probes, of one token each.
        tokens = [
            span.attributes["gen_ai.usage.completion_tokens"]
            for span in receiver.spans
            if span.name == "llm_request"
        ]
        assert tokens.count(8) == 1
