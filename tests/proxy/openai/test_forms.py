"""The model of a form, as the instance's own parser reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartParser
from support.examples import examples

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
        'Content-Disposition: form-data; name="x"; name*0=mo; name*1=del',
        "Content-Disposition: form-data; name*=UTF-8'en'%6dod%65l; name=x",
        "Content-Disposition: form-data; name=\"x\"; Name = 'model'",
        'Content-Disposition: form-data; name="model"x',
        'Content-Disposition: form-data; name="mod\\el"',
    ],
)
def test_ambiguous_headers_are_refused(head: str) -> None:
    """Whichever model an instance reads, a key's list of models holds."""
    with pytest.raises(HttpError) as caught:
        FormReader(TYPE).finish(form((MODEL, b"mine"), FILE, (head, b"another")))
    assert caught.value.status == 400


FILE_NAMES = (
    r'filename="call \"intro\".wav"',
    r'filename="C:\Users\me\a.wav"',
    r'filename="\\server\share\a.wav"',
    r'filename="a\"',
    'filename="song; name=x.wav"',
    'filename="my model; name.wav"',
    'filename="model"',
    "filename*0=mo; filename*1=del; filename=model",
    'filename="a;b=c.wav"; size=68',
    'filename="a.wav"; creation-date="Wed, 12 Feb 1997 16:29:51 -0500"; size=68',
    "filename=a.wav; filename*=UTF-8'en'%e2%82%ac%20rates.wav",
    'filename="a b\x1b\x7f\tc.wav"',
    'filename="\u8868.wav"',
    'filename="two"; filename="names"',
    f'filename="{"n" * 4000}"',
    'filename=""',
    'x-path="/home/me/it\'s"; filename=a.wav',
    'filename = "a.wav" ;',
    'filename=unclosed"',
)
PART_HEADERS = (
    "",
    "Content-Type: text/plain; charset=ISO-8859-1\r\nContent-Transfer-Encoding: 8bit\r\n",
    "content-type: text/plain; charset=US-ASCII\r\n",
    "Content-Type: text/plain;charset=windows-1252\r\n",
    "Content-Type: text/plain; charset=Shift_JIS\r\n",
    'Content-Type: text/plain; charset="utf-8"; format=flowed\r\n',
    "Content-Transfer-Encoding: quoted-printable\r\n",
    "Content-Transfer-Encoding: binary\r\nContent-Length: 10\r\nMIME-Version: 1.0\r\n",
    "Content-ID: <a@b>\r\nX-Note: 1\r\nX-Note: 2\r\nX-Empty:\r\n",
    'X-Note: filename="a"; name=model\r\n',
)


def file_part(name: str) -> tuple[str, bytes]:
    return (f'Content-Disposition: form-data; name="file"; {name}', b"RIFF\x00")


@pytest.mark.parametrize("name", FILE_NAMES)
def test_a_part_of_another_name_has_any_file_name(name: str) -> None:
    body = form(file_part(name), (MODEL, b"mine"))
    assert FormReader(TYPE).finish(body).model == "mine"
    assert read_by_starlette(body) == ["mine"]


@pytest.mark.parametrize("headers", PART_HEADERS)
def test_parts_have_any_other_header(headers: str) -> None:
    for head in (headers + MODEL, f"{MODEL}\r\n{headers}".removesuffix("\r\n")):
        body = form((head, b"mine"), (headers + file_part("filename=a")[0], b"\xff"))
        assert FormReader(TYPE).finish(body).model == "mine"
        assert read_by_starlette(body) == ["mine"]


@pytest.mark.parametrize(
    "headers", ["Content-Transfer-Encoding: base64", "Content-Type: text/plain; charset=utf-16"]
)
def test_other_parts_have_any_coding(headers: str) -> None:
    body = form((f"{file_part('size=4')[0]}\r\n{headers}", b"UklGRg=="), (MODEL, b"mine"))
    assert FormReader(TYPE).finish(body).model == "mine"


@pytest.mark.parametrize("disposition", ['name="model"; size=4', "size=4; name=model", 'NAME="model";'])
def test_the_model_has_other_parameters(disposition: str) -> None:
    body = form((f"Content-Disposition: form-data; {disposition}", b"mine"))
    assert FormReader(TYPE).finish(body).model == "mine"
    assert read_by_starlette(body) == ["mine"]


