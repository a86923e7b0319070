"""The bytes of a client's body that an instance gets."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

import pytest
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartParser
from support.proxy_under_test import ProxyUnderTest
from support.scripted_engine import DONE, Call, event

from launcher.proxy.downstream.uploads import LARGE_BYTES

AUDIO = "/v1/audio/transcriptions"
TYPE = "multipart/form-data; boundary=----x7MA"


def form(*fields: tuple[str, str]) -> bytes:
    """As a library writes it that begins and ends its forms with line ends."""
    parts = "".join(
        f"------x7MA\r\nContent-Disposition: form-data; {name}\r\nContent-Type: text/plain; charset=ISO-8859-1\r\n"
        f"Content-Transfer-Encoding: 8bit\r\n\r\n{value}\r\n"
        for name, value in fields
    )
    return f"\r\n{parts}------x7MA--\r\n\r\n".encode()


AUDIO_FILE = (r'name="file"; filename="C:\Users\a \"b\"; name=x.wav"; size=4', "RIFF")


async def test_a_form_reaches_an_instance_untouched(proxy: ProxyUnderTest) -> None:
    async def answer(call: Call) -> None:
        await call.json({"text": "hello", "usage": {"type": "duration", "seconds": 3}})

    engine = await proxy.engine(0, answer)
    sent = form(('name="model"', "m"), AUDIO_FILE)
    async with proxy.client.post(AUDIO, data=sent, headers={"Content-Type": TYPE}) as got:
        assert got.status == 200, await got.text()
    assert engine.calls[0].body == sent


async def test_a_streams_form_asks_for_its_usage_in_front_of_the_first_boundary(
    proxy: ProxyUnderTest,
) -> None:
    async def answer(call: Call) -> None:
        await call.start_stream()
        await call.chunk(event("hello") + DONE)
        await call.end_stream()

    engine = await proxy.engine(0, answer)
    sent = form(('name="model"', "m"), ('name="stream"', "true"), AUDIO_FILE)
    async with proxy.client.post(AUDIO, data=sent, headers={"Content-Type": TYPE}) as got:
        assert got.status == 200, await got.text()
        await got.read()
    fields = await _read(engine.calls[0].body)
    assert fields == [("stream_include_usage", "true"), ("model", "m"), ("stream", "true"), ("file", "RIFF")]


async def _read(body: bytes) -> list[tuple[str, str]]:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    found = await MultiPartParser(Headers({"Content-Type": TYPE}), stream()).parse()
    fields = [
        (name, value if isinstance(value, str) else (await value.read()).decode())
        for name, value in found.multi_items()
    ]
    await found.close()
    return fields


MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize("size", [0, LARGE_BYTES])
async def test_a_byte_order_mark_goes_on_as_it_is(proxy: ProxyUnderTest, size: int) -> None:
    engine = await proxy.engine(0)
    sent = MARK + json.dumps({"model": "m", "messages": ["x" * size]}).encode()
    async with proxy.client.post("/v1/chat/completions", data=sent) as got:
        assert got.status == 200, await got.text()
    assert engine.calls[0].body == sent


@pytest.mark.parametrize("options", [None, {"include_usage": False}])
async def test_a_byte_order_mark_is_left_out_where_the_proxy_adds_fields(
    proxy: ProxyUnderTest, options: object
) -> None:
    engine = await proxy.engine(0)
    more = {} if options is None else {"stream_options": options}
    sent = MARK + json.dumps({"model": "m", "messages": [], "stream": True, **more}).encode()
    async with proxy.client.post("/v1/chat/completions", data=sent) as got:
        assert got.status == 200, await got.text()
        await got.read()
    asked = json.loads(engine.calls[0].body.decode())
    assert asked["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("size", [0, LARGE_BYTES])
@pytest.mark.parametrize("text", [r"all good \ud83d", r"\ud83dx", r"\ude00 low"])
async def test_half_a_surrogate_pair_is_refused_whatever_the_bodys_size(
    proxy: ProxyUnderTest, text: str, size: int
) -> None:
    """vLLM 0.32 reads it, and its tokenizer refuses it: "TextEncodeInput must be Union[...]"."""
    engine = await proxy.engine(0)
    sent = f'{{"model":"m","messages":[{{"role":"user","content":"{"x" * size}{text}"}}]}}'
    async with proxy.client.post("/v1/chat/completions", data=sent.encode()) as got:
        error = (await got.json())["error"]
    assert (got.status, error["code"]) == (400, "invalid_json")
    assert f"is half of a surrogate pair (byte {sent.index(chr(92) + 'u')})" in error["message"]
    assert engine.calls == []
