"""Overflow to APIs that are processes of their own, speak TLS, charge by the token, refuse, stall and lie."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.cloud import Certificate, CloudProcess, cloud_process, make_certificate
from support.fakes import SOON_S
from support.hand_clock import at
from support.keys import make, put
from support.proxy_under_test import Build, ProxyUnderTest, until

from launcher.base.money import PICOS, token_prices
from launcher.base.money_limits import DailyCap, Day
from launcher.config.schema import Overflow
from launcher.telemetry import metrics

PRICES = token_prices(1.0, 4.0)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("cloud"))


@pytest.fixture(scope="module")
def processes(certificate: Certificate) -> Iterator[list[CloudProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(cloud_process(certificate)) for _ in range(2)]


@pytest.fixture
def clouds(processes: list[CloudProcess], monkeypatch: pytest.MonkeyPatch) -> list[CloudProcess]:
    """Two endpoints."""
    monkeypatch.setenv("SSL_CERT_FILE", str(processes[0].certificate.path))
    for process in processes:
        process.begin_bill()
    return processes


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class Overflowing:
    """A proxy without an instance: all that may overflow does."""

    def __init__(self, proxy: ProxyUnderTest, caps: dict[str, DailyCap]) -> None:
        self.proxy = proxy
        self.caps = caps
        self.entries = proxy.entries

    async def ask(self, *, key: str | None = None, stream: bool = False, **more: Any) -> Answer:
        """A chat. `fault`, `usage` and `say`: what the endpoint makes of it."""
        cloud = {name: more.pop(name) for name in ("fault", "usage", "say") if name in more}
        body = {
            "model": "m", "messages": [{"role": "user", "content": "how?"}], "stream": stream, "cloud": cloud, **more
        }  # fmt: skip
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with (
            asyncio.timeout(SOON_S),
            self.proxy.client.post("/v1/chat/completions", data=json.dumps(body), headers=headers) as answer,
        ):
            return Answer(answer.status, dict(answer.headers), await answer.read())

    def metric(self, name: str, *labels: str) -> float:
        return self.proxy.server.readings.values()[name][labels]


Make = Callable[..., Awaitable[Overflowing]]


@pytest.fixture
def overflowing(build: Build, clouds: list[CloudProcess]) -> Make:
    async def make_proxy(
        *more: dict[str, Any], cap: int | None = None, spent: int = 0, day_s: float = 86_400, **proxy: Any
    ) -> Overflowing:
        """`more`: settings of each endpoint. `cap`: of the first one, in picos."""
        settings = [
            Overflow(
                url=cloud.url, models={"m": "big"},
                **{"name": name, "input": 1.0, "output": 4.0, "max_output_tokens": 100, **of},
            )
            for cloud, name, of in zip(clouds, ("one", "two"), more, strict=False)
        ]  # fmt: skip
        caps = {}
        if cap is not None:
            caps["one"] = DailyCap(
                cap, lambda now: Day(int(now), int(now + day_s)), at(time.time()), spent=spent
            )
        if cap is not None:
            settings[0] = Overflow(**{**_fields(settings[0]), "max_per_day": cap / PICOS})
        return Overflowing(await build(overflow=tuple(settings), caps=caps, **proxy), caps)

    return make_proxy


def _fields(settings: Overflow) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__struct_fields__}


async def test_the_first_endpoint_that_can_takes_it(overflowing: Make, clouds: list[CloudProcess]) -> None:
    proxy = await overflowing({}, {})
    answer = await proxy.ask()
    assert (answer.status, answer.headers["X-Served-By"]) == (200, "overflow/one")
    assert [cloud.bill().requests for cloud in clouds] == [1, 0]
    (entry,) = proxy.entries
    usage = json.loads(answer.body)["usage"]
    assert (entry.overflow, entry.overflow_reason, entry.exact) == ("one", "full", True)
    assert (entry.prompt_tokens, entry.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert entry.picos == PRICES.amount(usage["prompt_tokens"], 0, usage["completion_tokens"])


async def test_one_endpoint_without_a_name_is_overflow(
    build: Build, clouds: list[CloudProcess], caplog: pytest.LogCaptureFixture
) -> None:
    proxy = Overflowing(await build(overflow=(Overflow(url=clouds[0].url, models={"m": "x"}),)), {})
    caplog.set_level("INFO", "launcher.access")
    assert (await proxy.ask()).headers["X-Served-By"] == "overflow"
    await until(lambda: any(record.name == "launcher.access" for record in caplog.records))
    record: Any = next(record for record in caplog.records if record.name == "launcher.access")
    assert (record.overflowed, record.overflow, record.overflow_reason) == (True, "localhost", "full")


@pytest.mark.parametrize(
    ("fault", "stream"),
    [
        *itertools.product(("refuse", "refuse_for", "fail", "unauthorized", "garbage"), (True, False)),
        ("cut", False),  # of a stream bytes went to the client
    ],
)
async def test_what_one_refuses_goes_to_the_next(
    overflowing: Make, clouds: list[CloudProcess], fault: str, stream: bool
) -> None:
    """The second one refuses the same request, so the client gets that refusal; other requests avoid both."""
    proxy = await overflowing({}, {})
    answer = await proxy.ask(fault=fault, stream=stream)
    assert answer.status == {"refuse": 429, "refuse_for": 429, "fail": 500}.get(fault, 502)
    assert [cloud.bill().requests for cloud in clouds] == [1, 1]
    ended = [proxy.metric(metrics.OVERFLOW_IN_FLIGHT, name) for name in ("one", "two")]
    assert ended == [0, 0]
    assert proxy.proxy.balanced()
    # Both have just failed. One that said until when is not asked; one that did not is better than a refusal.
    again = await proxy.ask()
    assert again.status == (503 if fault == "refuse_for" else 200)


async def test_an_endpoint_that_failed_is_avoided(overflowing: Make, clouds: list[CloudProcess]) -> None:
    proxy = await overflowing({"max_requests": 1}, {})
    stalled = asyncio.create_task(proxy.ask(fault="stall"))
    await until(lambda: proxy.metric(metrics.OVERFLOW_IN_FLIGHT, "one") == 1)
    full = await proxy.ask(fault="refuse")  # the first one is full, the second one refuses
    assert (full.status, full.headers["X-Served-By"]) == (429, "overflow/two")
    stalled.cancel()
    await asyncio.gather(stalled, return_exceptions=True)
    await until(lambda: proxy.metric(metrics.OVERFLOW_IN_FLIGHT, "one") == 0)
    assert (await proxy.ask()).headers["X-Served-By"] == "overflow/one"


async def test_a_stalled_endpoint_costs_the_most_that_it_may_have(
    overflowing: Make, clouds: list[CloudProcess]
) -> None:
    proxy = await overflowing({}, {}, cap=PICOS, answer_timeout_s=0.3)
    answer = await proxy.ask(fault="stall", max_tokens=10)
    assert answer.status == 502
    assert [cloud.bill().requests for cloud in clouds] == [1, 1]
    cap = proxy.caps["one"]
    bill = clouds[0].bill()
    assert cap.reserved == 0
    assert cap.settled > PRICES.amount(bill.prompt, 0, bill.output) > 0
    (entry,) = proxy.entries
    assert entry.picos >= 2 * cap.settled  # both may charge for it


@pytest.mark.parametrize("stream", [True, False])
async def test_usage_is_charged_to_the_pico(
    overflowing: Make, clouds: list[CloudProcess], stream: bool
) -> None:
    proxy = await overflowing({}, cap=PICOS)
    answers = await asyncio.gather(*(proxy.ask(stream=stream, say=number) for number in range(1, 20)))
    # Its client did not ask for the usage of a stream, and gets none.
    assert all((b'"prompt_tokens"' in answer.body) is not stream for answer in answers)
    assert all(b'"choices": []' not in answer.body for answer in answers)
    bill = clouds[0].bill()
    assert bill.streams_with_usage == (19 if stream else 0)
    assert proxy.caps["one"].settled == PRICES.amount(bill.prompt, 0, bill.output)
    assert sum(entry.picos for entry in proxy.entries) == proxy.caps["one"].settled
    assert (proxy.caps["one"].reserved, proxy.metric(metrics.OVERFLOW_WITHOUT_USAGE, "one")) == (0, 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("usage", ["none", "negative", "text", "huge", "float", "more"])
async def test_odd_usage_costs_what_was_reserved(
    overflowing: Make, usage: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await overflowing({}, cap=PICOS)
    for _ in range(2):
        answer = await proxy.ask(stream=stream, usage=usage, max_tokens=10)
        assert answer.status == 200
        assert not stream or answer.body.endswith(b"data: [DONE]\n\n")
    first, second = proxy.entries
    assert first.picos == second.picos > PRICES.amount(1024, 0, 10)
    assert proxy.caps["one"].settled == first.picos + second.picos
    assert not first.exact
    assert proxy.metric(metrics.OVERFLOW_WITHOUT_USAGE, "one") == 2
    assert caplog.text.count("a response says no usage") == 1


async def test_output_beyond_the_setting_is_paid(overflowing: Make, clouds: list[CloudProcess]) -> None:
    """Its client named no max_tokens, and the endpoint makes more than max_output_tokens."""
    proxy = await overflowing({}, cap=PICOS)
    assert (await proxy.ask(say=2000)).status == 200
    bill = clouds[0].bill()
    assert proxy.caps["one"].settled == PRICES.amount(bill.prompt, 0, bill.output)


async def test_at_the_cap_requests_stay_here(
    overflowing: Make, clouds: list[CloudProcess], caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await overflowing({}, cap=PICOS // 500)
    for _ in range(200):
        answer = await proxy.ask(max_tokens=50)
        if answer.status != 200:
            break
    assert (answer.status, "X-Served-By" in answer.headers) == (503, False)
    cap, bill = proxy.caps["one"], clouds[0].bill()
    assert cap.settled == PRICES.amount(bill.prompt, 0, bill.output) <= cap.cap
    assert proxy.metric(metrics.OVERFLOW_CAPPED, "one") == 1
    assert proxy.metric(metrics.OVERFLOW_SPENT, "one") == cap.settled / PICOS
    assert caplog.text.count("its max_per_day is spent or reserved") == 1
    cap.next_day(at(time.time() + 90_000))
    assert (await proxy.ask(max_tokens=50)).status == 200


async def test_at_midnight_it_is_available_again(overflowing: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    proxy = await overflowing({}, cap=PICOS, spent=PICOS, day_s=5.0)
    assert (await proxy.ask()).status == 503
    await until(lambda: "overflow endpoint one: available again" in caplog.text)
    assert (await proxy.ask()).headers["X-Served-By"] == "overflow/one"


async def test_beyond_the_cap_the_next_endpoint_takes_it(overflowing: Make) -> None:
    proxy = await overflowing({}, {}, cap=0)
    assert (await proxy.ask()).headers["X-Served-By"] == "overflow/two"


async def test_a_cap_without_a_sum_sends_nothing(overflowing: Make, clouds: list[CloudProcess]) -> None:
    """Nobody handed over what was spent."""
    proxy = await overflowing({"max_per_day": 5.0})
    assert (await proxy.ask()).status == 503
    assert clouds[0].bill().requests == 0


async def test_any_mix_of_faults_holds_the_cap(overflowing: Make, clouds: list[CloudProcess]) -> None:
    """What the endpoint charges is never more than what is settled, and that never more than the cap."""
    chance = random.Random(13)  # noqa: S311
    cap = PICOS // 50
    proxy = await overflowing({"max_requests": 8}, cap=cap, answer_timeout_s=0.3, first_token_timeout_s=0.3)

    async def ask() -> None:
        more: dict[str, Any] = {"stream": chance.random() < 0.5, "say": chance.randrange(1, 60)}
        if chance.random() < 0.4:
            more["usage"] = chance.choice(["none", "negative", "text", "huge", "float", "more"])
        if chance.random() < 0.2:
            more["fault"] = chance.choice(["fail", "refuse", "stall", "cut", "garbage"])
        if chance.random() < 0.5:
            more["max_tokens"] = chance.randrange(1, 100)
        if more.get("usage") == "more":
            # Without a limit in the request the endpoint is believed: test_output_beyond_the_setting_is_paid.
            more.setdefault("max_tokens", 50)
        leaves = chance.random() < 0.1
        task = asyncio.create_task(proxy.ask(**more))
        if leaves:
            await asyncio.sleep(chance.random() * 0.1)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        spent = proxy.caps["one"]
        assert spent.settled + spent.reserved <= cap

    for _ in range(12):
        await asyncio.gather(*(ask() for _ in range(12)))
    spent, bill = proxy.caps["one"], clouds[0].bill()
    await until(lambda: spent.reserved == 0)
    assert 0 < PRICES.amount(bill.prompt, 0, bill.output) <= spent.settled <= cap
    assert sum(entry.picos for entry in proxy.entries) == spent.settled
    assert proxy.proxy.balanced()


async def test_keys_say_when_their_requests_leave(
    overflowing: Make, clouds: list[CloudProcess], tmp_path: Path
) -> None:
    rules: dict[str, dict[str, object]] = {
        "any": {}, "nev": {"overflow": "never"}, "full": {"overflow": "full"}, "pred": {"overflow": "predicted"},
        "loc": {"local_only": True, "overflow": "full"},
    }  # fmt: skip
    made = {name: make(name, **of) for name, of in rules.items()}
    put(tmp_path / "keys", *(record for _, record in made.values()))
    proxy = await overflowing({}, api_keys_file=str(tmp_path / "keys"))
    statuses = {name: (await proxy.ask(key=key)).status for name, (key, _) in made.items()}
    assert statuses == {"any": 200, "nev": 503, "full": 200, "pred": 200, "loc": 503}
