"""A cut stream goes on by token ids: the same tokens, the request's own usage, and a client that sees none of it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.continuations import reads, whole
from support.plain_engine import CHAT, COMPLETIONS, QUESTION
from support.proxy_under_test import ProxyUnderTest
from support.scripted_engine import Call
from support.token_engine import FIRST_ID, PROMPT, TokenEngine

from launcher.proxy.continuation.continuation import (
    Complete,
    Continuation,
    EngineTraits,
    NotExact,
    plan_continuation,
)
from launcher.proxy.continuation.splicer import Splicer
from launcher.proxy.continuation.transcript import Transcript

SAID = ("Hello", " wor", "ld", " and", " all", " the", " rest", " of", " it", "!", " Yes", ".")
ENGINE = TokenEngine(CHAT, SAID)
PROMPTED = TokenEngine(COMPLETIONS, SAID)
USAGE = {"stream_options": {"include_usage": True}}
Way = Callable[[Call], Awaitable[None]]


def ids(first: int, last: int) -> list[int]:
    return [FIRST_ID + number for number in range(first, last)]


# --- through the proxy ----------------------------------------------------------------------


def streams(engine: TokenEngine, events: int | None = None, *, at_once: int = 1) -> Way:
    """Answer; with `events` the connection ends after so many. `at_once`: so many chunks in one write."""

    async def answer(call: Call) -> None:
        await call.start_stream()
        told = [
            f"{len(event):x}\r\n".encode() + event + b"\r\n" for event in engine.answer(call.body)[:events]
        ]
        for first in range(0, len(told), at_once):
            await call.raw(b"".join(told[first : first + at_once]))
        if events is None:
            await call.end_stream()
        else:
            call.cut()

    return answer


async def ask(
    proxy: ProxyUnderTest, path: str, *ways: Way, server: dict[str, Any] | None = None, **more: Any
) -> tuple[bytes, list[dict[str, Any]]]:
    """One stream's payload, while the instances do this, in this order; the requests that they got."""
    left, bodies = list(ways), list[dict[str, Any]]()

    async def script(call: Call) -> None:
        bodies.append(json.loads(call.body))
        await left.pop(0)(call)

    for slot in range(len(ways)):
        await proxy.engine(slot, script, token_ids=True, sampling_defaults=server)
    proxy.server._traits.note_template("m", fits=True)
    engine = ENGINE if path == CHAT else PROMPTED
    async with proxy.client.post(path, data=engine.request(**more)) as answer:
        assert answer.status == 200
        payload = await answer.read()
    assert not left
    assert proxy.balanced()
    return payload, bodies


def events(payload: bytes) -> list[bytes]:
    return [part + b"\n\n" for part in payload.split(b"\n\n")[:-1]]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("temperature", [0, 0.8])
async def test_the_usage_is_the_requests_own_where_its_text_makes_other_tokens(
    proxy: ProxyUnderTest, path: str, temperature: float
) -> None:
    first = TokenEngine(
        path, SAID, merged=frozenset({3, 4})
    )  # its machine is busy: some events bring several tokens
    second = TokenEngine(path, SAID, "two", more_tokens=1)
    asked = {**USAGE, "max_tokens": 12, "temperature": temperature}
    payload, bodies = await ask(proxy, path, streams(first, 9), streams(second), **asked)
    told = whole(events(payload))
    assert told["text"] == "".join(SAID)
    assert told["end"] == "length"
    assert told["usage"] == [
        {"prompt_tokens": len(PROMPT), "total_tokens": len(PROMPT) + 12, "completion_tokens": 12}
    ]
    handed = (
        bodies[1]["prompt"] if path == COMPLETIONS else bodies[1]["kv_transfer_params"]["prompt_token_ids"]
    )
    count = len(handed) - len(PROMPT)
    assert handed == [*PROMPT, *ids(0, count)]
    assert bodies[1]["max_tokens"] == 12 - count
    assert proxy.sums()["completed"] == 1


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_client_gets_what_it_would_have_got_unasked(
    proxy: ProxyUnderTest, path: str, at_once: int
) -> None:
    said = (*SAID[:4], 'a "quote"', "", "é", *SAID[4:])
    engine = TokenEngine(path, said, merged=frozenset({2, 9}), parser=True)
    payload, bodies = await ask(proxy, path, streams(engine, at_once=at_once), **USAGE, max_tokens=50)
    plain = (
        json.loads(ENGINE.request())
        | {"max_tokens": 50}
        | USAGE
        | ({} if path == CHAT else {"prompt": QUESTION})
    )
    assert events(payload) == [event for event in engine.answer(json.dumps(plain).encode()) if event]
    assert bodies[0].pop("return_token_ids") is True
    asker = ENGINE if path == CHAT else PROMPTED
    assert bodies[0] == json.loads(asker.request(max_tokens=50, **USAGE))


