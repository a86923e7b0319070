"""What is kept of an instance: whose requests are on it, and what is said of it once, however many they are."""

from __future__ import annotations

import asyncio
import json

import pytest
from support.fakes import SOON_S
from support.plain_engine import CHAT
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import DONE, Call, FakeEngine, answer_chat, event, not_found

pytestmark = pytest.mark.virtual_time

FLOW_S = 0.2  # between two events


async def read(proxy: ProxyUnderTest, **more: object) -> bytes:
    async with proxy.chat(**more) as answer:  # type: ignore[arg-type]
        return await answer.read()


async def hangs(call: Call) -> None:
    """It answers nothing else, either."""
    if b'"slow"' in call.body:
        await call.start_stream()
        await call.chunk(event("one"))
    elif call.target == CHAT:
        await answer_chat(call)
        return
    await call.until_left()


async def flows(call: Call) -> None:
    await call.start_stream()
    while not call.left.is_set():
        await call.chunk(event("x"))
        await asyncio.sleep(FLOW_S)


def ejections(proxy: ProxyUnderTest, slot: int) -> int:
    return proxy.server.counters.slots[slot].ejected


async def test_an_instance_that_comes_again_under_its_name_is_another_one(proxy: ProxyUnderTest) -> None:
    """Attempts that leave the old one take nothing off the new one."""
    engine = await proxy.engine(0, hangs)
    async with proxy.chat(stream=True, user="slow", tools=[{"type": "function"}]) as answer:
        await answer.content.readuntil(b"\n\n")
        assert proxy.server.in_flight(0, 1) == 1
        proxy.server.remove_upstream(0, 1, "signal 9")
        proxy.server.add_upstream(0, 1, "m", engine.address, 8)
        assert proxy.server.in_flight(0, 1) == proxy.server.progress(0, 1) == 0
        assert b"signal 9" in await answer.content.read()
    assert proxy.server.in_flight(0, 1) == proxy.server.progress(0, 1) == 0
    assert await read(proxy)
    assert proxy.server.in_flight(0, 1) == 0
    assert proxy.server.progress(0, 1) > 0
    assert proxy.idle == []
    assert proxy.balanced()


async def test_instances_that_end_after_the_proxy_was_closed_are_let_go(proxy: ProxyUnderTest) -> None:
    """As at the daemon's end: first the proxy, then the instances."""
    await proxy.engine(0)
    assert await read(proxy)
    await proxy.server.stop(0.0)
    proxy.server.remove_upstream(0, 1, "stopped")
    assert proxy.server.in_flight(0, 1) == 0


