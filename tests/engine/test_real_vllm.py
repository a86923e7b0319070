"""Real vLLM: placement, responses, restarts under load, crashes, and a clean stop.

The tests run in the order they stand in: they share one daemon, and the last but one ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest
from integration.load import Load
from support.daemon_process import DaemonProcess, eventually
from support.engine_runs import READY_S
from support.ledger_file import entries

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger_file import open_reader
from launcher.base.cpuset import CpuSet

# Well below supervision.stop_timeout_s (30): it did not wait for that.
STOP_S = 120.0
# Between two requests of a client: a start beside a load that takes both cores lasts minutes.
PAUSE_S = 0.5

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


def more(load: Load, answers: int) -> None:
    """Waits until this many more requests are answered."""
    before = load.tally.completed
    eventually(lambda: load.tally.completed >= before + answers, READY_S, "answers")


def tree_of(slot: dict[str, Any]) -> list[psutil.Process]:
    """The slot's engine and everything below it."""
    root = psutil.Process(slot["pid"])
    return [root, *root.children(recursive=True)]


def test_threads_and_memory_are_where_the_plan_says(daemon: DaemonProcess) -> None:
    slots = daemon.status()["slots"]
    sets = [CpuSet.parse(slot["cpus"]) for slot in slots]
    assert sets[0].isdisjoint(sets[1])
    for slot, cpus in zip(slots, sets, strict=True):
        names, threads = set(), 0
        for process in tree_of(slot):
            proc = Path(f"/proc/{process.pid}")
            names.add((proc / "comm").read_text().strip())
            for task in (proc / "task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                    status = (task / "status").read_text()
                    line = next(s for s in status.splitlines() if s.startswith("Cpus_allowed_list:"))
                    assert CpuSet.parse(line.split(":")[1]) <= cpus, (process, line)
                    threads += 1
            pages = [line.split() for line in (proc / "numa_maps").read_text().splitlines() if " N" in line]
            # OpenBLAS, in numpy, asks for a "local" buffer (driver/others/memory.c, my_mbind): it is on the node as well.
            loose = [words for words in pages if words[1] == "local"]
            assert {words[1] for words in pages if words not in loose} == {f"bind:{slot['membind']}"}, process
            nodes = {
                word.split("=")[0] for words in loose for word in words if re.fullmatch(r"N\d+=\d+", word)
            }
            assert nodes <= {f"N{slot['membind']}"}, process
        assert names >= {"VLLM::EngineCor", "VLLM::Worker"}
        assert threads > 20
    done = daemon.cli("verify", "--json")
    for slot in json.loads(done.stdout)["slots"]:
        assert slot["verified"]["ok"], slot["verified"]["problems"]
        assert "libtcmalloc" in slot["verified"]["libraries"]
        assert slot["zentorch"] == {"found": None, "active": False}


def test_what_both_compile_is_compiled_once(daemon: DaemonProcess, cache: Path) -> None:
    daemon.wait_ready(2, READY_S)
    stack = next(cache.glob("vllm*"))
    eventually(
        lambda: len(list(stack.glob("slot*/stamp.json"))) >= 2, what="both to have a cache of their own"
    )
    assert not [path for path in stack.rglob("*") if path.is_symlink()]
    assert not list(stack.glob("workshop-*"))
    built = [
        {so.name: so.stat().st_mtime_ns for so in stack.glob(f"slot{slot}/inductor/*/*.so")}
        for slot in (0, 1)
    ]
    shared = built[0].keys() & built[1].keys()
    assert len(shared) > 3
    assert not {name for name in shared if built[0][name] != built[1][name]}, "a copy keeps its time"


def test_200_chats_of_the_openai_sdk(daemon: DaemonProcess) -> None:
    before = daemon.status()["requests"]["slots"]

    async def run() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0)
        gate = asyncio.Semaphore(16)

        async def ask(i: int) -> str:
            question: Any = [{"role": "user", "content": f"Tell me of core {i}."}]
            async with gate:
                if i % 2:
                    answer = await client.chat.completions.create(
                        model="tiny", messages=question, max_tokens=12
                    )
                    return answer.choices[0].message.content or ""
                stream = await client.chat.completions.create(
                    model="tiny", messages=question, max_tokens=12, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async with client:
            return await asyncio.gather(*(ask(i) for i in range(200)))

    answers = asyncio.run(run())
    assert len(answers) == 200
    after = daemon.status()["requests"]["slots"]
    served = [after[slot]["completed"] - before.get(slot, {}).get("completed", 0) for slot in ("0", "1")]
    assert sum(served) == 200
    assert min(served) >= 20, f"both take part, each as fast as others let it: {served}"


def test_answers_through_the_proxy_equal_the_instances_own(daemon: DaemonProcess) -> None:
    for i in range(6):
        body = {
            "model": "tiny", "temperature": 0, "max_tokens": 24,
            "messages": [{"role": "user", "content": f"What is {i} plus {i}?"}],
        }  # fmt: skip
        request = urllib.request.Request(
            f"{daemon.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            through = json.load(answer)
        own = [daemon.post(slot, "/v1/chat/completions", body) for slot in (0, 1)]
        assert through["choices"][0]["message"] in [answer["choices"][0]["message"] for answer in own]
        assert own[0]["choices"][0]["message"] == own[1]["choices"][0]["message"]
        assert through["usage"] == own[0]["usage"]


def stream_of(url: str, name: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a streamed chat, without what differs from one request to the next."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body | {"stream": True}).encode(),
        {"Content-Type": "application/json", "X-Request-Id": name},
    )
    with urllib.request.urlopen(request) as answer:
        *events, done, rest = answer.read().split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    return [{key: chunk[key] for key in chunk if key not in {"id", "created"}} for chunk in chunks]


def test_a_stream_counts_as_its_whole_response_does(daemon: DaemonProcess) -> None:
    """Its client sees nothing of the usage that the proxy asks for."""
    body: dict[str, Any] = {
        "model": "tiny", "temperature": 0, "max_tokens": 24,
        "messages": [{"role": "user", "content": "Count to a thousand, please. " * 30}],
    }  # fmt: skip
    ask = {"stream_options": {"include_usage": True}}
    whole = urllib.request.Request(
        f"{daemon.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Request-Id": "whole"},
    )
    with urllib.request.urlopen(whole) as answer:
        usage = json.load(answer)["usage"]
    *asked, last = stream_of(daemon.url, "asked", body | ask)
    unasked = stream_of(daemon.url, "unasked", body)
    # Two choices at temperature 0 are a bad request.
    stream_of(daemon.url, "two", body | {"n": 2, "temperature": 1, "ignore_eos": True})
    assert last["choices"] == []
    assert [chunk for chunk in unasked if "usage" in chunk] == []
    assert unasked == asked
    ledger = daemon.folder / "state" / "usage" / "usage.db"

    def entered() -> dict[str, EndedRequest] | None:
        reader = open_reader(ledger)
        found = {entry.request_id: entry for entry in entries(reader, 0, 1e12)}
        reader.close()
        return found if found.keys() >= {"whole", "asked", "unasked", "two"} else None

    found = eventually(entered, what="entries")
    told = (usage["prompt_tokens"], usage["completion_tokens"])
    for name in ("whole", "asked", "unasked"):
        assert (found[name].prompt_tokens, found[name].output_tokens, found[name].exact) == (*told, True)
    assert (found["two"].prompt_tokens, found["two"].output_tokens) == (told[0], 2 * body["max_tokens"])
    cached = last["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found["asked"].cached_tokens == cached
    # Each instance has had the prompt by then; its blocks have 128 tokens.
    assert found["two"].cached_tokens >= 128


def test_a_client_that_leaves_ends_its_request(daemon: DaemonProcess) -> None:
    async def leave() -> None:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{daemon.url}/v1/completions", json=body) as answer,
        ):
            await answer.content.readline()

    before = daemon.status()["requests"]["client_aborted"]
    asyncio.run(leave())
    eventually(lambda: daemon.status()["requests"]["client_aborted"] == before + 1, what="counted")

    def idle() -> bool:
        with urllib.request.urlopen(f"{daemon.url}/metrics") as page:
            lines = page.read().decode().splitlines()
        running = [line for line in lines if line.startswith("vllm:num_requests_running{")]
        assert len(running) == 2
        return all(line.endswith(" 0.0") for line in running)

    eventually(idle, what="the engine to stop generating")


def test_a_restart_under_load_fails_no_request(daemon: DaemonProcess) -> None:
    with Load(daemon.url, "tiny", workers=8, max_tokens=24, pause_s=PAUSE_S) as load:
        more(load, 20)
        done = daemon.cli("restart", "0", timeout=READY_S)
        assert done.returncode == 0, done.stderr
        more(load, 20)
    assert load.tally.failures == []
    assert [slot["generation"] for slot in daemon.status()["slots"]] == [2, 1]


def sockets_of(daemon: DaemonProcess, slot: int) -> set[str]:
    """The names of the sockets between the engine's processes (VLLM_RPC_BASE_PATH)."""
    folder = Path(daemon.slot(slot)["address"].removeprefix("unix:")).parent / f"slot{slot}"
    return {path.name for path in folder.iterdir()}


def test_sigkill_of_a_worker_under_load(daemon: DaemonProcess) -> None:
    with Load(daemon.url, "tiny", workers=8, max_tokens=24, pause_s=PAUSE_S) as load:
        more(load, 20)
        worker = next(p for p in tree_of(daemon.slot(0)) if "VLLM::Worker" in " ".join(p.cmdline()))
        killed = sockets_of(daemon, 0)
        worker.kill()
        # The endpoint answers throughout: requests complete while slot 0 restarts.
        eventually(lambda: daemon.slot(0)["state"] != "ready", what="slot 0 out of rotation")
        more(load, 10)
        eventually(
            lambda: (s := daemon.slot(0))["state"] == "ready" and s["generation"] == 3, READY_S, "slot 0 back"
        )
        more(load, 10)
    # The sockets of the killed processes are removed; the new processes have their own.
    assert killed
    assert sockets_of(daemon, 0)
    assert not killed & sockets_of(daemon, 0)
    # Only streams with bytes already delivered from the dead instance failed, each with an error event and no [DONE].
    assert len(load.tally.failures) == load.tally.honest <= 8, load.tally.failures
    requests = daemon.status()["requests"]
    assert requests["failed"] == load.tally.honest
    assert requests["accepted"] == sum(
        requests[k] for k in ("completed", "refused", "client_aborted", "rejected", "failed")
    )


def test_sigkill_of_the_daemon_leaves_no_vllm(daemon: DaemonProcess) -> None:
    assert (
        len(daemon.descendants()) >= 2 * 5
    )  # shim, API server, resource tracker, engine core, worker, per slot
    os.kill(daemon.process.pid, signal.SIGKILL)
    daemon.process.wait()
    daemon.nothing_left()


@pytest.mark.release
def test_ctrl_c_during_the_load_ends_all(start_vllm: Callable[[], DaemonProcess]) -> None:
    daemon = start_vllm()
    eventually(
        lambda: daemon.log.read_text().count("Initializing a V1 LLM engine") == 2, READY_S, "vLLM to load"
    )
    assert len(daemon.descendants()) >= 2 * 3
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.process.wait(STOP_S) == 0
    daemon.nothing_left()
