"""Model names and aliases."""

from __future__ import annotations

import json

import pytest

from launcher.base.api_errors import HttpError
from launcher.proxy.error_forms import body_of
from launcher.proxy.openai.models import ModelNames, ModelTraits
from launcher.proxy.routes import Api


def test_resolves_a_model_name() -> None:
    assert ModelNames(("a",)).resolve(None) == "a"
    assert ModelNames(("a", "b")).resolve("b") == "b"
    with pytest.raises(HttpError) as missing:
        ModelNames(("a", "b")).resolve(None)
    assert missing.value.status == 400
    with pytest.raises(HttpError) as unknown:
        ModelNames(("a",)).resolve("x")
    assert unknown.value.status == 404
    assert json.loads(body_of(Api.OPENAI, unknown.value))["error"] == {
        "message": "The model `x` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": "model_not_found",
    }


def test_an_adapter_that_is_no_longer_served_is_not_listed() -> None:
    """An instance that is ready again, after a change of the configuration, says what it serves."""
    traits = ModelTraits(ModelNames(("a", "b")))
    for model, adapters in (("a", ("sql", "law")), ("b", ("tone",)), ("a", ("law",))):
        traits.learn(model, adapters=adapters, token_ids=False, sampling_defaults={}, context_tokens=None)
    assert list(traits.adapters_of("a")) == ["law"]
    assert list(traits.adapters_of("b")) == ["tone"]
    assert traits.base_of("sql") is None