@pytest.mark.parametrize("value", [True, False, None])
async def test_a_client_that_asks_itself_gets_what_it_asks_for(proxy: ProxyUnderTest, value: object) -> None:
    payload, bodies = await ask(proxy, CHAT, streams(ENGINE), return_token_ids=value)
    assert events(payload) == ENGINE.answer(ENGINE.request(return_token_ids=value))
    assert bodies == [USAGE | json.loads(ENGINE.request(return_token_ids=value))]


@pytest.mark.parametrize("more", [{"tools": [{"type": "function"}]}, {"n": 2}, {"user": "x" * 300_000}])
async def test_streams_that_could_not_go_on_by_ids_are_not_asked(
    proxy: ProxyUnderTest, more: dict[str, Any]
) -> None:
    _, bodies = await ask(proxy, CHAT, streams(ENGINE), **more)
    assert "return_token_ids" not in bodies[0]


async def test_a_stream_that_is_cut_again_and_again(proxy: ProxyUnderTest) -> None:
    engine = TokenEngine(CHAT, (*SAID[:5], "", "é", *SAID[5:]), merged=frozenset({3}))
    cuts = [streams(engine, count) for count in (5, 4, 4, 3)]
    payload, bodies = await ask(proxy, CHAT, *cuts, streams(engine), **USAGE, temperature=1)
    told = whole(events(payload))
    assert told["text"] == "".join(engine.tokens)
    assert told["usage"][0]["prompt_tokens"] == len(PROMPT)
    assert told["usage"][0]["completion_tokens"] == len(engine.tokens) + 1
    assert all(body["kv_transfer_params"]["prompt_token_ids"][: len(PROMPT)] == PROMPT for body in bodies[1:])


async def test_the_end_was_told_and_only_the_usage_is_missing(proxy: ProxyUnderTest) -> None:
    engine = TokenEngine(CHAT, SAID, merged=frozenset({5}))
    payload, _ = await ask(proxy, CHAT, streams(engine, -2), **USAGE)
    assert whole(events(payload))["usage"] == [
        {"prompt_tokens": len(PROMPT), "total_tokens": len(PROMPT) + 13, "completion_tokens": 13}
    ]


async def test_an_instance_with_other_tokens_has_diverged(proxy: ProxyUnderTest) -> None:
    async def strays(call: Call) -> None:
        said = [event.replace(b"[105]", b"[999]") for event in ENGINE.answer(call.body)]
        await call.start_stream()
        await call.chunk(b"".join(said))
        await call.end_stream()

    payload, bodies = await ask(proxy, CHAT, streams(ENGINE, 7), strays, streams(ENGINE))
    assert whole(events(payload))["text"] == "".join(SAID)
    assert "kv_transfer_params" not in bodies[2]  # all of it again


@pytest.mark.parametrize("temperature", [0, 1])
async def test_an_engine_that_ignores_ids_is_continued_by_text(
    proxy: ProxyUnderTest, temperature: int
) -> None:
    other = TokenEngine(CHAT, SAID, "two", takes_ids=False, more_tokens=2)
    asked = {**USAGE, "temperature": temperature, "max_tokens": 20}
    payload, bodies = await ask(proxy, CHAT, streams(ENGINE, 11), streams(other), streams(other), **asked)
    told = whole(events(payload))
    assert told["text"] == "".join(SAID)
    assert told["usage"] == [{"prompt_tokens": 7, "total_tokens": 20, "completion_tokens": 13}]
    assert bodies[2]["continue_final_message"] is True
    assert "return_token_ids" not in bodies[2]


async def test_an_engine_that_tells_no_ids_is_continued_by_text(proxy: ProxyUnderTest) -> None:
    silent = TokenEngine(CHAT, SAID, "two", tells_ids=False)
    payload, bodies = await ask(proxy, CHAT, streams(ENGINE, 11), streams(silent), streams(silent), **USAGE)
    assert whole(events(payload))["text"] == "".join(SAID)
    assert "return_token_ids" not in bodies[2]


