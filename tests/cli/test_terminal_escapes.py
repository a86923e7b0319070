"""What instances and clients wrote reaches a terminal as text alone, whichever verb shows it; JSON has it exactly."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.fake_operations import VERIFIED, Backstage, FakeOperations, slot_status
from support.terminal import Terminal

from launcher.base.errors import LauncherError
from launcher.cli import main, slot_verbs
from launcher.control.client import ControlClient
from launcher.engines.causes import Cause, Retry
from launcher.instances.verify import Difference

CODES = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202etxt\u2066\r\x7f"
LINE = "\nslot 1: verified: all is well"
BAD = f"evil{CODES}{LINE}"


class Hostile(FakeOperations):
    """Everything that may come from elsewhere does."""

    def __init__(self) -> None:
        super().__init__()
        cause = Cause("oom", f"died of {BAD}", f"buy {BAD}", Retry.BACKOFF, (f"evidence {BAD}",))
        seen = replace(
            VERIFIED,
            differences=(Difference(f"threads of {BAD}", "on cpus 0", f"1 of 2: {BAD}"),),
            foreign=(f"{BAD} (pid 7) is pinned to cpus 0, of which 0 are this slot's",),
            libraries=(BAD,),
            policies=(BAD,),
        )
        failed = slot_status(
            0, state="failed", last_cause=cause, last_cause_at=1.0, last_cause_generation=1, verified=seen
        )
        self.slots = {0: failed, 1: slot_status(1, state="starting", phase=f"loading {BAD}")}
        self.lines = [BAD, "two"]
        self.rollouts = [
            {
                "stage": "stuck",
                "changes": {"slots": [{"slot": 0, "step": "restart", "reasons": [BAD]}], "live": [BAD], "needs_restart": []},
                "done": [], "doing": BAD, "error": BAD, "remedy": BAD,
            }
        ]  # fmt: skip

    def events(self, count: int, after: int) -> list[dict[str, Any]]:
        return [{**event, "message": BAD, "fields": {BAD: BAD}} for event in super().events(count, after)]

    async def verify(self, slot: int) -> None:
        self.verified.append(slot)


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backstage]:
    with Backstage(str(tmp_path / "c.sock"), Hostile()) as daemon:
        monkeypatch.setenv("NUMA_LAUNCHER_SOCKET", daemon.path)
        monkeypatch.setattr(slot_verbs, "POLL_S", 0.001)
        yield daemon


VERBS = (
    "status", "status --wide", "status --short", "events", "events --audit", "logs 0", "why 0", "verify", "verify 0",
    "reload --show", "reload --dry-run", "start 1 --timeout 0", "restart 0 --no-wait",
)  # fmt: skip


def raw(text: str) -> list[str]:
    return [sign for sign in text if not sign.isprintable() and sign != "\n"]


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("words", VERBS)
def test_no_verb_prints_what_a_terminal_obeys(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(words.split())
    captured = capsys.readouterr()
    for text in captured:
        assert not raw(text), text
        assert "\nslot 1: verified" not in text
    if not words.startswith(("events --audit", "restart", "status --short")):
        assert "evil\\x1b[2J" in captured.out + captured.err


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("words", ["status", "events", "logs 0", "why 0", "verify", "reload --show"])
def test_json_is_exact_and_escaped_by_itself(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([*words.split(), "--json"])
    out = capsys.readouterr().out
    assert not raw(out)
    texts: list[str] = []
    decoder, rest = json.JSONDecoder(), out
    while rest.strip():
        value, end = decoder.raw_decode(rest.lstrip())
        rest = rest.lstrip()[end:]
        texts.append(json.dumps(value, ensure_ascii=False))
    assert json.dumps(BAD, ensure_ascii=False)[1:-1] in "".join(texts)


def test_followed_lines_too(daemon: Backstage) -> None:
    feed = ControlClient(daemon.path).lines("/slots/0/logs?tail=2&follow=1")
    assert not raw(next(feed)["text"])


@pytest.mark.usefixtures("daemon")
def test_top() -> None:
    with Terminal((sys.executable, "-m", "launcher", "top", "--interval", "0.2"), 100, 30) as terminal:
        terminal.shows("slot 0: oom: died of evil\\x1b[2J")
        terminal.type("q")
        assert terminal.ended() == 0
        assert b"\x1b]0;owned" not in terminal.raw
        assert b"\x07" not in terminal.raw


def test_a_refusal(daemon: Backstage) -> None:
    with pytest.raises(LauncherError) as caught:
        ControlClient(daemon.path, exact=True).get("/slots/%1b%0a/logs")
    assert caught.value.message == "cannot use slot '\\x1b\\n': not a number"
