"""Third-party clients use both instances through the proxy, and its counters agree with theirs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from engine.without_proxy import direct, findings
from support.daemon_process import DaemonProcess, eventually

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
sys.path.append(str(SCRIPTS))
import outside_clients  # noqa: E402
from outside_clients import Endpoint  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


@pytest.fixture
def endpoint(daemon: DaemonProcess, talker: Path) -> Endpoint:
    return Endpoint(daemon.url, "tiny", talker)


@pytest.mark.parametrize("backend", [pytest.param("openai", marks=pytest.mark.release), "openai-chat"])
def test_vllm_bench_serve(
    daemon: DaemonProcess, endpoint: Endpoint, vllm: str, tmp_path: Path, backend: str
) -> None:
    before, slots_before = outside_clients.sums(daemon.url), daemon.status()["requests"]["slots"]
    tried = outside_clients.bench_serve(endpoint, tmp_path, vllm, backend)
    after, slots = outside_clients.sums(daemon.url), daemon.status()["requests"]["slots"]
    assert tried.failed == 0
    assert tried.said["completed"] == outside_clients.REQUESTS
    assert tried.said["total_output_tokens"] == outside_clients.REQUESTS * outside_clients.ANSWER_TOKENS
    assert {key: after[key] - before[key] for key in after} == {
        "accepted": tried.sent, "completed": tried.sent, "refused": 0, "client_aborted": 0, "rejected": 0, "failed": 0,
    }  # fmt: skip
    served = [
        slots[slot]["completed"] - slots_before.get(slot, {}).get("completed", 0) for slot in ("0", "1")
    ]
    assert min(served) > 0, served


# What vLLM 0.32 does with this model, by itself (docs/clients.md): it writes fields that are absent as null or leaves them
# out, which the schemas of the specifications forbid, and random weights decide how long an answer is and whether it calls
# a tool; ...
ITS_WAY = re.compile(
    r"None is not|is a required property|is not valid under any of the given schemas"
    r"|^(finish_reason|stop_reason): expected '(stop|tool_calls|end_turn|tool_use)', got '(length|max_tokens)'$"
    r"|^expected status='completed', got 'incomplete'$"
    r"|^choices\[0\]\.message\.tool_calls is missing or empty$|^no output item with type='function_call' "
)
# ... and in these cases it answers otherwise than the suite wants: pictures, a request without `model`, compaction,
# and Anthropic's `tool_choice`.
UNFIT = {
    "openai-chat": {"chat-image-input", "chat-error-handling"},
    "open-responses": {"image-input", "compact-response", "compact-missing-model", "error-handling"},
    "anthropic": {"anth-image-input", "anth-tool-calling"},
}


@pytest.mark.parametrize(
    "form",
    [
        "openai-chat",
        *(pytest.param(form, marks=pytest.mark.release) for form in UNFIT if form != "openai-chat"),
    ],
)
def test_llm_comply_finds_nothing_more_than_without_the_proxy(
    daemon: DaemonProcess, endpoint: Endpoint, tmp_path: Path, form: str
) -> None:
    command = [sys.executable, "-m", "llm_comply.cli"]
    before = outside_clients.sums(daemon.url)
    through = outside_clients.llm_comply(endpoint, tmp_path, command, form)
    after = outside_clients.sums(daemon.url)
    for outcome in ("failed", "rejected", "client_aborted"):
        assert after[outcome] == before[outcome]
    with direct(daemon, 0, endpoint) as instance:
        alone = outside_clients.llm_comply(instance, tmp_path, command, form)
    ours, theirs = findings(through), findings(alone)
    assert ours == theirs
    failed = {
        case
        for case, (status, reasons) in ours.items()
        if status == "failed" and not all(ITS_WAY.search(text) for text in reasons)
    }
    assert failed == UNFIT[form], ours


def test_the_sdk_waits_for_answers_and_reads_streams_without_asyncio(daemon: DaemonProcess) -> None:
    question: Any = [{"role": "user", "content": "Which core are you on?"}]
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        whole = client.chat.completions.create(model="tiny", messages=question, max_tokens=64)
        with client.chat.completions.create(
            model="tiny",
            messages=question,
            max_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        # vLLM leaves fields of null out of a stream's usage, and not of a whole response's.
        streamed, usage = (
            found.usage.model_dump(exclude_none=True) for found in (chunks[-1], whole) if found.usage
        )
        assert streamed == usage
        called = client.chat.completions.create(
            model="tiny", messages=question, max_tokens=64, tool_choice="auto",
            tools=[{"type": "function", "function": {"name": "where", "parameters": {"type": "object"}}}],
        )  # fmt: skip
        assert called.choices[0].finish_reason in {"stop", "length", "tool_calls"}
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="tiny", messages=question, max_tokens=10_000)


def test_the_audit_trail_has_every_request(daemon: DaemonProcess) -> None:
    folder = daemon.folder / "audit"

    def recorded() -> int:
        files = sorted(folder.glob("audit-*.jsonl"))
        return sum(
            json.loads(line)["kind"] == "request" for file in files for line in file.read_text().splitlines()
        )

    ended = outside_clients.sums(daemon.url)["accepted"]
    assert ended > 0
    eventually(lambda: recorded() == ended, what="every request in the trail")
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "audit", "verify", str(folder)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
