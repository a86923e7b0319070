"""Where a request is looked for, and what is said of one that is not found."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.timeline import Timeline, timeline_of
from launcher.base.errors import LauncherError, NotFoundError
from launcher.daemon.usage_reports import RequestFinder


def entry(name: str) -> EndedRequest:
    return EndedRequest(ended_at=5.0, request_id=name, outcome="completed")


@dataclass
class Known:
    """What memory and ledger have."""

    memory: list[str] = field(default_factory=list)
    ledger: list[str] = field(default_factory=list)
    complete_since: float | None = None
    broken: bool = False

    def timeline(self, request_id: str) -> Timeline | None:
        return timeline_of(entry(request_id)) if request_id in self.memory else None

    async def request(self, request_id: str) -> EndedRequest | None:
        if self.broken:
            raise LauncherError("cannot report usage: the daemon keeps no usage ledger", "x")
        return entry(request_id) if request_id in self.ledger else None

    async def find(self, request_id: str) -> Timeline:
        return await RequestFinder(self, self, 400.0, lambda: 1000.0).find(request_id)


async def test_memory_comes_before_the_ledger() -> None:
    found = await Known(memory=["a"], ledger=["a", "b"]).find("a")
    assert (found.id, found.source) == ("a", "memory")
    found = await Known(memory=["a"], ledger=["a", "b"]).find("b")
    assert (found.id, found.source) == ("b", "usage ledger")


async def test_the_id_of_a_response_is_known_by_its_request() -> None:
    assert (await Known(memory=["a-b"]).find("chatcmpl-a-b")).id == "a-b"
    assert (await Known(ledger=["a-b"]).find("cmpl-a-b")).id == "a-b"


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (Known(), "it is not in the usage ledger"),
        (Known(), "memory has all requests since the daemon's start 10 min ago"),
        (
            Known(complete_since=940.0),
            "memory has all requests that ended in the last 60 s, and for longer",
        ),
        (Known(broken=True), "cannot report usage: the daemon keeps no usage ledger"),
    ],
)
async def test_an_unknown_id_is_told_how_long_requests_are_kept(known: Known, said: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        await known.find("x\n")
    assert "cannot show request 'x\\n'" in caught.value.message
    assert said in f"{caught.value.message} {caught.value.remedy}"
