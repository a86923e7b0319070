"""Traces of a daemon, with and without a collector; what `why` says of the same request."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from support.daemon_process import DaemonProcess, eventually
from support.otlp_receiver import receiving, uncovered
from support.ports import free_port

pytestmark = pytest.mark.timeout(120)

Start = Callable[..., DaemonProcess]


def ask(daemon: DaemonProcess, name: str) -> None:
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 5,
        "stream": True,
    }
    assert daemon.ask("/v1/chat/completions", body, X_Request_Id=name)[0] == 200


def metric(daemon: DaemonProcess, line: str) -> float:
    lines = daemon.metrics().splitlines()
    return next(float(found.rpartition(" ")[2]) for found in lines if found.startswith(line))


def test_a_daemon_sends_traces_and_tells_the_same(start: Start) -> None:
    with receiving() as receiver:
        daemon = start(
            "--token-s",
            "0.2",
            instances=1,
            more=f'[telemetry]\notlp_endpoint = "{receiver.url}"\notlp_sampling = 1\n',
        )
        daemon.wait_ready(1)
        ask(daemon, "req-1")
        spans = receiver.wait(3)
        ask(daemon, "req-2")
        daemon.end()  # at once: what waits is sent
        assert len(receiver.of(receiver.spans[-1].trace_id)) == 3
    assert [span.name for span in spans[:3]] == ["chat fake", "queue", "attempt"]
    assert uncovered(spans[:3]) < 0.1
    assert spans[0].attributes["numa_launcher.request.id"] == "req-1"
    assert spans[0].attributes["gen_ai.usage.output_tokens"] == 5
    assert spans[0].service == "numa-launcher"


def test_why_of_a_request_and_a_collector_that_is_gone(start: Start) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    daemon = start(instances=1, more=f'[telemetry]\notlp_endpoint = "{endpoint}"\notlp_sampling = 1\n')
    daemon.wait_ready(1)
    ask(daemon, "req-1")
    found = json.loads(daemon.cli("why", "req-1", "--json").stdout)
    assert [step["what"] for step in found["steps"]] == ["received", "sent", "first token", "ended"]
    assert (found["outcome"], found["source"], len(found["trace_id"])) == ("completed", "memory", 32)
    said = daemon.cli("why", "req-1").stdout
    assert f"trace:   {found['trace_id']}" in said
    done = daemon.cli("why", "req-0")
    assert done.returncode == 2
    assert "memory has all requests since the daemon's start" in done.stderr
    warning = f"cannot send traces to '{endpoint}': connection refused"
    eventually(lambda: any(warning in each for each in daemon.status()["warnings"]), what="warning")
    assert metric(daemon, "numa_launcher_traces_waiting") == 1
    assert metric(daemon, 'numa_launcher_traces_dropped_total{reason="queue_full"}') == 0
    daemon.end()
