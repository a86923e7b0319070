"""What is decided is what is done."""

from __future__ import annotations

import pytest
from proxy.proxy_under_test import ProxyUnderTest
from proxy.request.test_lifecycle import ALL, of, request_of

from launcher.proxy.request.actions import Action, State
from launcher.proxy.request.events import Event
from launcher.proxy.request.lifecycle import Lifecycle
from launcher.proxy.request.record import Request
from launcher.proxy.request.retry_policy import RetryPolicy


@pytest.mark.parametrize("state", State)
async def test_an_event_that_is_posted_does_what_advance_says(proxy: ProxyUnderTest, state: State) -> None:
    """`post` has the steps of `Lifecycle.advance` in its loop, to save their frame."""
    executor = proxy.server._executor
    performed: list[Action] = []

    def recorder(action: Action) -> None:
        def record(_request: Request, _event: Event, _now: float) -> None:
            performed.append(action)

        executor._do[action] = record

    for action in Action:
        recorder(action)
    lifecycle = Lifecycle(RetryPolicy(proxy.server._proxy.park_timeout_s), executor)
    changed = 0
    for name in ALL:
        for late in (False, True):
            expected, request = (request_of(state=state) for _ in range(2))
            events = of(name, expected), of(name, request)
            if late:
                expected.attempt = request.attempt = None
            performed.clear()
            actions = lifecycle.advance(expected, events[0], executor._clock())
            executor.post(request, events[1])
            assert performed == list(actions), name
            assert request.state is expected.state
            changed += bool(actions)
    assert changed or state is State.DONE
