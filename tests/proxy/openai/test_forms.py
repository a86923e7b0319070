"""The model of a form, as the instance's own parser reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartParser

from launcher.base.api_errors import HttpError
from launcher.proxy.openai.forms import MAX_PARTS, FormReader

TYPE = "multipart/form-data; boundary=B"
MODEL = 'Content-Disposition: form-data; name="model"'
FILE = ('Content-Disposition: form-data; name="file"; filename="model"', b"\x00--B \r\n" * 30_000)


def form(*parts: tuple[str, bytes]) -> bytes:
    return (
        b"".join(b"--B\r\n" + head.encode() + b"\r\n\r\n" + value + b"\r\n" for head, value in parts)
        + b"--B--\r\n"
    )


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (form(FILE, (MODEL, b"whisper")), "whisper"),
        (form(("content-disposition:form-data;name=model", b"whisper"), FILE), "whisper"),
        (form((MODEL, b"")), None),
        (form((MODEL, b" a ")), " a "),  # as the instance reads it
        (form((f"{MODEL}\r\nContent-Type: text/plain; charset=utf-8", "Ä".encode())), "Ä"),
        (form((f"{MODEL}\r\nContent-Transfer-Encoding: 8bit", b"m")), "m"),
        (form(FILE), None),
        (form(('Content-Disposition: form-data; name="model_x"', b"no")), None),
        (form(('Content-Disposition: form-data; name="f"; filename="a;b=c.wav"', b"no")), None),
        (form(("Content-Disposition: form-data; name=f; filename=a; filename*=UTF-8''%e4", b"no")), None),
        (b"--B--", None),
    ],
)
def test_the_model_of_a_form(body: bytes, model: str | None) -> None:
    assert FormReader(TYPE).finish(body).model == model
    assert FormReader('multipart/form-data; charset=utf-8; boundary="B";').finish(body).model == model
    assert "".join(read_by_starlette(body)) == (model or "")


@pytest.mark.parametrize(
    "head",
    [
        MODEL,
        f'{MODEL}; xfilename="a"',
        'Content-Disposition: form-data; name = "model"',
        f'X-Note: filename="a"\r\n{MODEL}',
        f'{MODEL}\r\nX-Note: filename="a"',
        f'{MODEL}; filename="a"',
        "Content-Disposition: form-data; name=Model",
        'Content-Disposition: form-data; name="model "',
        "Content-Disposition: form-data; name*=UTF-8''model; name=\"x\"",
        'Content-Disposition: form-data; name="x"; name="model"',
        'Content-Disposition: form-data; name="x"; filename="a\\"; name=\\"model"',
        'Content-Disposition: form-data; name="x"; filename="a; name=model"',
        "content-disposition: form-data;\r\n name=model",
        f"X: {'x' * 9000}\r\n{MODEL}",
        f'Content-Disposition: form-data; name="x"\r\n{MODEL}',
        f"{MODEL}\n{MODEL}",
        f"{MODEL}\r",
        f"{MODEL}\r\nContent-Transfer-Encoding: base64",
        f"{MODEL}\r\nContent-Type: text/plain; charset=utf-16",
        "X: y",
        'Content-Disposition: attachment; name="model"',
    ],
)
def test_ambiguous_headers_are_refused(head: str) -> None:
    """Whichever model an instance reads, a key's list of models holds."""
    with pytest.raises(HttpError) as caught:
        FormReader(TYPE).finish(form((MODEL, b"mine"), FILE, (head, b"another")))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"preamble\r\n" + form((MODEL, b"m")),
        b"\r\n" + form((MODEL, b"m")),
        form((MODEL, b"m")) + b"epilogue",
        form((MODEL, b"m")).removesuffix(b"--\r\n"),
        form((MODEL, b"m")).replace(b"\r\n--B--", b"\r\n--Bx--"),
        form((MODEL, b"m")).replace(b"--B\r\n", b"--B \r\n"),
        form((MODEL, b"m")).replace(b"\r\n", b"\n"),
        form((MODEL, b"m" * 5000)),
        form((MODEL, b"\xff")),
        b"--B\r\n\r\nm\r\n--B--",
        form(*[('Content-Disposition: form-data; name="a"', b"")] * (MAX_PARTS + 1)),
    ],
)
def test_unusual_forms_are_refused(body: bytes) -> None:
    with pytest.raises(HttpError):
        FormReader(TYPE).finish(body)


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; xboundary=B",
        "multipart/form-data; boundary=A; boundary=B",
        "multipart/form-data; boundary*=B",
        "multipart/form-data; boundary = B",
        'multipart/form-data; boundary="B \\""',
        "multipart/form-data; boundary=B, multipart/form-data; boundary=A",
        f"multipart/form-data; boundary={'B' * 71}",
        "multipart/form-data; boundary=B; charset=utf-16",
    ],
)
def test_a_form_needs_one_boundary(content_type: str) -> None:
    with pytest.raises(HttpError):
        FormReader(content_type).finish(form((MODEL, b"m")))


