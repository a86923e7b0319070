"""Two real llama-servers: placement, answers, connections, restarts under load, a hang, a stop with an open stream."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from integration.load import Load
from support.daemon_process import SOON_S, DaemonProcess, eventually
from support.engine_runs import ask, bench, engine_of, stored

from launcher.base.cpuset import CpuSet

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

Start = Callable[..., DaemonProcess]
PROMPTS = ([40, 41, 42, 300, 301], [7, 600, 601, 602], [500, 11, 12, 13, 14, 15])
TOKENS = 32


def test_every_thread_and_the_weights_are_where_the_plan_says(start_llama: Start) -> None:
    daemon = start_llama()
    status, answer = ask(daemon, "/v1/completions", {"model": "tiny", "prompt": "Hello", "max_tokens": 8})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
    slots = daemon.status()["slots"]
    assert CpuSet.parse(slots[0]["cpus"]).isdisjoint(CpuSet.parse(slots[1]["cpus"]))
    for slot in slots:
        engine = engine_of(slot)
        threads = str(len(CpuSet.parse(slot["cpus"])))
        assert engine.cmdline()[engine.cmdline().index("--threads") + 1] == threads
        for task in Path(f"/proc/{engine.pid}/task").iterdir():
            line = next(
                s for s in (task / "status").read_text().splitlines() if s.startswith("Cpus_allowed_list:")
            )
            assert CpuSet.parse(line.split(":")[1]) <= CpuSet.parse(slot["cpus"])
        # --load-mode none: no page of the file is mapped.
        assert ".gguf" not in Path(f"/proc/{engine.pid}/maps").read_text()
    verified = json.loads(daemon.cli("verify", "--json").stdout)
    assert [slot["verified"]["problems"] for slot in verified["slots"]] == [[], []]


VLLM = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=8,
              kv_cache_memory_bytes=64 << 20)
    sampling = SamplingParams(temperature=0, max_tokens=int(sys.argv[2]), ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[3])]
    print("TOKENS", json.dumps([list(out.outputs[0].token_ids) for out in llm.generate(prompts, sampling)]))
"""