def test_ids_without_tokens_left_are_not_handed_over() -> None:
    transcript = Transcript(token_ids=True)
    for event in ENGINE.answer(ENGINE.request(return_token_ids=True))[:9]:
        transcript.feed(event)
    found = plan_continuation(CHAT, ENGINE.request(max_tokens=4, **USAGE), transcript)
    assert isinstance(found, Continuation)
    assert found.prompt_ids is None


def test_tokens_without_text_at_the_end_are_forgotten() -> None:
    transcript, engine = Transcript(token_ids=True), TokenEngine(CHAT, ("Hello", "", " you"))
    for event in engine.answer(engine.request(return_token_ids=True))[:3]:
        transcript.feed(event)
    transcript.forget_silent()
    assert transcript.pieces() == [b"Hello"]


async def test_without_ids_a_stream_ends_with_an_error_where_tokens_count(proxy: ProxyUnderTest) -> None:
    silent = TokenEngine(CHAT, SAID, tells_ids=False)
    payload, _ = await ask(proxy, CHAT, streams(silent, 11), **USAGE, temperature=1)
    assert b"[DONE]" not in payload
    assert payload.count(b'"error"') == 1


async def test_the_same_at_temperature_0_says_all_of_it_again(proxy: ProxyUnderTest) -> None:
    silent = TokenEngine(CHAT, SAID, tells_ids=False)
    payload, _ = await ask(proxy, CHAT, streams(silent, 11), streams(silent), **USAGE)
    told = whole(events(payload))
    assert told["text"] == "".join(SAID)
    assert told["usage"][0] == {"prompt_tokens": 7, "total_tokens": 20, "completion_tokens": 13}


async def test_a_requests_own_template_is_continued_by_ids_only(proxy: ProxyUnderTest) -> None:
    asked = {"temperature": 1, "chat_template": "{{ messages }}"}
    payload, _ = await ask(proxy, CHAT, streams(ENGINE, 9), streams(ENGINE), **asked)
    assert whole(events(payload))["text"] == "".join(SAID)
    merged = TokenEngine(CHAT, SAID, merged=frozenset({7}))  # no token is known to end where the text does
    payload, _ = await ask(proxy, CHAT, streams(merged, 8), **asked)
    assert b"[DONE]" not in payload


# --- what the server sets by itself -----------------------------------------------------------


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
async def test_a_penalty_that_the_server_sets_forbids_it(
    proxy: ProxyUnderTest, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "launcher.access")
    payload, bodies = await ask(proxy, CHAT, streams(ENGINE, 7), server={name: 0.5})
    assert b"[DONE]" not in payload
    assert payload.count(b'"error"') == 1
    assert len(bodies) == 1
    (record,) = [record for record in caplog.records if record.name == "launcher.access"]
    assert f"`{name}` among the server's sampling defaults" in record.__dict__["reason"]


async def test_a_request_that_overrides_the_penalty_continues(proxy: ProxyUnderTest) -> None:
    payload, _ = await ask(
        proxy, CHAT, streams(ENGINE, 7), streams(ENGINE), server={"presence_penalty": 0.5}, presence_penalty=0
    )
    assert whole(events(payload))["text"] == "".join(SAID)


async def test_a_repetition_penalty_looks_at_the_prompt_too(proxy: ProxyUnderTest) -> None:
    payload, _ = await ask(
        proxy, CHAT, streams(ENGINE, 7), streams(ENGINE), server={"repetition_penalty": 1.5, "top_k": 20}
    )
    assert whole(events(payload))["text"] == "".join(SAID)


@pytest.mark.parametrize(
    ("path", "server", "more", "limit"),
    [
        (CHAT, {"max_tokens": 10}, {}, 10),
        (CHAT, {"max_tokens": 10}, {"max_tokens": 11}, 11),
        (CHAT, {"max_tokens": 10, "most_tokens": 10}, {"max_completion_tokens": 11}, 10),
        (COMPLETIONS, {"max_tokens": 10}, {}, 16),
        (COMPLETIONS, {"max_tokens": 10, "most_tokens": 10}, {}, 10),
    ],
)
async def test_a_limit_that_the_server_sets_holds_for_the_whole(
    proxy: ProxyUnderTest, path: str, server: dict[str, Any], more: dict[str, Any], limit: int
) -> None:
    engine = TokenEngine(path, SAID * 2)
    first = 1 + (path == CHAT)

    async def limited(call: Call) -> None:
        """As the server does it: its limit where the request has none, and never more than it allows."""
        body = json.loads(call.body)
        key = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        if path == CHAT:
            body[key] = body.get(key, server["max_tokens"])
        body[key] = min(body.get(key, 16), server.get("most_tokens", 99))
        call.body = json.dumps(body).encode()
        await (streams(engine, 5 + first) if first is not None and not seen else streams(engine))(call)
        seen.append(1)

    seen: list[int] = []
    payload, _ = await ask(proxy, path, limited, limited, server=server, temperature=1, **more)
    told = whole(events(payload))
    assert told["text"] == "".join(engine.tokens[:limit])
    assert told["end"] == "length"


