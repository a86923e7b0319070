"""What the dashboard shows when things go wrong: faults of real processes behind a real daemon."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
from browser.dashboard_process import LIGHT, TROUBLED, WELL, Running
from support.daemon_process import SOON_S, DaemonProcess, fake_config
from support.visits import Open, Visit

# From the daemon's event to the page. The goal is 5 s; a machine that others share takes a multiple.
SHOWN_S: Final = 60.0
BRISK: Final = """[supervision]
probe_interval_s = 0.3
probe_timeout_s = 1
backoff_initial_s = 3
backoff_max_s = 3
stall_timeout_s = 2
canary_interval_s = 1
verify_interval_s = 1
crash_limit = 50
"""
STEP_MS: Final = 2000
HOSTILE: Final = "<img src=x onerror=document.title='run'>"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = fake_config("--token-s", "0.02", more=BRISK, max_num_seqs=2)
    environ = {"NUMA_LAUNCHER_PROXY__QUEUE_MAX_REQUESTS": "10"}
    made = Running(tmp_path_factory.mktemp("f"), config, environ)
    yield made
    made.end()


@pytest.fixture(scope="module")
def watching(running: Running, open_page: Open) -> Iterator[Visit]:
    """One page that stays open all the time."""
    with open_page(running.link, **LIGHT) as visit:
        yield visit


@pytest.fixture
def visit(running: Running, watching: Visit) -> Visit:
    """The page, all being well."""
    running.daemon.wait_ready(2)
    watching.page.wait_for_selector(WELL)
    return watching


def arm(daemon: DaemonProcess, slot: int, kind: str) -> None:
    """A fault of an instance."""
    connection = http.client.HTTPConnection("localhost", timeout=10)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(daemon.slot(slot)["address"].removeprefix("unix:"))
    body = json.dumps({"kind": kind})
    # One that dies does not answer.
    with suppress(OSError, http.client.HTTPException):
        connection.request("POST", "/fault", body, {"Content-Type": "application/json"})
        connection.getresponse().read()
    connection.close()


def changes(visit: Visit) -> dict[int, str]:
    """The time line's items, with what they hold when opened."""
    found = visit.page.eval_on_selector_all(
        "[data-change]", "all => all.map(each => [Number(each.dataset.change), each.textContent])"
    )
    return dict(found)


@contextmanager
def one_change(visit: Visit, running: Running, slot: int, *words: str) -> Iterator[None]:
    """What happens here to a slot is one item of the time line, with these words, soon after the daemon knows it."""
    before = set(changes(visit).values())
    yield
    known = running.daemon.slot(slot)["last_cause_at"]

    def fresh() -> list[str]:
        found = [text for text in changes(visit).values() if text not in before]
        return [text for text in found if all(word in text for word in words)]

    visit.soon(fresh, f"{words}")
    if known is not None:
        took_s = time.time() - known
        assert took_s <= SHOWN_S
        print(f"slot {slot}: shown after {took_s:.1f} s")
    running.daemon.wait_ready(2)
    visit.soon(lambda: "ready again" in str(fresh()), "that it is ready again")
    assert len(fresh()) == 1


def problem(visit: Visit, *words: str) -> str:
    """A problem of the verdict with these words."""

    def found() -> str | None:
        texts = visit.page.eval_on_selector_all("[data-problem]", "all => all.map(each => each.textContent)")
        return next((text for text in texts if all(word in text for word in words)), None)

    return str(visit.soon(found, f"problem {words}"))


# --- instances ----------------------------------------------------------------------------------


def test_a_killed_engine(running: Running, visit: Visit) -> None:
    with one_change(visit, running, 0, "killed-by-operator", "numa-launcher hold"):
        os.kill(running.daemon.slot(0)["pid"], signal.SIGKILL)


def test_an_engine_out_of_memory(running: Running, visit: Visit) -> None:
    with one_change(visit, running, 0, "node-oom", "lower memory.kv_cache"):
        arm(running.daemon, 0, "die MemoryError: cannot allocate the KV cache")
        visit.page.wait_for_selector(TROUBLED)
        assert "node-oom" in problem(visit, "node-oom", "lower memory.kv_cache")


def test_a_hung_engine(running: Running, visit: Visit) -> None:
    with one_change(visit, running, 1, "hung", "numa-launcher quarantine"):
        arm(running.daemon, 1, "hang")
        visit.soon(lambda: running.daemon.slot(1)["last_cause"])


