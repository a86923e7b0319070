"""What a resumed run compares."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.base.errors import RefusedError
from launcher.measure.tune.identity import identity_of, refuse_changes

PARTS: dict[str, Any] = {
    "configuration": {
        "models": [{"name": "m", "path": "/m"}], "layout": {"cpus": None, "strategy": "interleaved"},
        "engine": {"command": ["vllm"], "env": {"TOKEN": "secret"}},
    },
    "seed": 0,
}  # fmt: skip


def changed(**parts: Any) -> dict[str, str]:
    return identity_of({**PARTS, **parts})


def test_the_same_parts_are_the_same() -> None:
    refuse_changes("run", identity_of(PARTS), identity_of(PARTS))


def test_a_change_is_named_with_both_values() -> None:
    configuration = {**PARTS["configuration"], "layout": {"cpus": "0-3", "strategy": "contiguous"}}
    with pytest.raises(RefusedError) as refused:
        refuse_changes("run", identity_of(PARTS), changed(configuration=configuration))
    assert 'configuration.layout.strategy: "interleaved", now "contiguous"' in refused.value.message
    assert 'configuration.layout.cpus: not set, now "0-3"' in refused.value.message


def test_secrets_are_compared_and_not_kept() -> None:
    before = identity_of(PARTS)
    assert "secret" not in str(before)
    engine = {"command": ["vllm"], "env": {"TOKEN": "replaced"}}
    with pytest.raises(RefusedError, match=r"env\.TOKEN") as refused:
        refuse_changes("run", before, changed(configuration={**PARTS["configuration"], "engine": engine}))
    assert "replaced" not in refused.value.message


def test_many_changes_are_counted() -> None:
    with pytest.raises(RefusedError, match="; 2 more"):
        refuse_changes("run", {}, identity_of(dict.fromkeys("abcde", 1)))
