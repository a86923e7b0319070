"""A stream that is cut anywhere, and what its client reads in the end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.continuations import reads, whole
from support.plain_engine import CHAT, COMPLETIONS, QUESTION, PlainEngine, event

from launcher.proxy.continuation.continuation import (
    UNCOUNTED,
    Complete,
    Continuation,
    EngineTraits,
    NotExact,
    plan_continuation,
)
from launcher.proxy.continuation.splicer import Diverged, Splicer
from launcher.proxy.continuation.transcript import Transcript

FITTING = EngineTraits(template_fits=True)
words = st.sampled_from(
    [
        "Hel",
        "lo",
        " wor",
        "ld",
        " ",
        "\n",
        "\n\n",
        "\t",
        "",
        '"',
        '\\"',
        "\\",
        "\\n",
        "😀",
        "é",
        "\u2028",
        " 你",
        "好",
        ",",
    ]
)
tokens = st.lists(words, min_size=1, max_size=24).map(tuple)


def live_through(
    engines: list[PlainEngine], body: bytes, cuts: list[int], marks: list[int], *, repeat: bool = False
) -> list[bytes]:
    """What passes to the client when the n-th engine dies after cuts[n] events; the last lives."""
    transcript = Transcript()
    passed: list[bytes] = []
    plan: Continuation | None = None
    for engine, cut in zip(engines, [*cuts, None], strict=True):
        splicer = None if plan is None else Splicer(plan, transcript)
        events = engine.answer(body if plan is None else plan.body)[:cut]
        for payload in reads(events, marks):
            told = payload if splicer is None else splicer.feed(payload)
            transcript.feed(told)
            passed.append(told)
        if cut is None:
            break
        found = plan_continuation(engine.path, body, transcript, FITTING, repeat=repeat)
        if isinstance(found, Complete):
            passed.append(found.tail)
            break
        assert isinstance(found, Continuation), found
        plan = found
    return passed


@given(
    path=st.sampled_from([CHAT, COMPLETIONS]),
    said=tokens,
    escaped=st.booleans(),
    usage=st.booleans(),
    limit=st.none() | st.integers(1, 26),
    cuts=st.lists(st.integers(0, 28), min_size=1, max_size=3),
    marks=st.lists(st.integers(0, 28), max_size=28),
)
def test_no_text_is_lost_or_repeated(
    *,
    path: str,
    said: tuple[str, ...],
    escaped: bool,
    usage: bool,
    limit: int | None,
    cuts: list[int],
    marks: list[int],
) -> None:
    engines = [
        PlainEngine(path, said, name, escaped) for name in ("one", "two", "three", "four")[: len(cuts) + 1]
    ]
    more: dict[str, Any] = {"max_tokens": limit} if limit else {}
    more |= {"stream_options": {"include_usage": True}} if usage else {}
    body = engines[0].request(**more)
    uncut = whole(engines[0].answer(body))
    told = whole(live_through(engines, body, cuts, marks))
    for part in ("roles", "text", "end"):
        assert told[part] == uncut[part]
    for ours, theirs in zip(told["usage"], uncut["usage"], strict=True):
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert ours[key] == theirs[key]


@given(path=st.sampled_from([CHAT, COMPLETIONS]), said=tokens, cut=st.integers(0, 26), warm=st.booleans())
def test_sampled_and_repeated_answers_are_whole_too(
    path: str, said: tuple[str, ...], cut: int, warm: bool
) -> None:
    engines = [PlainEngine(path, said, "one"), PlainEngine(path, said, "two")]
    more = {"temperature": 0.7} if warm else {}
    body = engines[0].request(max_tokens=50, **more)
    told = whole(live_through(engines, body, [cut], [], repeat=not warm))
    assert told["text"] == "".join(said)


def after(engine: PlainEngine, body: bytes, events: int) -> Transcript:
    transcript = Transcript()
    for payload in engine.answer(body)[:events]:
        transcript.feed(payload)
    return transcript


SAID = ("Hello", " wor", "ld", " and", " all", " the", " rest", " of", " it", "!", " Yes", ".")
HANDED, AGAIN = "Hello world and", " all the rest of it!"  # when it is cut after AMID events
AMID = 11
ENGINE = PlainEngine(CHAT, SAID)
PROMPTED = PlainEngine(COMPLETIONS, ENGINE.tokens)


def plan(engine: PlainEngine = ENGINE, events: int = AMID, **more: Any) -> Continuation | Complete | NotExact:
    heard = {key: more[key] for key in more.keys() & {"stream_options"}}
    return plan_continuation(
        engine.path, engine.request(**more), after(engine, engine.request(**heard), events), FITTING
    )


def test_chat_continues_in_the_assistants_message() -> None:
    found = plan(max_tokens=19, max_completion_tokens=19, min_tokens=1, user="me")
    assert isinstance(found, Continuation)
    assert json.loads(found.body) == {
        "model": "m",
        "stream": True,
        "temperature": 0,
        "user": "me",
        "messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": HANDED}],
        "max_tokens": 15,
        "max_completion_tokens": 15,
        "min_tokens": 0,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    assert (found.overlap, found.base_tokens) == (AGAIN, 4)


def test_a_completion_continues_from_a_longer_prompt() -> None:
    for more in ({}, {"max_tokens": None}):
        found = plan(PROMPTED, AMID - 1, **more)
        assert isinstance(found, Continuation)
        body = json.loads(found.body)
        assert (body["prompt"], body["max_tokens"]) == (QUESTION + HANDED, 12)  # 16 is vLLM's default
    listed = plan_continuation(
        COMPLETIONS, PROMPTED.request(prompt=[QUESTION]), after(PROMPTED, PROMPTED.request(), AMID - 1)
    )
    assert isinstance(listed, Continuation)
    assert json.loads(listed.body)["prompt"] == QUESTION + HANDED


def test_an_assistants_message_that_was_continued_grows() -> None:
    for content, expected in (
        ("I say: ", "I say: " + HANDED),
        ([{"type": "text", "text": "I say: "}], [{"type": "text", "text": "I say: " + HANDED}]),
    ):
        messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": content}]
        body = ENGINE.request(messages=messages, continue_final_message=True, add_generation_prompt=False)
        found = plan_continuation(CHAT, body, after(ENGINE, ENGINE.request(), AMID))
        assert isinstance(found, Continuation)
        assert json.loads(found.body)["messages"][1]["content"] == expected


@pytest.mark.parametrize("yes", [True, "true", 1, "on", 1.0])
def test_flags_are_read_as_the_engine_reads_them(yes: object) -> None:
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "Well,"}]
    body = ENGINE.request(messages=messages, continue_final_message=yes, add_generation_prompt="off")
    found = plan_continuation(CHAT, body, after(ENGINE, ENGINE.request(), AMID))
    assert isinstance(found, Continuation)
    sent = json.loads(found.body)["messages"]
    assert len(sent) == 2, "no second message behind the one that the engine goes on with"
    assert sent[1]["content"].startswith("Well,")
    body = ENGINE.request(add_generation_prompt="off")
    assert isinstance(plan_continuation(CHAT, body, after(ENGINE, ENGINE.request(), AMID)), NotExact)


@pytest.mark.parametrize("content", [None, [], [{"type": "image_url"}]])
def test_a_last_message_without_text_cannot_be_continued(content: object) -> None:
    body = ENGINE.request(messages=[{"role": "assistant", "content": content}], continue_final_message=True)
    found = plan_continuation(CHAT, body, after(ENGINE, ENGINE.request(), AMID))
    assert found == NotExact("a last message that is no text")


@pytest.mark.parametrize(
    ("more", "by_text"),
    [
        ({}, True),
        ({"max_tokens": 90}, False),
        ({"max_completion_tokens": 90}, False),
        ({"min_tokens": 1}, False),
        ({"stream_options": {"include_usage": True}}, False),
    ],
)
def test_nothing_is_counted_where_events_bring_several_tokens(more: dict[str, Any], by_text: bool) -> None:
    several = EngineTraits(template_fits=True, one_token_events=False)
    heard = after(
        ENGINE, ENGINE.request(**{key: more[key] for key in more.keys() & {"stream_options"}}), AMID
    )
    found = plan_continuation(CHAT, ENGINE.request(**more), heard, several)
    assert isinstance(found, Continuation)  # where not by text, all of it again
    assert bool(found.base_tokens) == by_text
    found = plan_continuation(CHAT, ENGINE.request(temperature=1, **more), heard, several)
    assert isinstance(found, Continuation) == by_text


def test_a_template_that_is_not_known_to_continue_an_answer_forbids_it() -> None:
    body = ENGINE.request(temperature=1)
    found = plan_continuation(CHAT, body, after(ENGINE, ENGINE.request(), AMID))
    assert found == NotExact("the model's chat template is not known to continue a partial answer")


def test_a_text_tells_no_usage() -> None:
    usage = {"stream_options": {"include_usage": True}}
    found = plan(**usage)
    assert isinstance(found, Continuation)
    assert (found.base_tokens, found.overlap) == (0, HANDED + AGAIN)
    assert plan(temperature=1, **usage) == NotExact(
        "its tokens can't be counted: the engine tells no token ids"
    )


def test_the_limit_that_vllm_ignores_ends_nothing() -> None:
    body = ENGINE.request(max_tokens=2, max_completion_tokens=100)
    found = plan_continuation(CHAT, body, after(ENGINE, ENGINE.request(), AMID))
    assert isinstance(found, Continuation)
    told = json.loads(found.body)
    assert (told["max_completion_tokens"], told["max_tokens"]) == (100 - found.base_tokens, 1)


def test_tokens_that_wait_for_a_stop_string_are_not_counted() -> None:
    late = PlainEngine(CHAT, ("", "", *SAID))
    found = plan(late, AMID + 2, stop=["END"], max_tokens=20)
    assert isinstance(found, Continuation)
    assert found.overlap == AGAIN
    assert found.base_tokens == 4  # of six events, and two tokens are held back


def test_half_a_character_is_not_counted() -> None:
    found = plan(PlainEngine(CHAT, (*SAID[:6], "", " 😀", *"abcdef")), 14)
    assert isinstance(found, Continuation)
    assert (found.base_tokens, found.overlap) == (6, " 😀abcde")


def test_text_without_spaces_continues_where_it_was_cut() -> None:
    found = plan(PlainEngine(CHAT, ("你", "好") * 12), 20)
    assert isinstance(found, Continuation)
    assert found.overlap == "好你好你好你"
    assert found.base_tokens == 13


@pytest.mark.parametrize(
    ("said", "handed"),
    [
        (("He", "llo", *["a "] * 9), "Hello"),  # no word begins with a space
        (("He", *["\n"] * 9), "He"),
        (("a ",) * 10, ""),  # nothing that a template would not trim
    ],
)
def test_the_text_handed_over_never_ends_in_white_space(said: tuple[str, ...], handed: str) -> None:
    engine = PlainEngine(CHAT, said)
    found = plan(engine, len(said) + 1)
    assert isinstance(found, Continuation)
    messages = json.loads(found.body)["messages"]
    assert (messages[1]["content"] if len(messages) > 1 else "") == handed
    assert handed + found.overlap == "".join(said)


def test_half_a_surrogate_pair_is_no_text() -> None:
    body = ENGINE.request()
    transcript = after(ENGINE, body, 7)
    assert transcript.pattern.known
    for text in (*b"abc", rb"a\ud83d"):
        transcript.feed(
            transcript.pattern.prefix
            + (text if isinstance(text, bytes) else bytes([text]))
            + transcript.pattern.suffix
        )
    assert plan_continuation(CHAT, body, transcript) == NotExact("a request or a text that can't be read")
    transcript.feed(transcript.pattern.prefix + rb"\ude00" + transcript.pattern.suffix)
    found = plan_continuation(CHAT, body, transcript)
    assert isinstance(found, Continuation)
    assert json.loads(found.body)["messages"][1]["content"] == "Hello world and all"
    assert found.overlap == " theabca😀"


FORBIDDEN: list[dict[str, Any]] = [
    {"tools": [{"type": "function"}]},
    {"tool_choice": "required"},
    {"functions": [{}]},
    {"function_call": {"name": "f"}},
    {"logprobs": True},
    {"top_logprobs": 2},
    {"prompt_logprobs": 0},
    {"n": 2},
    {"best_of": 2},
    {"response_format": {"type": "json_object"}},
    {"guided_json": {}},
    {"structured_outputs": {"json": {}}},
    {"echo": True},
    {"suffix": "end"},
    {"use_beam_search": True},
    {"presence_penalty": 0.1},
    {"frequency_penalty": -1},
    {"return_token_ids": True},
    {"stream_options": {"continuous_usage_stats": True}},
    {"include_reasoning": False},
    {"modalities": ["text", "audio"]},
    {"truncate_prompt_tokens": 12},
    {"stop": ["x"], "include_stop_str_in_output": True},
    {"stream_interval": 8},
    {"kv_transfer_params": {}},
    {"a_field_of_tomorrow": 1},
]


@pytest.mark.parametrize("field", FORBIDDEN, ids=lambda field: next(reversed(field)))
def test_fields_that_an_answer_depends_on_forbid_it(field: dict[str, Any]) -> None:
    assert plan(**field) == NotExact(f"`{next(reversed(field))}` in the request")


@pytest.mark.parametrize("kind", [[{}], {"x": 1}, "x", 1.5])
def test_a_field_that_takes_long_to_read_forbids_it(kind: object) -> None:
    """Instances take fields that they don't know, of any size; here they are read at once, while all others wait."""
    found = plan(odd_field=[kind] * 100_000)
    assert isinstance(found, NotExact)
    assert "long" in found.reason