async def test_that_an_instance_hangs_is_said_once(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    proxy = await build(hung_timeout_s=0.8)
    await proxy.engine(0, hangs)

    def ask() -> asyncio.Task[bytes]:
        return asyncio.create_task(read(proxy, stream=True, user="slow", tools=[1]))

    asked = [ask() for _ in range(6)]
    await until(lambda: proxy.server.in_flight(0, 1) == 6)
    await proxy.engine(1, flows)
    while proxy.server.in_flight(1, 1) == 0:  # one that flows beside them
        asked.append(ask())
        await asyncio.sleep(0.01)
    await until(lambda: proxy.server.in_flight(0, 1) == 0)
    await asyncio.sleep(0.2)  # some ticks more
    assert [suspect[:2] for suspect in proxy.suspects if "it hangs" in suspect[2]] == [(0, 1)]
    assert ejections(proxy, 0) == 1
    assert len([record for record in caplog.records if "ejected" in record.getMessage()]) == 1
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_an_instance_whose_clients_do_not_read_owes_nothing(proxy: ProxyUnderTest) -> None:
    """It has done its work; to stand still with such requests on it is no hang."""

    async def pours(call: Call) -> None:
        await call.start_stream()
        while not call.left.is_set():
            await call.chunk(event("x" * 60_000))

    await proxy.engine(0, pours)
    body = b'{"model":"m","stream":true}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, _ = await proxy.raw(head.encode() + body)
    await until(lambda: proxy.server.in_flight(0, 1) == 1 and proxy.server.awaited(0, 1) == 0)
    await reader.readuntil(b"\r\n\r\n")
    taken = 0
    async with asyncio.timeout(SOON_S):
        while not proxy.server.awaited(0, 1):  # until it reads
            taken += len(await reader.read(1 << 20))
    assert taken > 60_000


async def test_that_failures_ejected_an_instance_is_said_once(
    proxy: ProxyUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    """Eight requests are on it when it breaks; once another instance has answered three of them, it is out."""
    go = asyncio.Event()

    async def breaks(call: Call) -> None:
        await go.wait()
        call.cut()

    engine = await proxy.engine(0, breaks)
    asked = [asyncio.create_task(read(proxy)) for _ in range(8)]
    await until(lambda: len(engine.calls) == 8)
    await proxy.engine(1)
    go.set()
    async with asyncio.timeout(SOON_S):
        assert all(json.loads(body)["choices"] for body in await asyncio.gather(*asked))
    await until(lambda: bool([r for r in caplog.records if "ejected" in r.getMessage()]))
    assert len([record for record in caplog.records if "ejected" in record.getMessage()]) == 1
    assert ejections(proxy, 0) == 1
    assert {suspect[:2] for suspect in proxy.suspects} == {(0, 1)}
    assert proxy.balanced()


async def lies(call: Call) -> None:
    """Health is another one's; of a completion nothing comes."""
    await call.until_left()


async def test_silence_is_told_once_whatever_the_requests_are(build: Build) -> None:
    """There is no sibling: nothing is ejected, and the requests stay."""
    proxy = await build(hung_timeout_s=0.1)
    await proxy.engine(0, lies)
    asked = [asyncio.create_task(read(proxy, stream=stream)) for stream in (False, True)]
    await until(lambda: bool(proxy.suspects))
    await asyncio.sleep(0.3)
    assert [suspect[:2] for suspect in proxy.suspects] == [(0, 1)]
    assert proxy.suspects[0][2].startswith("nothing has come of its 2 requests for ")
    assert proxy.server.silent(0, 1)
    assert not proxy.server.silent(0, 2)
    assert ejections(proxy, 0) == 0
    assert proxy.server.in_flight(0, 1) == 2
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await until(lambda: not proxy.server.silent(0, 1))


async def test_an_instance_that_answers_now_and_then_is_not_silent(build: Build) -> None:
    proxy = await build(hung_timeout_s=0.5)
    go = asyncio.Event()

    async def long(call: Call) -> None:
        if b'"slow"' in call.body:
            await go.wait()
        await answer_chat(call)

    await proxy.engine(0, long)
    slow = asyncio.create_task(read(proxy, user="slow"))
    await until(lambda: proxy.server.in_flight(0, 1) == 1)
    for _ in range(10):
        await read(proxy)
        await asyncio.sleep(0.1)
    assert proxy.suspects == []
    go.set()
    assert await slow


async def test_a_full_silent_instance_gives_one_request_to_a_sibling(build: Build) -> None:
    """So that the supervisor's question waits in no line; the others stay: their answers may only take long."""
    proxy = await build(hung_timeout_s=0.1, eject_s=60.0)
    await proxy.engine(0, lies)
    asked = [asyncio.create_task(read(proxy)) for _ in range(8)]
    await until(lambda: proxy.server.in_flight(0, 1) == 8)
    await proxy.engine(1)
    await until(lambda: proxy.server.in_flight(0, 1) == 7)
    assert proxy.server.silent(0, 1)
    done, rest = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    assert [bool(json.loads(task.result())["choices"]) for task in done] == [True]
    assert len(rest) == 7
    assert await read(proxy), "new ones go to the sibling"
    assert ejections(proxy, 0) == 1
    assert proxy.server.in_flight(0, 1) == 7
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_a_long_prompt_is_given_time(build: Build) -> None:
    proxy = await build(hung_timeout_s=0.05, first_token_timeout_per_1k_s=1000.0)
    await proxy.engine(0, lies)
    asked = asyncio.create_task(read(proxy, messages=[{"role": "user", "content": "word " * 4000}]))
    await until(lambda: proxy.server.in_flight(0, 1) == 1)
    await asyncio.sleep(0.3)
    assert proxy.suspects == []
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


# --- Silent streams: the engine is asked. ---

TOOLS = {"tools": [{"type": "function"}]}
PING = b": ping\n\n"
COMMENT = b": waiting\n\n"


class Silent:
    """An engine whose streams say `words` and then nothing until `go`. Its counters rise with each reading while it
    `computes`; without counters it gives a token to who asks."""

    def __init__(self, *words: bytes, counts: bool, computes: bool, pings: bool = False) -> None:
        self.words = words
        self.counts = counts
        self.computes = computes
        self.pings = pings
        self.go = asyncio.Event()
        self.tokens = 0
        self.streams = 0

    async def metrics(self, call: Call) -> None:
        if not self.counts:
            await not_found(call)
            return
        self.tokens += self.computes
        page = f"vllm:num_requests_running 1\nvllm:generation_tokens_total {self.tokens}\n".encode()
        await call.raw(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(page), page))

    async def __call__(self, call: Call) -> None:
        if b'"max_tokens": 1' in call.body:
            if not self.computes:
                await call.until_left()
            await call.json({"choices": [{"text": "a"}]})
        else:
            await self._stream(call)

    async def _stream(self, call: Call) -> None:
        self.streams += 1
        await call.start_stream()
        for word in self.words:
            await call.chunk(word)
        while self.pings and not call.left.is_set():
            await call.chunk(PING)
            await asyncio.sleep(1)
        waits = {asyncio.create_task(event.wait()) for event in (self.go, call.left)}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.go.is_set():
            await call.chunk(event("end"))
            await call.chunk(DONE)
            await call.end_stream()


async def silent_engine(proxy: ProxyUnderTest, silent: Silent) -> FakeEngine:
    return await proxy.engine(0, silent, metrics=silent.metrics)


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'


async def beside(proxy: ProxyUnderTest) -> asyncio.Task[bytes]:
    """A stream that flows on a second instance."""
    await proxy.engine(1, flows)
    while True:
        task = asyncio.create_task(read(proxy, stream=True, user="beside", **TOOLS))
        await until(lambda: proxy.server.in_flight(1, 1) + proxy.server.in_flight(0, 1) == 2)
        if proxy.server.in_flight(1, 1):
            return task
        task.cancel()
        await until(lambda: proxy.server.in_flight(0, 1) == 1)


@pytest.mark.parametrize("counts", [True, False])
async def test_a_silent_stream_of_an_engine_that_computes_is_no_hang(build: Build, *, counts: bool) -> None:
    proxy = await build()
    silent = Silent(event("one"), event("two"), counts=counts, computes=True)
    await silent_engine(proxy, silent)
    slow = asyncio.create_task(read(proxy, stream=True, **TOOLS))
    await until(lambda: proxy.server.in_flight(0, 1) == 1)
    other = await beside(proxy)
    await asyncio.sleep(150)
    silent.go.set()
    async with asyncio.timeout(SOON_S):
        assert (await slow).endswith(event("end") + DONE)
    assert silent.streams == 1
    assert proxy.suspects == []
    assert ejections(proxy, 0) == 0
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("pings", [True, False])
async def test_an_engine_that_does_not_compute_hangs_also_behind_pings(
    build: Build, *, counts: bool, pings: bool
) -> None:
    proxy = await build(hung_timeout_s=4.0)
    await silent_engine(proxy, Silent(event("one"), counts=counts, computes=False, pings=pings))
    slow = asyncio.create_task(read(proxy, stream=True, **TOOLS))
    await until(lambda: proxy.server.in_flight(0, 1) == 1)
    other = await beside(proxy)
    async with asyncio.timeout(SOON_S):
        assert b"it hangs" in await slow
    assert ejections(proxy, 0) == 1
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


@pytest.mark.parametrize("words", [(event("one"),), (ROLE,)], ids=["words", "role only"])
@pytest.mark.parametrize("shortest_s", [2.0, 10.0])
async def test_counters_that_rise_are_no_idle_stream(
    build: Build, words: tuple[bytes, ...], shortest_s: float
) -> None:
    """There is one instance; its parser holds a tool call back for longer than any time-out."""
    proxy = await build(
        idle_timeout_s=10.0,
        hung_timeout_s=15.0,
        first_token_timeout_s=shortest_s,
        first_token_timeout_per_1k_s=0.0,
    )
    silent = Silent(*words, counts=True, computes=True)
    await silent_engine(proxy, silent)
    slow = asyncio.create_task(read(proxy, stream=True, **TOOLS))
    await until(lambda: silent.streams == 1)
    await asyncio.sleep(60)
    silent.go.set()
    async with asyncio.timeout(SOON_S):
        assert (await slow).replace(COMMENT, b"") == b"".join(words) + event("end") + DONE
    assert silent.streams == 1
    assert proxy.suspects == []


@pytest.mark.parametrize(("words", "which"), [((event("one"),), "further"), ((ROLE,), "first")])
async def test_a_request_that_is_lost_in_an_engine_that_computes_ends(
    build: Build, words: tuple[bytes, ...], which: str
) -> None:
    """Its counters rise for others, and no engine tells the progress of one request."""
    proxy = await build(idle_timeout_s=4.0, first_token_timeout_s=4.0, answer_timeout_s=30.0)
    await silent_engine(proxy, Silent(*words, counts=True, computes=True))
    began = asyncio.get_running_loop().time()
    got = await read(proxy, stream=True, **TOOLS)
    assert f"no {which} byte within 30 s" in got.decode()
    assert 30 < asyncio.get_running_loop().time() - began < 33


@pytest.mark.parametrize(("counts", "computes"), [(True, False), (False, True)])
async def test_an_idle_stream_ends_where_no_counter_rises(
    build: Build, *, counts: bool, computes: bool
) -> None:
    proxy = await build(idle_timeout_s=4.0)
    await silent_engine(proxy, Silent(event("one"), counts=counts, computes=computes))
    async with asyncio.timeout(SOON_S):
        assert b"no further byte within 4 s" in await read(proxy, stream=True, **TOOLS)


async def test_the_only_place_of_an_engine_may_be_silent(build: Build) -> None:
    """Nobody can ask it for a token beside its request, and it has no counters: idle_timeout_s alone applies."""
    proxy = await build(hung_timeout_s=4.0)
    silent = Silent(event("one"), counts=False, computes=True)
    engine = await silent_engine(proxy, silent)
    proxy.server.remove_upstream(0, 1, "stopped")
    proxy.server.add_upstream(0, 2, "m", engine.address, 1)
    slow = asyncio.create_task(read(proxy, stream=True, **TOOLS))
    await until(lambda: silent.streams == 1)
    await proxy.engine(1, flows)
    other = asyncio.create_task(read(proxy, stream=True, **TOOLS))
    await asyncio.sleep(40)
    silent.go.set()
    async with asyncio.timeout(SOON_S):
        assert (await slow).endswith(event("end") + DONE)
    assert silent.streams == 1
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


async def test_a_whole_response_of_an_engine_that_computes_is_no_silence(build: Build) -> None:
    proxy = await build(hung_timeout_s=4.0)
    silent = Silent(counts=True, computes=True)

    await proxy.engine(0, lies, metrics=silent.metrics)
    asked = asyncio.create_task(read(proxy))
    await asyncio.sleep(40)
    assert proxy.suspects == []
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
