"""What pages in browsers may do."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.proxy.downstream.origin import Cors

APP = "https://chat.example.org"
SOME = Cors((APP, "http://localhost:3000/"))
ALL = Cors(("*",))


def headers(lines: bytes) -> dict[str, str]:
    """Names in lower case; a name that comes twice is joined as HTTP says."""
    found: dict[str, str] = {}
    for line in lines.decode().split("\r\n")[:-1]:
        name, _, value = line.partition(": ")
        found[name.lower()] = ", ".join(filter(None, (found.get(name.lower()), value)))
    return found


def test_no_origin_by_default() -> None:
    assert not Cors().origins
    assert Cors().lines(APP) == b""
    assert Cors().preflight(APP, "POST", None) is None


@pytest.mark.parametrize("origin", [APP, "http://localhost:3000", "HTTPS://chat.example.org"])
def test_a_named_origin(origin: str) -> None:
    found = headers(SOME.lines(origin))
    assert found["access-control-allow-origin"] == origin
    assert found["vary"] == "Origin"
    assert "X-Request-Id" in found["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in found


@pytest.mark.parametrize(
    "origin",
    [None, "null", "https://evil.example", "https://chat.example.org.evil", "http://chat.example.org", ""],
)
def test_other_origins_get_nothing_but_vary(origin: str | None) -> None:
    assert SOME.lines(origin) == b"Vary: Origin\r\n"


def test_any_origin() -> None:
    assert headers(ALL.lines("https://x"))["access-control-allow-origin"] == "*"
    assert headers(ALL.lines("null"))["access-control-allow-origin"] == "*"
    assert ALL.lines(None) == b""


def test_a_preflight() -> None:
    answer = SOME.preflight(APP, "POST", "authorization, content-type,x-stainless-lang")
    assert answer is not None
    status, lines = answer
    found = headers(lines)
    assert status == 204
    assert found["access-control-allow-origin"] == APP
    assert found["access-control-allow-methods"] == "GET, HEAD, POST"
    assert found["access-control-allow-headers"] == "authorization, content-type,x-stainless-lang"
    assert int(found["access-control-max-age"]) > 0
    assert found["vary"].startswith("Origin, ")


def test_a_preflight_of_another_origin() -> None:
    assert SOME.preflight("https://evil.example", "POST", None) == (403, b"Vary: Origin\r\n")


@pytest.mark.parametrize(("origin", "method"), [(None, "POST"), (APP, None)])
def test_an_options_request_that_is_no_preflight(origin: str | None, method: str | None) -> None:
    assert SOME.preflight(origin, method, None) is None


ANYTHING = st.none() | st.text(max_size=40)


@given(ANYTHING, ANYTHING, ANYTHING, st.sampled_from([SOME, ALL, Cors()]))
def test_nothing_that_is_sent_can_break_the_lines(
    origin: str | None, method: str | None, asked: str | None, cors: Cors
) -> None:
    answer = cors.preflight(origin, method, asked)
    for lines in (cors.lines(origin), b"" if answer is None else answer[1]):
        assert re.fullmatch(rb"(?:[A-Za-z-]+: [\x20-\x7e]+\r\n)*", lines)


@pytest.mark.parametrize("asked", ["a\r\nb: c", "a" * 3000, "a b", ",", "é"])
def test_invalid_header_names_are_not_echoed(asked: str) -> None:
    answer = SOME.preflight(APP, "POST", asked)
    assert answer is not None
    assert b"Allow-Headers" not in answer[1]