def test_a_seed_matters_only_where_tokens_are_sampled() -> None:
    assert plan(seed=3, temperature=1) == NotExact("`seed` in the request")
    assert isinstance(plan(seed=3), Continuation)


def test_neutral_values_are_harmless() -> None:
    neutral: dict[str, Any] = {
        "tools": None, "guided_json": None, "n": 1, "logprobs": False, "presence_penalty": 0.0, "tool_choice": "none",
        "response_format": {"type": "text"}, "stream_options": {"include_usage": True}, "modalities": ["text"],
        "function_call": "auto",
    }  # fmt: skip
    assert isinstance(plan(**neutral), Continuation)


def test_a_deterministic_answer_may_be_repeated() -> None:
    body = ENGINE.request(max_tokens=20)
    found = plan_continuation(CHAT, body, after(ENGINE, body, AMID), repeat=True)
    assert isinstance(found, Continuation)
    assert json.loads(found.body) == json.loads(body)
    assert (found.overlap, found.base_tokens) == (HANDED + AGAIN, 0)
    for warm in (1, None):
        body = ENGINE.request(temperature=warm)
        refused = plan_continuation(CHAT, body, after(ENGINE, body, AMID), FITTING, repeat=True)
        assert refused == NotExact("`temperature` in the request")


def test_before_the_first_word_an_answer_is_repeated() -> None:
    for events in (0, 1):
        found = plan(events=events, tools=[{"type": "function"}], logprobs=True)
        assert isinstance(found, Continuation)
        assert json.loads(found.body) == json.loads(
            ENGINE.request(tools=[{"type": "function"}], logprobs=True)
        )
        assert found.base_tokens == 0
    assert plan(events=1, n=2) == NotExact("`n` in the request")


