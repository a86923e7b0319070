"""A plain stream that is cut goes on on another instance; the client sees one answer."""

from __future__ import annotations

import asyncio
import json

import pytest
from support.continuations import WORDS, speaks
from support.fakes import SOON_S
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import DONE


def told(body: bytes) -> tuple[str, set[str], list[dict[str, object]]]:
    """The text, the ids, and all chunks of a stream."""
    chunks = [json.loads(e[6:]) for e in body.split(b"\n\n") if e.startswith(b"data: {")]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    return text, {c["id"] for c in chunks}, chunks


async def stream(proxy: ProxyUnderTest, **more: object) -> bytes:
    asked = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, **more}
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True, **asked) as answer:
        assert answer.status == 200
        return await answer.read()


@pytest.mark.parametrize("how", ["cut", "half", "error", "clean end"])
@pytest.mark.parametrize("after", [1, 2, 7, 11])
async def test_one_answer_from_two_instances(proxy: ProxyUnderTest, how: str, after: int) -> None:
    await proxy.engine(0, speaks(after, how))
    await proxy.engine(1, speaks(after, how))
    await proxy.engine(2, speaks(None))
    body = await stream(proxy)
    text, ids, chunks = told(body)
    assert text == "".join(WORDS)
    assert body.endswith(DONE)
    assert body.count(DONE) == 1
    assert len([c for c in chunks if c["choices"] and c["choices"][0]["delta"].get("role")]) == 1  # type: ignore[index]
    assert proxy.sums()["completed"] == 1
    assert proxy.server.readings.stats()["continued"] == 1
    assert proxy.balanced()
    assert ids


@pytest.mark.parametrize("unfinished", ["", "null", False, 0, {}], ids=repr)
@pytest.mark.parametrize("how", ["cut", "half", "clean end"])
async def test_what_is_no_finish_reason_is_no_end(
    proxy: ProxyUnderTest, unfinished: object, how: str
) -> None:
    """SGLang, TGI and older Ollama write "" where the API has null: the stream goes on elsewhere."""
    for slot, cut_after in enumerate((5, 5, None)):
        await proxy.engine(slot, speaks(cut_after, how, unfinished=unfinished))
    body = await stream(proxy)
    assert told(body)[0] == "".join(WORDS)
    assert body.endswith(DONE)
    assert proxy.server.readings.stats()["continued"] == 1


async def test_a_stream_that_is_cut_behind_an_unknown_reason_ends_honestly(proxy: ProxyUnderTest) -> None:
    """Nobody knows whether it is an end: neither complete, nor continued."""
    for slot in range(3):
        await proxy.engine(slot, speaks(5, unfinished="eos"))
    body = await stream(proxy)
    assert DONE not in body
    assert "error" in json.loads(body[:-2].split(b"\n\n")[-1].removeprefix(b"data: "))
    assert proxy.sums()["failed"] == 1


async def test_usage_is_that_of_the_whole(proxy: ProxyUnderTest) -> None:
    await proxy.engine(0, speaks(4))
    await proxy.engine(1, speaks(4))
    await proxy.engine(2, speaks(None))
    body = await stream(proxy, stream_options={"include_usage": True})
    _, _, chunks = told(body)
    usage = chunks[-1]["usage"]
    assert isinstance(usage, dict)
    assert usage["prompt_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize(
    "field", [{"tools": [{"type": "function"}]}, {"logprobs": True}, {"n": 2}, {"response_format": {"type": "json_object"}}]
)  # fmt: skip
async def test_what_can_not_go_on_ends_honestly(proxy: ProxyUnderTest, field: dict[str, object]) -> None:
    await proxy.engine(0, speaks(4))
    await proxy.engine(1, speaks(4))
    body = await stream(proxy, **field)
    assert DONE not in body
    last = body[:-2].split(b"\n\n")[-1]
    assert "error" in json.loads(last.removeprefix(b"data: "))
    assert proxy.sums()["failed"] == 1


async def test_the_only_instance_comes_back_and_goes_on(proxy: ProxyUnderTest) -> None:
    engine = await proxy.engine(0, speaks(5))
    asked = asyncio.create_task(stream(proxy))
    await until(lambda: bool(engine.calls))
    await asyncio.sleep(0.1)
    await engine.die()
    proxy.server.remove_upstream(0, 1, "killed by signal 9")
    await proxy.engine(0, speaks(None), generation=2)
    text, _, _ = told(await asked)
    assert text == "".join(WORDS)


async def test_the_access_line_says_so(proxy: ProxyUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "launcher.access")
    await proxy.engine(0, speaks(3))
    await proxy.engine(1, speaks(3))
    await proxy.engine(2, speaks(None))
    await stream(proxy)
    (record,) = [record for record in caplog.records if record.name == "launcher.access"]
    assert record.__dict__["continued"] >= 1
    assert record.__dict__["attempts"] >= 2


async def test_a_stream_cut_again_and_again(build: Build) -> None:
    proxy = await build(policy="round-robin")
    for slot in range(3):
        await proxy.engine(slot, speaks(3))
    await proxy.engine(3, speaks(None))
    text, _, _ = told(await stream(proxy))
    assert text == "".join(WORDS)
    assert proxy.sums()["completed"] == 1
