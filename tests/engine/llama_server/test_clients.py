"""Third-party clients use two llama-servers through the proxy as they use two vLLMs (engine/under_load)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from engine.without_proxy import direct, findings
from support.daemon_process import DaemonProcess, eventually

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
sys.path.append(str(SCRIPTS))
import outside_clients  # noqa: E402
from outside_clients import Endpoint  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

QUESTION: Any = [{"role": "user", "content": "Which core are you on?"}]
TOOL = {"name": "where", "description": "a core", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def llama_daemon(
    config: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonProcess]:
    # Greedy by default, so that an answer is the same with the proxy and without.
    text = config().replace('"--ctx-size"', '"--temp", "0", "--ctx-size"')
    daemon = DaemonProcess(tmp_path_factory.mktemp("d"), text)
    try:
        daemon.wait_ready(2)
        yield daemon
    finally:
        daemon.end()


@pytest.fixture
def endpoint(llama_daemon: DaemonProcess, model_folder: Path) -> Endpoint:
    return Endpoint(llama_daemon.url, "tiny", model_folder)


@pytest.fixture
def sdk(llama_daemon: DaemonProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{llama_daemon.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllm_bench_serve(
    llama_daemon: DaemonProcess, endpoint: Endpoint, vllm: str, tmp_path: Path, backend: str
) -> None:
    before = outside_clients.sums(llama_daemon.url)
    tried = outside_clients.bench_serve(endpoint, tmp_path, vllm, backend)
    assert (tried.failed, tried.said["completed"]) == (0, outside_clients.REQUESTS)
    assert tried.said["total_output_tokens"] == outside_clients.REQUESTS * outside_clients.ANSWER_TOKENS

    def counted() -> dict[str, int]:
        after = outside_clients.sums(llama_daemon.url)
        return {key: after[key] - before[key] for key in after if after[key] != before[key]}

    # It also asks for the tokens of each answer, of servers that have /tokenize.
    all_ = tried.sent + outside_clients.REQUESTS
    eventually(lambda: counted() == {"accepted": all_, "completed": all_}, what="its counters")


# 405 for /v1/responses/compact, which neither vLLM nor llama.cpp has; the suite takes 404 only.
NO_ROUTE = {"compact-missing-model", "compact-response"}
# As llama-server does with this model by itself, whose answers are no sentences and call no tools (docs/clients.md).
PASSED: dict[str, set[str]] = {
    "openai-chat": {"chat-streaming-response", "chat-streaming-usage"},
    "open-responses": set(),
    "anthropic": {"anth-error-handling", "anth-streaming-response", "anth-streaming-usage"},
}


@pytest.mark.parametrize("form", ["openai-chat", "open-responses", "anthropic"])
def test_llm_comply_finds_nothing_more_than_without_the_proxy(
    llama_daemon: DaemonProcess, endpoint: Endpoint, tmp_path: Path, form: str
) -> None:
    command = [sys.executable, "-m", "llm_comply.cli"]
    through = outside_clients.llm_comply(endpoint, tmp_path, command, form)
    with direct(llama_daemon, 0, endpoint) as instance:
        alone = outside_clients.llm_comply(instance, tmp_path, command, form)
    passed, theirs = (
        {case for case, (status, _) in findings(tried).items() if status == "passed"}
        for tried in (through, alone)
    )
    assert theirs - passed <= NO_ROUTE
    assert passed == PASSED[form], findings(through)


def test_the_sdk_of_openai(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["tiny"]
    whole = sdk.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=64, temperature=0)
    assert whole.usage is not None
    with sdk.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=64, temperature=0, stream=True, stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.model for chunk in chunks} == {whole.model} == {"tiny"}
    called = sdk.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=64, tool_choice="auto", tools=[{"type": "function", "function": TOOL}],
    )  # type: ignore[call-overload]  # fmt: skip
    assert called.choices[0].finish_reason in {"stop", "length", "tool_calls"}
    counted = sdk.responses.input_tokens.count(model="tiny", input="Which core are you on?")
    assert counted.input_tokens > 0
    with pytest.raises(openai.BadRequestError):
        sdk.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=-5)
    with pytest.raises(openai.NotFoundError):
        sdk.chat.completions.create(model="other", messages=QUESTION)
    text = sdk.completions.create(model="tiny", prompt="Hello", max_tokens=4).choices[0].text
    assert isinstance(text, str)


def test_the_sdk_of_anthropic(llama_daemon: DaemonProcess) -> None:
    with anthropic.Anthropic(base_url=llama_daemon.url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(model="tiny", messages=QUESTION, max_tokens=16)
        assert whole.usage.output_tokens > 0
        with client.messages.stream(model="tiny", messages=QUESTION, max_tokens=16) as stream:
            assert stream.get_final_message().usage.output_tokens > 0
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="other", messages=QUESTION, max_tokens=16)