def test_an_answer_of_white_space_is_repeated() -> None:
    blank = PlainEngine(CHAT, ("\n", "\n", "Well"))
    for more in ({}, {"temperature": 1}):
        found = plan(blank, 3, **more)
        assert isinstance(found, Continuation)
        assert json.loads(found.body) == json.loads(blank.request(**more))
        assert (found.overlap, found.base_tokens) == ("\n\n", 0)


def test_an_ended_text_gets_the_end_marker_only() -> None:
    assert plan(events=14) == Complete(b"data: [DONE]\n\n")
    assert plan(events=15) == Complete(b"")
    usage = {"include_usage": True}
    assert plan(events=15, stream_options=usage) == Complete(b"data: [DONE]\n\n")
    found = plan(events=14, stream_options=usage, max_completion_tokens=60)
    assert isinstance(found, Continuation)
    assert found.only_usage
    assert json.loads(found.body)["max_completion_tokens"] == 1


def test_fields_are_read_as_the_engine_reads_them() -> None:
    """Lax types: see tests/proxy/openai/test_body.py."""
    assert plan(events=14, stream_options={"include_usage": "off"}) == Complete(b"data: [DONE]\n\n")
    found, same = plan(max_tokens=" 90 ", temperature=1), plan(max_tokens=90, temperature=1)
    assert isinstance(found, Continuation)
    assert found == same