def test_a_drained_and_resumed_slot(running: Running, visit: Visit) -> None:
    before = set(changes(visit).values())
    assert running.daemon.cli("drain", "1").returncode == 0
    visit.page.wait_for_selector(TROUBLED)
    assert "numa-launcher resume 1" in problem(visit, "numa-launcher resume 1")
    assert running.daemon.cli("resume", "1").returncode == 0
    visit.page.wait_for_selector(WELL)

    def users() -> list[str]:
        found = [text for text in changes(visit).values() if text not in before]
        return [text for text in found if "root" in text or os.environ.get("USER", "root") in text]

    visit.soon(lambda: any("drain" in text for text in users()), "who drained")
    visit.soon(lambda: any("resume" in text for text in users()), "who resumed")


def test_a_thread_off_its_cpus(running: Running, visit: Visit) -> None:
    page = visit.page
    slots = running.daemon.status()["slots"]
    if os.cpu_count() == 1 or slots[0]["cpus"] == slots[1]["cpus"]:
        pytest.fail("this test needs 2 CPUs with an instance each")
    cpu = slots[1]["cpus"].replace("-", ",").split(",", maxsplit=1)[0]
    arm(running.daemon, 0, f"stray {cpu}")
    visit.soon(lambda: page.query_selector("#machine [data-cpus][data-misplaced]"))
    assert running.daemon.cli("restart", "0").returncode == 0


# --- the queue ----------------------------------------------------------------------------------


def test_a_full_queue_is_named(running: Running, visit: Visit) -> None:
    body = json.dumps({"model": "fake", "messages": [], "max_tokens": 300})
    clients = [http.client.HTTPConnection("127.0.0.1", running.daemon.port) for _ in range(20)]
    for client in clients:
        client.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    assert "10" in problem(visit, "queue full")
    assert "queue full" in visit.page.inner_text("[data-verdict]")
    assert visit.page.inner_text('[data-figure="queued"] [data-value]').startswith("10")
    for client in clients:
        client.close()


# --- texts of others ----------------------------------------------------------------------------


def test_texts_of_others_are_shown_as_text(running: Running, visit: Visit) -> None:
    arm(running.daemon, 0, f"say {HOSTILE}")
    visit.page.evaluate("location.hash = '#/slot/0'")
    shown: Any = visit.soon(
        lambda: HOSTILE in visit.page.inner_text("#slot"),
        what="the log line",
    )
    assert shown
    visit.page.evaluate(f"location.hash = {json.dumps('#/request/' + HOSTILE)}")
    visit.soon(lambda: HOSTILE in visit.page.inner_text("#request"))
    assert visit.page.title() != "run"
    assert visit.page.query_selector('img[src="x"]') is None
    visit.page.evaluate("location.hash = '#/'")


# --- the daemon ---------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path, fake_config(more=BRISK))
    yield made
    made.end()


def test_a_daemon_that_is_restarted_and_killed(own: Running, open_page: Open) -> None:
    with open_page(own.link, **LIGHT) as visit:
        visit.page.wait_for_selector(WELL)
        for how in (signal.SIGTERM, signal.SIGKILL):
            # The latest row is in memory until the ledger's next turn: SIGKILL loses it.
            newest = visit.soon(
                lambda: [ms for ms in history(own) if ms < time.time() * 1000 - STEP_MS],
                "a row of the history",
            )[-1]
            own.daemon.descendants()
            own.daemon.process.send_signal(how)
            visit.page.wait_for_selector('#verdict[data-level="unknown"]')
            assert "no answer" in visit.page.inner_text("[data-verdict]").lower()
            own.daemon.process.wait(SOON_S)
            ended = time.time() * 1000
            # A daemon that is back within a step records the next one: no row is missing then.
            visit.soon(
                lambda ended=ended: time.time() * 1000 >= ended + 2 * STEP_MS, "two steps without a daemon"
            )
            own.daemon.restart()
            visit.page.wait_for_selector(WELL)
            # It may have recorded a step after `newest` and before its end: only a later row is the new daemon's.
            rows = visit.soon(
                lambda ended=ended: (found := history(own)) and found[-1] > ended + STEP_MS and found,
                "a row of the new daemon",
            )
            assert newest in rows  # what was before is still there
            # The time without a daemon is a gap.
            before, after = next(pair for pair in pairwise(rows) if pair[1] > ended + STEP_MS)
            assert before <= ended + STEP_MS
            assert after - before > STEP_MS
        assert visit.soon(lambda: visit.page.query_selector("path[data-gap]"), "a gap drawn")
        told = [text for text in visit.errors if "503" not in text]
        assert told == []  # the browser itself notes answers that say that the daemon does not answer


def history(of: Running) -> list[int]:
    """The times of the rows, ms."""
    return [row[0] for row in of.dashboard.ask("/api/history?span=1h&after=0")["rows"]]
