"""What the endpoint's metrics say about a point, read from pages as the proxy serves them: up to a second old."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.bench_endpoint import Endpoint

from launcher.measure.bench.endpoint import Observed, Observer, opening_events, time


class CachedPage:
    """A page that is made anew once a second at most."""

    def __init__(self) -> None:
        self.now = 0.0
        self.finished = 0
        self._made: tuple[float, str] | None = None

    def read(self) -> str:
        if self._made is None or self.now - self._made[0] >= 1.0:
            self._made = self.now, f'vllm:request_success_total{{slot="0"}} {self.finished}\n'
        return self._made[1]


def test_requests_that_ended_after_the_last_page_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = CachedPage()

    def sleep(duration_s: float) -> None:
        endpoint.now += duration_s

    monkeypatch.setattr(time, "sleep", sleep)
    observer = Observer(endpoint.read)
    endpoint.now, endpoint.finished = 10.0, 14
    observer.sample(measuring=True)
    endpoint.now, endpoint.finished = 10.3, 16
    assert observer.end().requests_by_instance == {"0": 16}


def test_an_endpoint_without_a_page_costs_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _s: pytest.fail("it waited"))
    assert Observer(lambda: None).end() == Observed()


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
WORD = {"choices": [{"index": 0, "delta": {"content": "blue"}, "finish_reason": None}]}
BOTH = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "blue"}, "finish_reason": None}]}
SILENT = {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": None}]}
NOTHING = {"choices": [], "usage": None}


@pytest.mark.parametrize(
    ("events", "opening"),
    [
        ([ROLE, WORD, WORD], 1),
        ([NOTHING, ROLE, WORD], 1),
        ([BOTH, WORD], 0),
        ([WORD], 0),
        # A token of half a character has no text: the load generator rightly takes it for one.
        ([ROLE, SILENT, WORD], 1),
        ([SILENT, WORD], 0),
        ([], 0),
    ],
)
def test_a_role_alone_is_no_first_token(endpoint: Endpoint, events: list[object], opening: int) -> None:
    endpoint.chat = [json.dumps(event).encode() for event in events]
    assert opening_events(endpoint.target, "chat") == opening
    assert opening_events(endpoint.target, "completions") == 0


def test_an_endpoint_without_an_answer_has_no_opening(endpoint: Endpoint) -> None:
    endpoint.chat = [b"{not JSON"]
    assert opening_events(endpoint.target, "chat") == 0
    assert opening_events(replace(endpoint.target, url="http://127.0.0.1:9"), "chat") == 0