@pytest.mark.parametrize("before", [b"", b"\r\n", b"\n", b"\r\n\r\n"])
@pytest.mark.parametrize("after", [b"", b"\r\n", b"\r\n\r\n", b"  \r\nepilogue", b"\n", b"\x00"])
def test_line_ends_and_an_epilogue_surround_a_form(before: bytes, after: bytes) -> None:
    body = before + form((MODEL, b"mine"), FILE) + after
    assert FormReader(TYPE).finish(body).model == "mine"
    assert read_by_starlette(body) == ["mine"]


def test_a_form_has_a_preamble() -> None:
    body = b"This is a message\r\n-- in MIME format.\r\n" + form((MODEL, b"mine"))
    assert FormReader(TYPE).finish(body).model == "mine"


@pytest.mark.parametrize(
    ("kind", "headers", "value", "model"),
    [
        ("", "", "é".encode(), "é"),
        ("; charset=utf-8", "Content-Type: text/plain; charset=UTF8", "é".encode(), "é"),
        ("; charset=ISO-8859-1", "", b"mine", "mine"),
        ("; charset=windows-1252", "", b"mine", "mine"),
        ("; charset=ISO-8859-1", "", b"\xe9", "é"),
        ("", "Content-Type: text/plain; charset=iso-8859-1", b"\xe9", "é"),
    ],
)
def test_the_charset_of_the_model(kind: str, headers: str, value: bytes, model: str) -> None:
    body = form((f"{headers}\r\n{MODEL}" if headers else MODEL, value))
    assert FormReader(TYPE + kind).finish(body).model == model
    assert read_by_starlette(body, TYPE + kind) == [model]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "its boundary '--B' is nowhere in it"),
        (form((MODEL, b"m")).replace(b"--B", b"--C"), "its boundary '--B' is nowhere in it"),
        (b"x" + form((MODEL, b"m")), "its first boundary does not begin a line (byte 1)"),
        (form((MODEL, b"m")) + form((MODEL, b"n")), "a boundary follows the last one (byte 63)"),
        (form((MODEL, b"m")).removesuffix(b"--\r\n"), "its last boundary '--B--' is missing: it may be cut off"),
        (form((MODEL, b"m"))[:-6], "its last boundary '--B--' is missing: it may be cut off"),
        (form((MODEL, b"m")).replace(b"\r\n--B--", b"\r\n--Bx--"), "0x78 (byte 59) follows the boundary in place of a"),
        (form((MODEL, b"m")).replace(b"--B\r\n", b"--B \r\n"), "white space follows the boundary before or after"),
        (form((MODEL, b"m"), FILE).replace(b"m\r\n--B\r\n", b"m\r\n--B\t\r\n"), "white space follows the boundary"),
        (form((MODEL, b"m")).replace(b"\r\n", b"\n"), "0x0a (byte 3) follows the boundary in place of a line end"),
        (form((MODEL, b"m" * 5000)), "the field `model` is longer than 4096 bytes"),
        (form((MODEL, b"m\xff")), "the field `model` is not UTF-8: byte 0xff"),
        (b"--B\r\n\r\nm\r\n--B--", "part 1 has no header Content-Disposition"),
        (form(FILE, ("X: y", b"")), "part 2 has no header Content-Disposition"),
        (form(FILE, ("Content-Disposition: form-data", b"")), "Content-Disposition of part 2 has no parameter `name`"),
        (form((MODEL + "; a=b" * 16, b"m")), "the Content-Disposition of part 1 has more than 16 parameters"),
        (form(("X" * 5000, b"")), "has a line that is no field: 'XXXX"),
        (form((f"X: {'x' * 5000}", b"")), "the header 'X' of part 1 is longer than 4224 bytes"),
        (form((f"X: {'x' * 90000}", b"")), "the header of part 1 is longer than 33808 bytes"),
        (form(("X: y\r\n" * 8 + MODEL, b"")), "part 1 has more than 8 header lines"),
        (form((f"X-Note: a\nb\r\n{MODEL}", b"")), "the header 'X-Note' of part 1 has the control character 0x0a"),
        (form((f"{MODEL};\r\n size=4", b"m")), "the header of part 1 has a folded line"),
        (form(FILE, (MODEL, b"m"), (MODEL, b"m")), "part 3 ('model') is another field `model`"),
        (form((f"{MODEL}; filename=a", b"m")), "Content-Disposition of part 1 ('model') has a file name"),
        (form(file_part('filename="a; name=model"')), "part 1 ('file') can be read as a field `model`"),
        (form((f"{MODEL}\r\nContent-Transfer-Encoding: BASE64", b"bQ==")), "Content-Transfer-Encoding is 'base64'"),
        (form((f"{MODEL}\r\nContent-Transfer-Encoding: quoted-printable", b"=6D")), "is 'quoted-printable'"),
        (form((f"{MODEL}\r\nContent-Type: text/plain; charset=UTF-16", b"m")), "its charset is 'utf-16'"),
        (form((f"{MODEL}\r\nContent-Type: text/plain; charset=latin1", "é".encode())), "its charset is 'latin1'"),
        (form(*[('Content-Disposition: form-data; name="a"', b"")] * (MAX_PARTS + 1)), "more than 1000 parts"),
    ],
)  # fmt: skip
def test_a_refusal_names_what_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(HttpError) as caught:
        FormReader(TYPE).finish(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_form")
    assert words in caught.value.message


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
        "multipart/form-data; boundary=B; boundary*=A",
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


@settings(deadline=None, max_examples=examples(400))
@given(_forms)
def test_accepted_forms_read_the_same_in_the_instances_parser(body: bytes) -> None:
    try:
        model = FormReader(TYPE).finish(body).model
    except HttpError:
        return
    values = read_by_starlette(body)
    assert len(values) <= 1
    assert (values[0] if values else "") == (model or "")


# As libraries write them: whatever is drawn, one field `model` is in the form, once.
_text_fields = st.sampled_from(
    ["a", "language", "model_x", "my model", "models", "m", "timestamp_granularities[]", "名"]
)
_no_boundary = st.binary(max_size=20).filter(lambda drawn: not drawn.startswith(b"B"))  # after "--"
_file_parts = st.tuples(st.sampled_from(PART_HEADERS), st.sampled_from(FILE_NAMES), _no_boundary).map(
    lambda drawn: (drawn[0] + file_part(drawn[1])[0], b"\r\n--" + drawn[2])
)
_field_parts = st.tuples(st.sampled_from(PART_HEADERS), _text_fields, st.binary(max_size=20)).map(
    lambda drawn: (f'{drawn[0]}Content-Disposition: form-data; name="{drawn[1]}"', drawn[2])
)
_plain_models = st.tuples(
    st.sampled_from(PART_HEADERS),
    st.sampled_from(
        ['name="model"', "name=model", 'name="model"; size=4', 'size=4; name="model" ;', 'NAME="model"']
    ),
    st.sampled_from([b"mine", b"org/mine-7B:v1", b"", b" mine ", b"mine\r\n"]),
).map(lambda drawn: (f"{drawn[0]}Content-Disposition: form-data; {drawn[1]}", drawn[2]))
_decorated = st.builds(
    lambda before, parts, model, at, after: (
        before + form(*parts[:at], model, *parts[at:]).removesuffix(b"\r\n") + after
    ),
    st.sampled_from([b"", b"\r\n", b"\n", b"\r\n\r\n"]),
    st.lists(_file_parts | _field_parts, max_size=4),
    _plain_models,
    st.integers(0, 4),
    st.sampled_from([b"", b"\r\n", b"\r\n\r\n", b"\r\nepilogue\r\n", b" \r\n", b"-- "]),
)


@settings(deadline=None, max_examples=examples(400))
@given(
    _decorated,
    st.sampled_from(["", "; charset=utf-8", "; charset=ISO-8859-1", ";charset=us-ascii"]),
)
def test_what_the_instances_parser_reads_as_one_plain_model_is_accepted(body: bytes, more: str) -> None:
    values = read_by_starlette(body, TYPE + more)
    assert len(values) == 1
    assert FormReader(TYPE + more).finish(body).model == (values[0] or None)


@settings(deadline=None, max_examples=examples(200))
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
