"""Which chat templates go on with a partial answer, as vLLM's POST /tokenize and llama-server's POST /apply-template show
it, and what follows from that.

The templates are rendered by transformers' own renderer and by vLLM's own one of DeepSeek-V3.2, and cut into
tokens by small tokenizers of the two families.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.plain_engine import CHAT, QUESTION, PlainEngine
from support.proxy_under_test import ProxyUnderTest, until
from support.scripted_engine import Call, FakeEngine, Script, not_found
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from launcher.proxy.continuation import template_probe
from launcher.proxy.continuation.continuation import Continuation, EngineTraits, NotExact, plan_continuation
from launcher.proxy.continuation.template_probe import FAULTS, goes_on
from launcher.proxy.continuation.transcript import Transcript

Render = Callable[[dict[str, Any]], str]
"""A chat request's prompt. Raises ValueError where vLLM answers 400."""

MARKS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<think>", "</think>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "<s>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
)
COLON = (  # no mark and no line's end before the answer: a tokenizer may merge there
    "{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
QWEN3_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
QWEN3 = QWEN3_THINKING.replace("assistant\n<think>\n{% endif %}", "assistant\n{% endif %}")
DEEPSEEK_R1 = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% else %}<|Assistant|>{{ m.content.split('</think>') | last }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
USERS_ONLY = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}\nAnswer: {% endif %}"
)


def jinja(template: str) -> Render:
    """As transformers renders it."""

    def render(request: dict[str, Any]) -> str:
        # It takes a second, in each process that collects tests.
        from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415

        (text,), _ = render_jinja_template(
            [request["messages"]],
            chat_template=template + "{# content #}",
            add_generation_prompt=request.get("add_generation_prompt", True),
            continue_final_message=request.get("continue_final_message", False),
        )
        return str(text)

    return render


def closes(request: dict[str, Any]) -> str:
    """ChatML of a renderer that has never heard of `continue_final_message`."""
    return jinja(CHATML)({**request, "continue_final_message": False})


def deepseek_v32(request: dict[str, Any]) -> str:
    """vLLM's own code, as its tokenizers/deepseek_v32.py calls it; nothing else of vLLM is loaded."""
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    path = Path(vllm.origin).parent / "tokenizers" / "deepseek_v32_encoding.py"
    spec = importlib.util.spec_from_file_location("deepseek_v32_encoding", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.encode_messages(request["messages"], thinking_mode="chat", drop_thinking=False))


def trained(tokenizer: Tokenizer, alphabet: list[str]) -> Tokenizer:
    text = ["assistant:Well Well assistant\nWell :Well", *(render_all(CHATML, LLAMA_2, QWEN3_THINKING))] * 40
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def render_all(*templates: str) -> list[str]:
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Well Well"}]
    return [jinja(template)({"messages": turns, "add_generation_prompt": False}) for template in templates]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """GPT's family, with no rule that keeps a colon and the word after it apart."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return trained(tokenizer, pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """Llama 2's family: a word's begin is marked, a text's begin too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return trained(tokenizer, [chr(code) for code in range(10, 127)])


def vllm_tokenize(render: Render, tokenizer: Tokenizer, asked: list[dict[str, Any]] | None = None) -> Script:
    """POST /tokenize of vLLM 0.32."""

    async def answer(call: Call) -> None:
        request = json.loads(call.body)
        if asked is not None:
            asked.append(request)
        try:
            text = request["prompt"] if "prompt" in request else render(request)
        except ValueError as error:
            await call.json({"error": {"message": str(error), "code": 400}}, 400)
            return
        found = tokenizer.encode(text, add_special_tokens=False)
        await call.json(
            {
                "count": len(found.ids),
                "max_model_len": 2048,
                "tokens": found.ids,
                "token_strs": found.tokens if request.get("return_token_strs") else None,
            }
        )

    return answer


def llama_server(before: str | None, after: str | None) -> Script:
    """Build 11549: these prompts of a question and of a partial answer; None where a template refuses."""

    async def answer(call: Call) -> None:
        if call.target == "/tokenize":
            await call.json({"tokens": []})
            return
        request = json.loads(call.body)
        going_on = request["messages"][-1]["role"] == "assistant"
        # Both true: 400 "Cannot set both add_generation_prompt and continue_final_message to true."
        assert (
            going_on is request.get("continue_final_message", False) is not request["add_generation_prompt"]
        )
        prompt = after if going_on else before
        if prompt is None:
            await call.json({"error": {"code": 400, "message": "no", "type": "invalid_request_error"}}, 400)
        else:
            await call.json({"prompt": prompt})

    return answer