def read_by_starlette(body: bytes, content_type: str = TYPE) -> list[str]:
    """The values of `model` that vLLM's parser hands on."""

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    async def read() -> list[str]:
        found = await MultiPartParser(Headers({"Content-Type": content_type}), stream()).parse()
        values = [value if isinstance(value, str) else "a file" for value in found.getlist("model")]
        await found.close()
        return values

    return asyncio.run(read())


_words = st.sampled_from(
    [
        *(
            'name="model"',
            "name=model",
            'name="a"',
            'filename="x"',
            'xfilename="x"',
            "filename*=utf-8''x",
            "name*=model",
        ),
        *(
            ' name = "model"',
            'name="mo\\del"',
            'filename="\\"; name=\\"model"',
            'filename="; name=model"',
            'NAME="model"',
        ),
        *('name="model', 'name=model"', "name='model'", 'name="model";', "", " ", "=", '"', "model"),
    ]
)
_heads = st.builds(
    lambda name, kind, words, more: f"{name}: {kind}" + "".join(f"; {word}" for word in words) + more,
    st.sampled_from(["Content-Disposition", "content-disposition", "Content-Disposition ", " Content-Disposition", "X"]),
    st.sampled_from(["form-data", "Form-Data", "attachment", "form-data "]),
    st.lists(_words, max_size=3),
    st.sampled_from(["", "", "\r\nX: y", '\r\nX: filename="x"', "\r\n folded", "\n", f"\r\n{MODEL}"]),
)  # fmt: skip
_values = st.sampled_from(
    [b"m", b"", b" m ", b"\r\n", b"--B", b"\r\n--", b"\r\n--Bx", b"m\r\n--B\r\n\r\n", "Ä".encode()]
)
_ends = st.sampled_from(
    [b"--B--\r\n", b"--B--", b"--B", b"", b"--B--\r\n--B\r\n" + MODEL.encode() + b"\r\n\r\nm"]
)
_forms = st.builds(
    lambda parts, end: b"".join(b"--B\r\n%b\r\n\r\n%b\r\n" % (h.encode(), v) for h, v in parts) + end,
    st.lists(st.tuples(_heads, _values), max_size=4),
    _ends,
)


@settings(deadline=None, max_examples=400)
@given(_forms)
def test_accepted_forms_read_the_same_in_the_instances_parser(body: bytes) -> None:
    try:
        model = FormReader(TYPE).finish(body).model
    except HttpError:
        return
    values = read_by_starlette(body)
    assert len(values) <= 1
    assert (values[0] if values else "") == (model or "")


@settings(deadline=None, max_examples=200)
@given(_forms, st.lists(st.integers(1, 40), min_size=1))
def test_pieces_read_like_the_whole(body: bytes, sizes: list[int]) -> None:
    def whole() -> object:
        try:
            return FormReader(TYPE).finish(body).model
        except HttpError:
            return HttpError

    def pieces() -> object:
        reader, had, at = FormReader(TYPE), bytearray(), 0
        try:
            for number in range(len(body)):
                size = sizes[number % len(sizes)]
                had += body[at : at + size]
                at += size
                reader.feed(had)
            return reader.finish(had).model
        except HttpError:
            return HttpError

    assert pieces() == whole()