def test_an_ended_text_whose_tokens_nobody_counted_cannot_get_its_usage() -> None:
    usage = {"stream_options": {"include_usage": True}}
    heard = after(ENGINE, ENGINE.request(**usage), 14)
    several = EngineTraits(one_token_events=False)
    assert plan_continuation(CHAT, ENGINE.request(**usage), heard, several) == NotExact(UNCOUNTED)


def test_a_text_without_tokens_left_gets_its_end_only() -> None:
    """Engines that tell the end in an event of its own: vLLM tells it with the last token."""
    body = ENGINE.request(max_tokens=4, stream_options={"include_usage": True})
    transcript = after(ENGINE, ENGINE.request(), 10)
    transcript.feed(transcript.pattern.prefix + b" ." + transcript.pattern.suffix)
    passed = [
        *ENGINE.answer(ENGINE.request())[:10],
        transcript.pattern.prefix + b" ." + transcript.pattern.suffix,
    ]
    found = plan_continuation(CHAT, body, transcript)
    assert isinstance(found, Continuation)
    assert (found.only_usage, found.finish_reason) == (True, "length")
    splicer = Splicer(found, transcript)
    told = whole([*passed, *(splicer.feed(raw) for raw in PlainEngine(CHAT, SAID, "two").answer(found.body))])
    assert told["text"] == "Hello world and all the rest of it ."
    assert told["end"] == "length"
    assert told["usage"][0]["completion_tokens"] == 4
    assert told["usage"][0]["prompt_tokens"] == 7


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/v1/responses", b"{}", "/v1/responses is no plain stream"),
        (CHAT, b"[]", "a request or a text that can't be read"),
        (CHAT, b"{", "a request or a text that can't be read"),
        (CHAT, b'{"temperature":0}', "a request or a text that can't be read"),
        (CHAT, ENGINE.request(add_generation_prompt=False), "`add_generation_prompt` in the request"),
        (COMPLETIONS, PROMPTED.request(prompt=[1, 2, 3]), "a prompt that is not one text"),
        (COMPLETIONS, PROMPTED.request(prompt=["a", "b"]), "several prompts"),
        (COMPLETIONS, PROMPTED.request(prompt=[[1], [2]]), "several prompts"),
    ],
)
def test_requests_that_cannot_be_continued(path: str, body: bytes, why: str) -> None:
    engine = PROMPTED if path == COMPLETIONS else ENGINE
    assert plan_continuation(path, body, after(engine, engine.request(), AMID)) == NotExact(why)


