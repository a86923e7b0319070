"""What a request asks for, as far as its first bytes tell."""

from __future__ import annotations

import json

import pytest

from launcher.proxy.openai.body import MAX_CHOICES
from launcher.proxy.openai.prompts import MEDIA_BYTES
from launcher.proxy.request.beginning import Asked, read_asked
from launcher.proxy.request.most_tokens import UNKNOWN_CONTEXT

CUT = 16_384


def read(body: bytes, path: str = "/v1/chat/completions", **more: object) -> Asked | None:
    arguments = {"id": "r", "path": path, "key": "Bearer one", "body": body[:CUT], "length": len(body)}
    return read_asked(arguments | more)


def found(body: bytes, path: str = "/v1/chat/completions", **more: object) -> Asked:
    asked = read(body, path, **more)
    assert asked is not None
    return asked


def chat(text: str, **more: object) -> bytes:
    return json.dumps({"model": "m", **more, "messages": [{"role": "user", "content": text}]}).encode()


def test_a_whole_body() -> None:
    asked = found(chat("hello " * 200, stream=True, max_tokens=9, n=2))
    assert (asked.id, asked.model, asked.stream, asked.max_tokens, asked.choices) == ("r", "m", True, 9, 2)
    assert asked.prompt_bytes == len(json.dumps([{"role": "user", "content": "hello " * 200}]))
    assert len(asked.prefix) == asked.prompt_bytes // 512


def test_prompts_with_the_same_beginning_share_it_though_they_are_cut() -> None:
    one, other = found(chat("w" * 40_000 + "1")), found(chat("w" * 40_000 + "2" * 999))
    assert one.prefix == other.prefix
    assert len(one.prefix) > 30
    assert (one.prompt_bytes // 1000, other.prompt_bytes // 1000) == (40, 41)
    assert found(chat("v" + "w" * 40_000)).prefix[0] != one.prefix[0]
    assert found(chat("w" * 40_000, tools=[{"type": "function"}])).prefix[0] != one.prefix[0]


def test_what_is_behind_a_long_prompt_is_known_from_its_arguments() -> None:
    messages = [{"role": "user", "content": "w" * 40_000}]
    body = json.dumps({"messages": messages, "model": "m", "stream": True}).encode()
    assert (found(body).model, found(body).stream) == (None, False)
    asked = found(body, model="m", stream=True)
    assert (asked.model, asked.stream) == ("m", True)
    assert not found(body, model="m", stream=False).stream
    assert found(chat("w" * 40_000), model="other").model == "m"
    whole = read_asked({"path": "/v1/chat/completions", "body": body, "length": len(body)})
    assert whole is not None
    assert whole.model == "m"


def test_an_image_costs_no_more_than_an_image() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 900_000}}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [image]}]}).encode()
    assert MEDIA_BYTES < found(body).prompt_bytes < MEDIA_BYTES + 200


def test_keys_are_told_apart_and_not_kept() -> None:
    one, other, none = (found(chat("x"), key=key).key for key in ("Bearer sk-1", "Bearer sk-2", None))
    assert one != other
    assert none is None
    assert found(chat("x"), key="", **{"api-key": "Bearer sk-1"}).key == one
    assert "sk-1" not in str(one)


def test_a_form() -> None:
    form = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
        b'RIFF\0\xff\r\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b--\r\n'
    )
    asked = found(form, "/v1/audio/transcriptions")
    assert (asked.model, asked.prefix, asked.prompt_bytes) == ("whisper", (), 0)
    assert found(b"--b\r\n" + b"\0" * 99_999, "/v1/audio/translations").model is None


@pytest.mark.parametrize(
    ("disposition", "more"),
    [
        (
            'form-data; name="model"',
            "Content-Type: text/plain; charset=US-ASCII\r\nContent-Transfer-Encoding: 8bit\r\n",
        ),
        ("Form-Data; size=7; NAME=model ; x=y", ""),
    ],
)
def test_the_model_behind_a_file_of_its_name(disposition: str, more: str) -> None:
    form = (
        b'\r\n--b\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\nRIFF\r\n--b\r\n'
        + f"Content-Disposition: {disposition}\r\n{more}\r\nwhisper\r\n--b--\r\n".encode()
    )
    assert found(form, "/v1/audio/transcriptions").model == "whisper"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models", b""),
        ("/health", b""),
        ("/v1/chat/completions", b""),
        ("/v1/chat/completions", b"hello"),
        ("/v1/chat/completions", b'{"model": ["m"]}'),
        ("/v1/chat/completions", b"\xff\xfe" * 99),
        ("/v1/responses/resp_1", b"{}"),
        ("/nothing", b"{}"),
    ],
)
def test_what_needs_no_choice(path: str, body: bytes) -> None:
    assert read(body, path) is None


def test_arguments_that_are_missing() -> None:
    assert read_asked({}) is None
    asked = read_asked({"path": b"/v1/completions", "body": '{"prompt": "x"}', "id": None, "length": None})
    assert asked is not None
    assert (asked.model, asked.prompt_bytes) == (None, 3)


@pytest.mark.parametrize(("path", "takes_place"), [("/v1/completions", True), ("/tokenize", False)])
def test_only_what_computes_takes_a_place(path: str, takes_place: bool) -> None:
    assert found(b'{"model": "m", "prompt": "x"}', path).takes_place is takes_place


def test_a_limit_may_be_any_number() -> None:
    said = found(b'{"prompt": "x", "max_tokens": "1e99", "n": 1%b}' % (b"0" * 99), "/v1/completions")
    assert (said.max_tokens, said.choices) == (None, MAX_CHOICES)
    assert (
        found(b'{"prompt": "x", "max_tokens": 1%b}' % (b"0" * 99), "/v1/completions").max_tokens
        == UNKNOWN_CONTEXT
    )