def partial(text: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": text}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


def is_exact(render: Render, said: str) -> bool:
    """What is to be found out: whether a partial answer's prompt is the generation prompt and its text."""
    begin = render({"messages": [{"role": "user", "content": QUESTION}], "add_generation_prompt": True})
    try:
        return render(partial(said)) == begin + said
    except ValueError:
        return False


SAID_ALOUD = "Once upon a time"
TEMPLATES = [
    pytest.param(jinja(CHATML), True, id="chatml"),
    pytest.param(jinja(LLAMA_3), True, id="llama-3"),
    pytest.param(jinja(COLON), True, id="colon"),
    pytest.param(jinja(QWEN3_THINKING), False, id="qwen3-thinking"),
    pytest.param(jinja(QWEN3), False, id="qwen3"),
    pytest.param(jinja(DEEPSEEK_R1), False, id="deepseek-r1"),
    pytest.param(jinja(USERS_ONLY), False, id="users-only"),
    pytest.param(closes, False, id="closes"),
    pytest.param(deepseek_v32, False, id="deepseek-v3.2"),
]


async def judged(folder: Path, tokenizer: Script) -> bool | None:
    async with FakeEngine(folder / "e.sock", tokenizer=tokenizer) as engine:
        return await goes_on(engine.address)


@pytest.mark.parametrize(("render", "fits"), TEMPLATES)
async def test_a_template_is_judged_by_what_it_makes(
    tmp_path: Path, byte_level: Tokenizer, sentencepiece: Tokenizer, render: Render, fits: bool
) -> None:
    assert is_exact(render, SAID_ALOUD) is fits
    for tokenizer in (byte_level, sentencepiece):
        assert await judged(tmp_path, vllm_tokenize(render, tokenizer)) is fits


async def test_a_space_that_the_words_mark_stands_for_is_no_difference(
    tmp_path: Path, sentencepiece: Tokenizer
) -> None:
    """Llama 2's models begin with that space, and the template trims it and sets it."""
    assert is_exact(jinja(LLAMA_2), " " + SAID_ALOUD)
    assert await judged(tmp_path, vllm_tokenize(jinja(LLAMA_2), sentencepiece)) is True


def test_the_colon_and_the_word_are_one_token(byte_level: Tokenizer) -> None:
    """Or the case above would not be the one of a merge."""
    ids = [byte_level.encode(text, add_special_tokens=False).ids for text in ("assistant:", "assistant:Well")]
    assert ids[1][: len(ids[0])] != ids[0]


HELLO = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
LLAMA_FITS = llama_server(HELLO, HELLO + "Well")
# The server's replies for the templates above.
LLAMA_UNFIT = llama_server(
    "<s><|User|>Hello<|Assistant|><think>\n", "<s><|User|>Hello<|Assistant|><think></think>Well"
)


@pytest.mark.parametrize(
    ("server", "fits"),
    [
        (LLAMA_FITS, True),
        (llama_server("user:Hello</s>assistant:", "user:Hello</s>assistant:Well"), True),
        (LLAMA_UNFIT, False),
        (llama_server(HELLO, HELLO + "Well<|im_end|>\n" + HELLO), False),
        (llama_server(HELLO, HELLO + " Well"), False),
        (llama_server(HELLO, None), False),
        (llama_server(None, None), None),
    ],
)
async def test_llama_server_is_judged_by_its_prompts(
    tmp_path: Path, server: Script, fits: bool | None
) -> None:
    assert await judged(tmp_path, server) is fits


@pytest.mark.parametrize(
    "answer",
    [{"tokens": []}, {"prompt": None}, {"token_strs": None}, {"token_strs": [1]}, [], "no", {"data": "x"}],
)
async def test_other_servers_are_not_judged(tmp_path: Path, answer: object) -> None:
    async def other(call: Call) -> None:
        await call.json(answer)

    assert await judged(tmp_path, other) is None


async def refuses(call: Call) -> None:
    await call.json({"error": {"message": "no chat template"}}, 400)


@pytest.mark.parametrize("answer", [not_found, refuses])
async def test_who_does_not_tell_is_not_judged(tmp_path: Path, answer: Script) -> None:
    assert await judged(tmp_path, answer) is None


async def test_no_answer_is_no_judgement_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FAULTS):
        await judged(tmp_path, Call.cut_now)
    with pytest.raises(FAULTS):
        await goes_on(FakeEngine(tmp_path / "nobody").address)
    monkeypatch.setattr(template_probe, "ANSWER_TIMEOUT_S", 0.05)
    with pytest.raises(FAULTS):
        await judged(tmp_path, Call.until_left)