def test_an_unusual_stream_names_its_reason() -> None:
    transcript = Transcript()
    transcript.feed(event({"error": {"message": "EngineCore died"}}))
    assert plan_continuation(CHAT, ENGINE.request(), transcript) == NotExact("an error event")


def test_thoughts_are_refused_since_templates_drop_them() -> None:
    thoughtful = PlainEngine(CHAT, ("<think>", "so", "</think>", *SAID))
    assert plan(thoughtful) == NotExact("thoughts in the text")


class TestSplicer:
    """Answers of the next instance that are not what vLLM's are."""

    def test_another_text_than_the_overlap_diverges(self) -> None:
        found = plan()
        assert isinstance(found, Continuation)
        splicer = Splicer(found, after(ENGINE, ENGINE.request(), AMID))
        other = PlainEngine(CHAT, (*SAID[:4], " mars"))
        with pytest.raises(Diverged, match="' all the rest of it!' should be repeated, ' mars' came"):
            splicer.feed(b"".join(other.answer(found.body)))

    @pytest.mark.parametrize("skip", [1, 2])
    def test_an_end_within_the_overlap_diverges(self, skip: int) -> None:
        found = plan()
        assert isinstance(found, Continuation)
        splicer = Splicer(found, after(ENGINE, ENGINE.request(), AMID))
        with pytest.raises(Diverged, match="it ended"):
            splicer.feed(b"".join(PlainEngine(CHAT, SAID[:4]).answer(found.body)[skip:]))

    def test_the_rest_of_a_longer_token_passes(self) -> None:
        found = plan(events=3)
        assert isinstance(found, Continuation)
        assert (found.overlap, found.base_tokens) == ("Hello wor", 0)  # so short an answer begins again
        told = Splicer(found, after(ENGINE, ENGINE.request(), 3)).feed(
            b"".join(PlainEngine(CHAT, ("Hello", " world")).answer(found.body))
        )
        assert b'"content":"ld"' in told

    def test_errors_and_comments_pass_as_they_are(self) -> None:
        splicer = Splicer(Continuation(b"", 0), Transcript())
        error = event({"error": {"message": "no"}})
        assert splicer.feed(b": wait\n\n" + error) == b": wait\n\n" + error

    def test_garbage_diverges(self) -> None:
        with pytest.raises(Diverged, match="no chunk"):
            Splicer(Continuation(b"", 0), Transcript()).feed(b"data: {oh\n\n")
        with pytest.raises(Diverged, match="too large"):
            Splicer(Continuation(b"", 0), Transcript()).feed(b"data: a part of an event")

    def test_a_role_with_text_keeps_its_text(self) -> None:
        splicer = Splicer(Continuation(b"", 0), after(ENGINE, ENGINE.request(), 1))
        chunk: dict[str, Any] = {
            "id": "x",
            "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hi"}}],
        }
        told = json.loads(splicer.feed(event(chunk))[6:])
        assert told == {"id": "id-one", "choices": [{"index": 0, "delta": {"content": "Hi"}}]}

    def test_usage_never_goes_below_nothing(self) -> None:
        splicer = Splicer(Continuation(b"", 5), Transcript())
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        told = json.loads(splicer.feed(event({"id": "x", "choices": [], "usage": usage}))[6:])
        assert told["usage"] == {"prompt_tokens": 0, "completion_tokens": 7, "total_tokens": 7}

    def test_json_with_spaces_is_parsed_event_by_event(self) -> None:
        found = plan(events=1)
        assert isinstance(found, Continuation)
        transcript = after(ENGINE, ENGINE.request(), 1)
        splicer = Splicer(found, transcript)
        for word in ("a", "b"):
            raw = json.dumps({"id": "y", "choices": [{"index": 0, "delta": {"content": word}}]}).encode()
            told = splicer.feed(b"data: " + raw + b"\n\n")
            assert json.loads(told[6:])["id"] == "id-one"
            transcript.feed(told)
        assert transcript.pieces() == [b"a", b"b"]

    @pytest.mark.parametrize("odd", [{"choices": [1]}, {"choices": 1}, {"choices": [], "usage": {"a": 1}}])
    def test_chunks_of_another_shape_diverge(self, odd: dict[str, Any]) -> None:
        with pytest.raises(Diverged, match="no chunk"):
            Splicer(Continuation(b"", 0), Transcript()).feed(event({"id": "x", **odd}))

    @given(
        st.lists(
            st.sampled_from(
                [*ENGINE.answer(ENGINE.request()), b'"', b"\n\n", b"\x80", b"[" * 2000, b"data: "]
            )
        )
    )
    def test_any_bytes_pass_or_diverge(self, raw: list[bytes]) -> None:
        transcript = Transcript()
        splicer = Splicer(Continuation(b"", 1, " world"), transcript)
        try:
            for payload in (*raw, b"".join(raw)):
                transcript.feed(splicer.feed(payload))
        except Diverged:
            return
        plan_continuation(CHAT, ENGINE.request(), transcript)
