"""What `status` says of queue, tokens and keys."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.keys import make, put

from launcher.balancing.admission_queue import AdmissionQueue
from launcher.keys.api_keys import ApiKeys
from launcher.proxy.observability.stats import Counters
from launcher.proxy.readings import (
    KeyTotals,
    QueueState,
    TokenTotals,
    key_totals,
    queue_state,
    token_sum,
    tokens_by_model,
)


@pytest.mark.parametrize(("started", "oldest_s"), [([], None), ([7.0, 4.0, 9.5], 6.0)])
def test_the_queue_has_the_age_of_its_oldest_request(started: list[float], oldest_s: float | None) -> None:
    waiting: Any = [SimpleNamespace(started=at) for at in started]
    assert queue_state(AdmissionQueue(64, 1000), waiting, 10.0) == QueueState(
        requests=len(started), bytes=0, oldest_s=oldest_s, limit_requests=64, limit_bytes=1000
    )


def test_tokens_are_summed_over_the_models() -> None:
    counters = Counters()
    counters.count_tokens("b", 10, 4, 7)
    counters.count_tokens("a", 1, 0, 2)
    counters.count_tokens("b", 10, 0, 3)
    models = tokens_by_model(counters)
    assert models == {
        "a": TokenTotals(prompt=1, cached=0, output=2),
        "b": TokenTotals(prompt=20, cached=4, output=10),
    }
    assert token_sum(models.values()) == TokenTotals(prompt=21, cached=4, output=12)
    assert token_sum(()) == TokenTotals(prompt=0, cached=0, output=0)


def test_keys(tmp_path: Path) -> None:
    put(tmp_path / "keys", make("ann")[1], make("bob")[1])
    keys = ApiKeys(str(tmp_path / "keys"))
    keys.sums["bob"].accepted = 5
    keys.sums["bob"].ended["completed"] = 3
    keys.sums["bob"].prompt_tokens, keys.sums["bob"].output_tokens = 30, 12
    assert key_totals(keys) == {
        "ann": KeyTotals(accepted=0, in_flight=0, tokens=0, prompt_tokens=0, output_tokens=0),
        "bob": KeyTotals(accepted=5, in_flight=2, tokens=42, prompt_tokens=30, output_tokens=12),
    }
    assert key_totals(ApiKeys(None)) == {}