# --- what follows ----------------------------------------------------------------------------------

SAID = ("Hello", " wor", "ld", " and", " all", " the", " rest", " of", " it", "!", " Yes", ".")
ENGINE = PlainEngine(CHAT, SAID)


async def outcome(proxy: ProxyUnderTest, *tokenizers: Script, **more: object) -> tuple[bytes, int]:
    """The payload of a stream that is cut once, among instances whose templates are known; the requests sent."""
    bodies: list[bytes] = []

    async def script(call: Call) -> None:
        bodies.append(call.body)
        await call.start_stream()
        for event in ENGINE.answer(call.body)[: 11 if len(bodies) == 1 else None]:
            await call.chunk(event)
        if len(bodies) == 1:
            call.cut()
        else:
            await call.end_stream()

    for slot in range(2):
        for generation, tokenizer in enumerate(tokenizers, 1):
            if generation > 1:
                proxy.server.remove_upstream(slot, generation - 1, "restart")
            await proxy.engine(slot, script, generation=generation, tokenizer=tokenizer)
            await until(lambda: not proxy.server._templates._tasks)
    messages = [{"role": "user", "content": QUESTION}]
    async with proxy.chat(stream=True, messages=messages, **more) as answer:
        return await answer.read(), len(bodies)


@pytest.mark.parametrize("engine", ["vLLM", "llama-server", "another"])
async def test_a_cut_chat_of_a_template_that_is_unfit_or_unknown_ends_honestly(
    proxy: ProxyUnderTest, byte_level: Tokenizer, caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    caplog.set_level("INFO")
    tokenizers = {
        "vLLM": vllm_tokenize(jinja(QWEN3_THINKING), byte_level),
        "llama-server": LLAMA_UNFIT,
        "another": not_found,
    }
    whole, sent = await outcome(proxy, tokenizers[engine], temperature=0.7)
    assert b"[DONE]" not in whole
    assert whole.count(b'"error"') == 1
    assert sent == 1
    (access,) = [record for record in caplog.records if record.name == "launcher.access"]
    assert "the model's chat template is not known to continue a partial answer" in access.__dict__["reason"]
    told = [
        record for record in caplog.records if record.name == "launcher.proxy.continuation.template_probe"
    ]
    assert len(told) == (engine != "another")  # of two instances of one model


@pytest.mark.parametrize("engine", ["vLLM", "llama-server", "another"])
@pytest.mark.parametrize("fitting", [True, False])
async def test_it_goes_on_where_that_is_safe(
    proxy: ProxyUnderTest, byte_level: Tokenizer, engine: str, fitting: bool
) -> None:
    """At any temperature with a template that fits; at 0 with any, known or not, since words are said again."""
    tokenizers = {
        "vLLM": vllm_tokenize(jinja(CHATML if fitting else QWEN3), byte_level),
        "llama-server": LLAMA_FITS if fitting else LLAMA_UNFIT,
        "another": not_found,
    }
    sampled = fitting and engine != "another"
    whole, sent = await outcome(proxy, tokenizers[engine], temperature=0.7 if sampled else 0)
    assert whole.endswith(b"data: [DONE]\n\n")
    assert sent == 2


async def test_the_latest_generation_is_believed(proxy: ProxyUnderTest, byte_level: Tokenizer) -> None:
    before, after = (vllm_tokenize(jinja(template), byte_level) for template in (QWEN3, CHATML))
    whole, sent = await outcome(proxy, before, after, temperature=0.7)
    assert whole.endswith(b"data: [DONE]\n\n")
    assert sent == 2


async def test_another_version_is_not_judged_by_the_last_one(
    proxy: ProxyUnderTest, byte_level: Tokenizer
) -> None:
    whole, sent = await outcome(proxy, vllm_tokenize(jinja(CHATML), byte_level), not_found, temperature=0.7)
    assert b"[DONE]" not in whole
    assert sent == 1


async def cuts(call: Call) -> None:
    call.cut()


async def is_busy(call: Call) -> None:
    await call.json({}, 503)


@pytest.mark.parametrize(("fault", "times"), [(cuts, 2), (is_busy, 1)])
async def test_an_instance_is_asked_again_after_a_fault(
    proxy: ProxyUnderTest, byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch, fault: Script, times: int
) -> None:
    monkeypatch.setattr(template_probe, "AGAIN_S", 0.05)
    calls = 0

    async def busy(call: Call) -> None:
        nonlocal calls
        calls += 1
        await (fault if calls <= times else vllm_tokenize(jinja(CHATML), byte_level))(call)

    whole, sent = await outcome(proxy, busy, temperature=0.7)
    assert proxy.server._traits.engine("m").template_fits
    assert whole.endswith(b"data: [DONE]\n\n")
    assert sent == 2


async def test_an_instance_that_is_gone_is_not_asked_again(proxy: ProxyUnderTest) -> None:
    async def cut(call: Call) -> None:
        tried.set()
        call.cut()

    tried = asyncio.Event()
    await proxy.engine(0, tokenizer=cut)
    await tried.wait()
    assert proxy.server._templates._tasks
    proxy.server.remove_upstream(0, 1, "restart")
    await until(lambda: not proxy.server._templates._tasks)


async def test_the_judgement_stays_while_another_instance_is_asked(
    proxy: ProxyUnderTest, byte_level: Tokenizer
) -> None:
    """Also where that dies before it answers, and where a drain is taken back."""
    engine = await proxy.engine(0, tokenizer=vllm_tokenize(jinja(CHATML), byte_level))
    await until(lambda: proxy.server._traits.engine("m").template_fits)
    await proxy.engine(1, tokenizer=Call.until_left)
    assert proxy.server._traits.engine("m").template_fits
    proxy.server.remove_upstream(1, 1, "it ended", crashed=True)
    proxy.server.add_upstream(0, 1, "m", engine.address, 8, ask_template=True)
    assert proxy.server._traits.engine("m").template_fits
    await until(lambda: not proxy.server._templates._tasks)
    assert proxy.server._traits.engine("m").template_fits


async def test_an_instance_is_asked_once_at_a_time_and_nobody_waits(
    proxy: ProxyUnderTest, byte_level: Tokenizer
) -> None:
    asked: list[dict[str, Any]] = []
    go = asyncio.Event()

    async def late(call: Call) -> None:
        await go.wait()
        await vllm_tokenize(jinja(CHATML), byte_level, asked)(call)

    engine = await proxy.engine(0, tokenizer=late)
    async with proxy.chat() as answer:
        assert answer.status == 200
    proxy.server.add_upstream(0, 1, "m", engine.address, 8, ask_template=True)  # its drain was taken back
    go.set()
    await until(lambda: not proxy.server._templates._tasks)
    assert len(asked) == 3
    assert not any("model" in request for request in asked)


async def test_the_end_waits_for_no_answer(proxy: ProxyUnderTest) -> None:
    begun = asyncio.Event()

    async def never(call: Call) -> None:
        begun.set()
        await call.until_left()

    await proxy.engine(0, tokenizer=never)
    await begun.wait()
    await proxy.server.stop(0.0)
    assert not proxy.server._templates._tasks


@pytest.mark.parametrize(
    "field", [{"chat_template": "{{ messages }}"}, {"chat_template_kwargs": {"enable_thinking": False}}]
)
def test_a_template_of_the_request_is_unknown(field: dict[str, object]) -> None:
    found, fitting = {}, EngineTraits(template_fits=True)
    for temperature in (0, 0.7, None):
        transcript = Transcript()
        for event in ENGINE.answer(ENGINE.request())[:11]:
            transcript.feed(event)
        body = ENGINE.request(temperature=temperature, **field)
        found[temperature] = plan_continuation(CHAT, body, transcript, fitting)
    assert isinstance(found[0], Continuation)
    (name,) = field
    assert found[0.7] == found[None] == NotExact(f"`{name}` in the request")
    empty = ENGINE.request(temperature=0.7, chat_template=None, chat_template_kwargs={})
    assert isinstance(plan_continuation(CHAT, empty, transcript, fitting), Continuation)
