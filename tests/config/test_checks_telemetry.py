"""Values of [telemetry] that types allow and that cannot be used."""

from __future__ import annotations

import pytest

from launcher.base.errors import LauncherError
from launcher.config.loading import parse_config
from launcher.config.schema import Config


def parsed(endpoint: str) -> Config:
    models = [{"name": "m", "path": "/m"}]
    return parse_config({"models": models, "telemetry": {"otlp_endpoint": endpoint}}, origin="config.toml")


@pytest.mark.parametrize(
    "endpoint",
    ["", "http://127.0.0.1:4318", "https://otel.example/v1/traces", "http://[::1]:4318/", "http://collector"],
)
def test_what_is_valid(endpoint: str) -> None:
    assert parsed(endpoint).telemetry.otlp_endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint",
    ["127.0.0.1:4318", "grpc://h:4317", "http://", "http://user:key@h", "http://h?key=1", "http://h:0", "http://h:99999", "http://[h"],
)  # fmt: skip
def test_what_is_not(endpoint: str) -> None:
    with pytest.raises(LauncherError) as error:
        parsed(endpoint)
    assert "config.toml" in error.value.message
    assert f"telemetry.otlp_endpoint = '{endpoint}' is not a base URL" in error.value.message
    assert 'write "http://127.0.0.1:4318"' in error.value.remedy
