"""An answer that promises JSON and has none is no answer: another instance is asked, and nobody takes it for whole."""

from __future__ import annotations

import asyncio
import json

import pytest
from support.fakes import SOON_S
from support.proxy_under_test import ProxyUnderTest, until
from support.scripted_engine import Call, Script, answer_chat

GOOD = {"id": "x", "choices": [{"message": {"content": "hi"}}]}
WHOLE = json.dumps(GOOD).encode()
LARGE = json.dumps(
    {"data": [{"embedding": [number / 7 for number in range(20_000)]}, {"embedding": [1]}]}
).encode()


def says(
    body: bytes, kind: str | None = "application/json", *, status: int = 200, chunked: bool = False
) -> Script:
    async def script(call: Call) -> None:
        head = [f"HTTP/1.1 {status} X", *([] if kind is None else [f"Content-Type: {kind}"])]
        head.append("Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}")
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        framed = chunk + b"0\r\n\r\n" if chunked else body
        await call.raw("\r\n".join(head).encode() + b"\r\n\r\n" + framed)

    return script


BAD = {
    "nothing": (b"", "application/json"),
    "half an object": (WHOLE[:-1], "application/json"),
    "cut in a string": (WHOLE[:20], "application/json"),
    "more than one": (WHOLE + WHOLE, "application/json"),
    "garbage behind it": (WHOLE + b"\x00", "application/json"),
    "a page": (b"<html>Bad Gateway</html>", "text/html"),
    "a page that calls itself JSON": (b"<html>", "application/json; charset=utf-8"),
    "words": (b"Internal Server Error", "text/plain"),
    "words without a type": (b"Internal Server Error", None),
    "not a number": (b'{"logprob": NaN}', "application/json"),
    "a large one, cut behind an object": (LARGE[: LARGE.index(b", {")], "application/json"),
    "a problem": (b"{", "application/problem+json"),
}


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", BAD)
async def test_another_instance_is_asked(
    proxy: ProxyUnderTest, what: str, stream: bool, chunked: bool
) -> None:
    body, kind = BAD[what]
    bad = says(body, kind, chunked=chunked)
    engines = [await proxy.engine(slot, bad) for slot in range(2)]
    good = await proxy.engine(2)
    for _ in range(3):
        async with asyncio.timeout(SOON_S), proxy.chat(stream=stream) as answer:
            assert answer.status == 200
            got = await answer.read()
        assert got.endswith(b"[DONE]\n\n") if stream else json.loads(got) == GOOD
    assert len(good.calls) == 3
    asked = sum(len(engine.calls) for engine in engines)
    assert asked >= 2
    assert proxy.server.readings.stats()["retried"] == asked
    await until(lambda: proxy.sums()["completed"] == 3)
    assert proxy.suspects


@pytest.mark.parametrize("what", BAD)
async def test_where_there_is_no_other_the_client_is_told(proxy: ProxyUnderTest, what: str) -> None:
    await proxy.engine(0, says(*BAD[what]))
    async with asyncio.timeout(SOON_S), proxy.chat() as answer:
        assert answer.status == 502
        assert (await answer.json())["error"]["type"] == "upstream_error"
    assert proxy.sums()["failed"] == 1
    assert proxy.balanced()


@pytest.mark.parametrize(
    ("path", "body", "kind", "status"),
    [
        ("/v1/embeddings", b"\x00\x01\xff", "application/octet-stream", 200),
        ("/v1/chat/completions", b"RIFF....", "audio/wav", 200),
        ("/v1/chat/completions", b' {"a": [1, "x"]}\n', "application/json", 200),
        ("/v1/chat/completions", WHOLE, "text/plain", 200),
        ("/rerank", b"[1, 2]", "application/json", 200),
        ("/v1/chat/completions", b"", "application/json", 204),
        ("/v1/chat/completions", b"no", "text/plain", 400),
        ("/v1/embeddings", LARGE, "application/json", 200),
    ],
)
async def test_what_is_as_it_should_be_passes(
    proxy: ProxyUnderTest, path: str, body: bytes, kind: str, status: int
) -> None:
    await proxy.engine(0, says(body, kind, status=status))
    async with asyncio.timeout(SOON_S), proxy.client.post(path, data=b'{"model": "m"}') as answer:
        assert (answer.status, await answer.read()) == (status, body)
    assert proxy.server.readings.stats()["retried"] == 0


@pytest.mark.parametrize(("body", "kind"), [(b"1\n00:00 --> 00:01\nwords\n", "text/plain"), (b"words", None)])
async def test_the_texts_of_audio_pass(proxy: ProxyUnderTest, body: bytes, kind: str | None) -> None:
    await proxy.engine(0, says(body, kind))
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
    head = {"Content-Type": "multipart/form-data; boundary=b"}
    async with (
        asyncio.timeout(SOON_S),
        proxy.client.post("/v1/audio/transcriptions", data=form, headers=head) as answer,
    ):
        assert (answer.status, await answer.read()) == (200, body)


async def test_an_instance_is_blamed_once_another_has_answered_well(proxy: ProxyUnderTest) -> None:
    """What only this request makes the instances say puts none of them out of rotation."""
    engines = [await proxy.engine(slot, says(b"{")) for slot in range(2)]
    for _ in range(6):
        async with asyncio.timeout(SOON_S), proxy.chat() as answer:
            assert answer.status == 502
    for engine in engines:
        engine.script = answer_chat
    async with asyncio.timeout(SOON_S), proxy.client.get("/metrics") as answer:
        page = await answer.text()
    assert 'numa_launcher_slot_ejected{model="m",slot="0"} 0.0' in page
    assert 'numa_launcher_slot_ejected{model="m",slot="1"} 0.0' in page
