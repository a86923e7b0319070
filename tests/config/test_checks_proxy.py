"""Names of models, TLS, CORS and overflow: what is refused, and how it is said."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.base.errors import LauncherError
from launcher.config.loading import parse_config


def parse(proxy: dict[str, Any], *models: dict[str, Any]) -> None:
    plain = models or ({"name": "m"}, {"name": "n"})
    parse_config({"models": [{"path": "/x", **model} for model in plain], "proxy": proxy}, origin="f")


@pytest.mark.parametrize(
    ("proxy", "about"),
    [
        ({"policy": "prefix-aware", "session_header": "X-Session-Id", "slow_start_s": 20}, None),
        ({"session_header": "X-S"}, 'session_header = "X-S" is ignored'),
        ({"policy": "session"}, 'policy = "session"'),
        ({"policy": "least-tokens"}, 'policy = "least-tokens"'),
        ({"slow_start_s": 5}, "slow_start_s = 5 is ignored"),
    ],
)
def test_settings_without_effect_are_read_with_a_warning(proxy: dict[str, Any], about: str | None) -> None:
    config = parse_config({"models": [{"path": "/x", "name": "m"}], "proxy": proxy}, origin="f")
    assert len(config.proxy.outdated) == (about is not None)
    assert all(about in line for line in config.proxy.outdated if about)


OVERFLOW = {"url": "https://api.example.org/v1", "models": {"m": "big"}}


PRICES = {"input": 0.15, "output": 0.6}


@pytest.mark.parametrize(
    "proxy",
    [
        {"tls_certificate": "/c"},
        {"tls_certificate": "/c", "tls_key": "/k"},
        {"cors_origins": ["*"]},
        {"cors_origins": ["https://chat.example.org", "http://localhost:3000/", "chrome-extension://abc"]},
        {"overflow": OVERFLOW},
        {"overflow": {**OVERFLOW, "url": "http://[::1]:8080"}},
        {"overflow": [OVERFLOW, {**OVERFLOW, "name": "second"}]},
        {"overflow": {**OVERFLOW, **PRICES, "max_per_day": 20}},
        {"overflow": {**OVERFLOW, **PRICES, "cached": 0.075}},
        {"overflow": {**OVERFLOW, "when": "predicted_ttft > 4s"}},
    ],
)
def test_good(proxy: dict[str, Any]) -> None:
    parse(proxy)


@pytest.mark.parametrize(
    ("proxy", "why"),
    [
        ({"tls_key": "/k"}, "proxy.tls_key = '/k' without tls_certificate"),
        ({"cors_origins": ["chat.example.org"]}, "'chat.example.org' is not an origin"),
        ({"cors_origins": ["https://a/path"]}, "'https://a/path' is not an origin"),
        ({"cors_origins": ["null"]}, "'null' is not an origin"),
        ({"cors_origins": ["https://*.example.org, https://b"]}, "is not an origin"),
        ({"overflow": {**OVERFLOW, "models": {"x": "y"}}}, "names 'x', which is not a configured model"),
        ({"overflow": {**OVERFLOW, "url": "https://user:secret@host/v1"}}, "is not a base URL"),
        ({"overflow": {**OVERFLOW, "url": "https://host/v1?key=1"}}, "is not a base URL"),
        ({"overflow": {**OVERFLOW, "url": "https://" + "a" * 64 + ".org/v1"}}, "is not a base URL"),
        ({"overflow": [OVERFLOW, OVERFLOW]}, "two [[proxy.overflow]] have the name 'api.example.org'"),
        (
            {"overflow": {**OVERFLOW, "max_per_day": 20}},
            "proxy.overflow.max_per_day without the price input and output",
        ),
        ({"overflow": {**OVERFLOW, "input": 1}}, "proxy.overflow.input without the price output"),
        (
            {"overflow": [OVERFLOW, {**OVERFLOW, "name": "b", "cached": 1}]},
            "proxy.overflow[1].cached without the price",
        ),
        (
            {"overflow": {**OVERFLOW, **PRICES, "input": 1e-7}},
            "proxy.overflow.input: 1e-07 has too many decimals",
        ),
        ({"overflow": {**OVERFLOW, "when": "busy"}}, "proxy.overflow.when = 'busy' is no condition"),
        ({"overflow": {**OVERFLOW, "when": "predicted_ttft > 4"}}, "is no condition"),
    ],
)
def test_bad(proxy: dict[str, Any], why: str) -> None:
    with pytest.raises(LauncherError, match=r"^cannot use f: ") as caught:
        parse(proxy)
    assert why in caught.value.message


@pytest.mark.parametrize(
    ("first", "second"),
    [(("n",), ()), (("a",), ("a",)), (("m",), ()), (("",), ())],
)
def test_a_name_is_one_models(first: tuple[str, ...], second: tuple[str, ...]) -> None:
    with pytest.raises(LauncherError, match="cannot use f: alias"):
        parse({}, {"name": "m", "aliases": list(first)}, {"name": "n", "aliases": list(second)})


def test_aliases() -> None:
    parse({}, {"name": "m", "aliases": ["a", "b"]}, {"name": "n", "aliases": ["c"]})


def test_a_cap_needs_the_ledger() -> None:
    tree = {
        "models": [{"name": "m", "path": "/m"}],
        "proxy": {"overflow": {**OVERFLOW, **PRICES, "max_per_day": 1}},
        "usage": {"enabled": False},
    }
    with pytest.raises(LauncherError, match="max_per_day without the usage ledger"):
        parse_config(tree, origin="f")


@pytest.mark.parametrize(
    ("when", "limit"),
    [
        ("full", None),
        ("predicted_ttft > 4s", 4.0),
        ("predicted_ttft>250ms", 0.25),
        (" predicted_ttft > 2.5 s ", 2.5),
    ],
)
def test_when(when: str, limit: float | None) -> None:
    tree = {"models": [{"name": "m", "path": "/m"}], "proxy": {"overflow": {**OVERFLOW, "when": when}}}
    assert parse_config(tree, origin="f").proxy.overflow[0].predicted_s == limit