async def test_a_temperature_of_0_that_the_server_sets_is_one(proxy: ProxyUnderTest) -> None:
    body = {"temperature": None, "seed": 3}
    payload, _ = await ask(
        proxy, CHAT, streams(ENGINE, 7), streams(ENGINE), server={"temperature": 0.0}, **body
    )
    assert whole(events(payload))["text"] == "".join(SAID)


# --- any cut ----------------------------------------------------------------------------------


def live_through(
    engines: list[TokenEngine], body: bytes, cuts: list[int], marks: list[int]
) -> tuple[list[bytes], NotExact | None]:
    """What passes to the client when the n-th engine dies after cuts[n] events; the last lives."""
    asked = body.replace(b"{", b'{"return_token_ids":true,', 1)
    transcript = Transcript(token_ids=True)
    passed: list[bytes] = []
    plan: Continuation | None = None
    for engine, cut in zip(engines, [*cuts, None], strict=True):
        splicer = None if plan is None else Splicer(plan, transcript)
        told = [event for event in engine.answer(asked if plan is None else plan.body) if event][:cut]
        joined = (payload if splicer is None else splicer.feed(payload) for payload in reads(told, marks))
        passed += [transcript.feed(payload) for payload in joined]
        if cut is None:
            break
        found = plan_continuation(engine.path, body, transcript, EngineTraits(one_token_events=False))
        if isinstance(found, Complete):
            passed.append(found.tail)
            break
        if isinstance(found, NotExact):
            return passed, found
        if not found.asks_ids:
            transcript.forget_ids()
        else:
            transcript.forget_silent()
        plan = found
    return passed, None


words = st.sampled_from(["Hel", "lo", " wor", " ", "\n", '"', '\\"', "\\", "😀", "é", " 你", "好", ","])
tokens = st.lists(st.one_of(words, words.map(lambda word: ("", word))), min_size=1, max_size=24).map(
    lambda found: tuple(part for word in found for part in (word if isinstance(word, tuple) else (word,)))
)


@given(
    path=st.sampled_from([CHAT, COMPLETIONS]),
    said=tokens,
    temperature=st.sampled_from([0, 0.7]),
    limit=st.none() | st.integers(1, 40),
    stop=st.sampled_from([None, ["ENDING"], ["XY", "Z"]]),
    cuts=st.lists(st.integers(0, 28), min_size=1, max_size=3),
    marks=st.lists(st.integers(0, 28), max_size=28),
    merged=st.lists(st.frozensets(st.integers(0, 40)), min_size=4, max_size=4),
    parser=st.booleans(),
)
def test_no_text_is_lost_or_repeated_and_every_token_is_counted(
    *, path: str, said: tuple[str, ...], temperature: float, limit: int | None, stop: list[str] | None,
    cuts: list[int], marks: list[int], merged: list[frozenset[int]], parser: bool,
) -> None:  # fmt: skip
    engines = [
        TokenEngine(path, said, name, merged[number], parser)
        for number, name in enumerate(("one", "two", "three", "four")[: len(cuts) + 1])
    ]
    more = {**USAGE, "temperature": temperature, "max_tokens": limit or 60}
    body = engines[0].request(**more | ({"stop": stop} if stop else {}))
    passed, refused = live_through(engines, body, cuts, marks)
    if refused is not None:  # half characters, or text that is held back, where no token can be repeated
        assert temperature
        return
    told, uncut = whole(passed), whole([event for event in engines[0].answer(body) if event])
    assert (told["text"], told["end"], told["usage"]) == (uncut["text"], uncut["end"], uncut["usage"])
    assert b'token_ids":[' not in b"".join(passed)