def test_the_same_weights_give_vllms_greedy_tokens(
    start_llama: Start, model_folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "vllm_tokens.py"
    script.write_text(VLLM)
    done = subprocess.run(
        [sys.executable, str(script), str(model_folder), str(TOKENS), json.dumps(PROMPTS)],
        capture_output=True, text=True, check=False, timeout=900,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    expected = json.loads(next(s for s in done.stdout.splitlines() if s.startswith("TOKENS"))[7:])
    daemon = start_llama()
    for slot in (0, 1):
        found = [
            daemon.post(
                slot,
                "/completion",
                {
                    "prompt": ids,
                    "n_predict": TOKENS,
                    "temperature": 0,
                    "ignore_eos": True,
                    "return_tokens": True,
                },
            )["tokens"]
            for ids in PROMPTS
        ]
        assert found == expected


def test_a_model_that_is_not_ours_and_a_prompt_that_is_too_long(start_llama: Start) -> None:
    daemon = start_llama()
    # The server would answer to any name.
    status, error = ask(daemon, "/v1/completions", {"model": "other", "prompt": "Hello", "max_tokens": 1})
    assert (status, error["error"]["code"]) == (404, "model_not_found")
    before = daemon.status()
    for stream in (False, True):
        body = {"model": "tiny", "prompt": [40] * 5000, "max_tokens": 4, "stream": stream}
        status, error = ask(daemon, "/v1/completions", body)
        assert (status, error["error"]["type"]) == (400, "exceed_context_size_error")
    after = daemon.status()
    # One try each, no instance blamed.
    assert after["requests"]["failed"] == before["requests"]["failed"] == 0
    assert after["ready"] == 2
    assert [slot["restarts"] for slot in after["slots"]] == [0, 0]


def test_connections_that_it_closes_fail_nothing(start_llama: Start) -> None:
    """cpp-httplib closes a kept connection after 5 s of idleness and after its 100th request."""
    daemon = start_llama(instances=1)

    async def many() -> list[int]:
        async with aiohttp.ClientSession() as session:

            async def one() -> int:
                body = {"model": "tiny", "prompt": "Hello", "max_tokens": 1}
                async with session.post(f"{daemon.url}/v1/completions", json=body) as response:
                    await response.read()
                    return response.status

            found = [await one() for _ in range(250)]
            for pause in (1.9, 4.9, 5.1, 6.0):
                await asyncio.sleep(pause)
                found += [await one(), *await asyncio.gather(*(one() for _ in range(8)))]
            return found

    assert set(asyncio.run(many())) == {200}
    status = daemon.status()
    assert (status["requests"]["failed"], status["requests"]["rejected"]) == (0, 0)
    assert status["slots"][0]["restarts"] == 0
    assert "ejected" not in daemon.log.read_text()


def test_status_and_metrics_show_its_own_counters(start_llama: Start) -> None:
    daemon = start_llama()
    with Load(daemon.url, "tiny", workers=4, max_tokens=40, pause_s=0.0) as load:
        eventually(lambda: load.tally.completed >= 50, what="answers")
        slots = eventually(
            lambda: [
                slot
                for slot in daemon.status()["slots"]
                if slot["load"] and slot["load"]["generated"] and slot["tokens_per_s"]
            ],
            what="counters in status",
        )
        assert slots[0]["load"]["steps"] > 0
        assert not slots[0]["load"]["rounded"]
    assert load.tally.failures == []
    with urllib.request.urlopen(f"{daemon.url}/metrics", timeout=SOON_S) as response:
        page = response.read().decode()
    for slot in ("0", "1"):
        (generated,) = re.findall(
            rf'^llamacpp:tokens_predicted_total{{.*slot="{slot}".*}} (\S+)$', page, re.MULTILINE
        )
        assert float(generated) > 0
    assert page.count("# TYPE llamacpp:tokens_predicted_total counter") == 1


def test_bench_measures_it(start_llama: Start, model_folder: Path, tmp_path: Path) -> None:
    daemon = start_llama()
    words = ("--tokenizer", str(model_folder), "--concurrency", "2", "--requests", "8", "--json")
    done = bench(daemon, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    result = stored(tmp_path)
    (point,) = result.points
    assert (point.completed, point.failed) == (8, 0)
    assert point.output_tokens == 8 * 128
    assert point.prefix_hit_share is not None
    # llama-server counts no requests; the proxy's counter may have those to /tokenize as well.
    assert sorted(point.requests_by_instance or ()) == ["0", "1"]
    assert sum((point.requests_by_instance or {}).values()) >= 8


def test_restarts_and_a_kill_under_load_fail_no_request(start_llama: Start) -> None:
    daemon = start_llama()
    with Load(daemon.url, "tiny", workers=6, max_tokens=60, pause_s=0.0) as load:
        eventually(lambda: load.tally.completed >= 20, what="answers")
        for slot in (0, 1, 0):
            done = daemon.cli("restart", str(slot))
            assert done.returncode == 0, done.stderr
            daemon.wait_ready(2)
        # Killed: its streams are continued elsewhere, and its socket lies there for the next one.
        engine_of(daemon.slot(0)).kill()
        eventually(
            lambda: daemon.slot(0)["restarts"] >= 1 and daemon.status()["ready"] == 2, what="a restart"
        )
        before = load.tally.completed
        eventually(lambda: load.tally.completed >= before + 20, what="answers")
    assert load.tally.failures == []


def test_restarts_and_a_kill_by_the_kind_fail_no_request(start_by_kind: Callable[[], DaemonProcess]) -> None:
    daemon = start_by_kind()
    with Load(daemon.url, "tiny", workers=4, max_tokens=40, pause_s=0.0) as load:
        eventually(lambda: load.tally.completed >= 10, what="answers")
        for slot_id in (0, 1):
            done = daemon.cli("restart", str(slot_id))
            assert done.returncode == 0, done.stderr
            daemon.wait_ready(2)
        before = load.tally.completed
        eventually(lambda: load.tally.completed >= before + 10, what="answers")
    assert load.tally.failures == []
    with Load(daemon.url, "tiny", workers=4, max_tokens=40, pause_s=0.0) as load:
        eventually(lambda: load.tally.completed >= 10, what="answers")
        engine_of(daemon.slot(0)).kill()
        eventually(
            lambda: daemon.slot(0)["restarts"] >= 1 and daemon.status()["ready"] == 2, what="a restart"
        )
    assert load.tally.failures == []


# llama-server puts an empty thought in front of a partial answer of a model that may think: not what was cut.
MAY_THINK = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("fits", [True, False])
def test_a_cut_sampled_chat_goes_on_where_the_template_goes_on(
    start_llama: Start, tmp_path: Path, fits: bool
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(MAY_THINK)
    daemon = start_llama(options=() if fits else ("--chat-template-file", str(template)))

    async def chats() -> list[bytes]:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 1500,
            "stream": True,
            "ignore_eos": True,
        }
        async with aiohttp.ClientSession() as session:
            url = f"{daemon.url}/v1/chat/completions"
            responses = [await session.post(url, json=body) for _ in range(4)]
            begun = [await response.content.readuntil(b'"content":"') for response in responses]
            engine_of(daemon.slot(0)).kill()
            return [
                one + await response.content.read() for one, response in zip(begun, responses, strict=True)
            ]

    answers = asyncio.run(chats())
    whole = [
        answer.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in answer for answer in answers
    ]
    honest = [b"[DONE]" not in answer and answer.count(b'"error"') == 1 for answer in answers]
    continued = daemon.status()["requests"]["continued"]
    if fits:
        assert all(whole)
        assert continued > 0
    else:
        assert [*map(sum, zip(whole, honest, strict=True))] == [1] * 4
        assert any(honest)
        assert continued == 0
        assert "chat template is not known to continue a partial answer" in daemon.log.read_text()


def test_reasoning_has_the_names_of_both_engines(start_llama: Start, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(MAY_THINK.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"))
    daemon = start_llama(instances=1, options=("--chat-template-file", str(template)))
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    _, answer = ask(daemon, "/v1/chat/completions", body)
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] != ""

    async def streamed() -> bytes:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{daemon.url}/v1/chat/completions", json=body | {"stream": True}) as response,
        ):
            return await response.read()

    events = [
        json.loads(line[6:]) for line in asyncio.run(streamed()).split(b"\n\n") if line.startswith(b"data: {")
    ]
    deltas = [event["choices"][0]["delta"] for event in events]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message[name]


def test_one_that_hangs_is_found_and_its_requests_go_elsewhere(start_llama: Start) -> None:
    daemon = start_llama()
    with Load(daemon.url, "tiny", workers=4, max_tokens=40, pause_s=0.0) as load:
        eventually(lambda: load.tally.completed >= 20, what="answers")
        slot = daemon.slot(1)
        engine_of(slot).send_signal(signal.SIGSTOP)
        eventually(
            lambda: daemon.slot(1)["generation"] > slot["generation"], 120, "the hung one to be replaced"
        )
        daemon.wait_ready(2)
    assert load.tally.failures == []
    assert daemon.slot(1)["last_cause"]["name"] == "hung"


def test_a_stop_with_an_open_stream_ends_it_honestly(start_llama: Start) -> None:
    """llama-server itself says nothing on such a stream after SIGTERM; here it can't, so that nothing depends on how
    soon it ends by itself."""
    limits = "drain_timeout_s = 1\nstop_timeout_s = 2\n"
    daemon = start_llama(limits, instances=1, stall_s=600)
    engine = engine_of(daemon.slot(0))

    async def stopped() -> bytes:
        # A seeded sampler can't go on elsewhere; another stream would wait for an instance.
        body = {
            "model": "tiny",
            "prompt": "Hello",
            "max_tokens": 2000,
            "stream": True,
            "ignore_eos": True,
            "seed": 7,
        }
        async with aiohttp.ClientSession() as session:
            response = await session.post(f"{daemon.url}/v1/completions", json=body)
            assert b"choices" in await response.content.readuntil(b"\n\n")
            engine.send_signal(signal.SIGSTOP)
            stopping = asyncio.create_task(asyncio.to_thread(daemon.cli, "stop", "0", "--force"))
            rest = await response.content.read()
            done = await stopping
            assert done.returncode == 0, done.stderr
            return rest

    rest = asyncio.run(stopped())
    assert b'"error"' in rest
    assert b"[DONE]" not in rest
    assert daemon.slot(0)["state"] == "stopped"
