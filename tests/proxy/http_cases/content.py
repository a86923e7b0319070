"""What a body says, and how it is coded."""

# ruff: noqa: E501 - a case is a line

from __future__ import annotations

import json

from proxy.http_cases.model import (
    BODY,
    LAST,
    PATH,
    POSTED,
    Case,
    Outcome,
    Request,
    chunk,
    chunked,
    get,
    post,
    refused,
    served,
)

_NO = (refused(400, closes=None),)


def _json(name: str, body: bytes, right: tuple[Outcome, ...] = _NO, *fields: str) -> Case:
    return Case(f"json: {name}", "8259 2", (post(*fields, body=body),), right)


def _as_is(body: bytes) -> Outcome:
    return served(Request("POST", PATH, body))


def _coded(name: str, value: str, right: tuple[Outcome, ...] = (refused(415),)) -> Case:
    return Case(f"coded: {name}", "9110 8.4", (post(f"Content-Encoding: {value}"),), right)


_SPACED = b' \r\n\t{ "prompt" : "\\u00e9\\n" ,\n"model"\t:"m" , "model_" : 1e400 } \n'
_DEEP = b'{"model":"m","a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"

CASES: tuple[Case, ...] = (
    _json("goes on byte for byte", _SPACED, (_as_is(_SPACED),)),
    _json("UTF-8 goes on byte for byte", '{"model":"m","prompt":"é😀"}'.encode(), (_as_is('{"model":"m","prompt":"é😀"}'.encode()),)),
    _json("1 MB goes on byte for byte", b'{"model":"m","prompt":"' + b"x" * 1_000_000 + b'"}', (_as_is(b'{"model":"m","prompt":"' + b"x" * 1_000_000 + b'"}'),)),
    _json("NUL escaped", b'{"model":"m","prompt":"\\u0000"}', (_as_is(b'{"model":"m","prompt":"\\u0000"}'),)),
    _json("empty", b""),
    _json("only space", b"   "),
    _json("cut", b'{"model":"m","prompt":"hel'),
    _json("two objects", BODY + BODY),
    _json("junk after it", BODY + b"x"),
    _json("a list", b'["model"]'),
    _json("a text", b'"model"'),
    _json("a number", b"1"),
    _json("null", b"null"),
    _json("single quotes", b"{'model':'m'}"),
    _json("a comma too many", b'{"model":"m",}', (*_NO, _as_is(b'{"model":"m",}'))),
    _json("no quotes", b"{model:m}"),
    _json("a comment", b'{"model":"m"/*x*/}'),
    _json("a form", b"model=m&prompt=x"),
    _json("binary", bytes(range(256))),
    _json("NUL after it", BODY + b"\x00"),
    _json("model is a number", b'{"model":1}'),
    _json("model is a list", b'{"model":["m"]}'),
    _json("model is an object", b'{"model":{"m":"m"}}'),
    _json("model is not there", b'{"model":"other"}', (refused(404, 400, closes=None),)),
    _json("model has a control character", b'{"model":"m\n"}', (refused(400, 404, closes=None),)),
    _json("model twice", b'{"model":"other","model":"m"}', (*_NO, _as_is(b'{"model":"other","model":"m"}'))),
    _json("model escaped", b'{"m\\u006fdel":"\\u006d"}', (_as_is(b'{"m\\u006fdel":"\\u006d"}'),)),
    _json("100,000 deep", _DEEP, (*_NO, _as_is(_DEEP))),
    _json("UTF-16", json.dumps({"model": "m"}).encode("utf-16")),
    _json("UTF-16 without a mark", json.dumps({"model": "m"}).encode("utf-16-le")),
    _json("UTF-32", json.dumps({"model": "m"}).encode("utf-32")),
    _json("a byte order mark", b"\xef\xbb\xbf" + BODY, (*_NO, _as_is(b"\xef\xbb\xbf" + BODY))),
    _json("Latin-1", '{"model":"é"}'.encode("latin-1"), (refused(400, 404, closes=None),)),
    _json("Latin-1 in the prompt", '{"model":"m","prompt":"é"}'.encode("latin-1"), (*_NO, _as_is('{"model":"m","prompt":"é"}'.encode("latin-1")))),
    _json("half a surrogate", b'{"model":"m","prompt":"\\ud800"}', (*_NO, _as_is(b'{"model":"m","prompt":"\\ud800"}'))),
    Case("json: charset UTF-8", "9110 8.3.2", (get("Content-Type: application/json; charset=UTF-8", f"Content-Length: {len(BODY)}", method="POST", target=PATH) + BODY,), (served(POSTED),)),
    Case("json: charset Latin-1", "9110 8.3.2", (get("Content-Type: application/json; charset=iso-8859-1", f"Content-Length: {len(BODY)}", method="POST", target=PATH) + BODY,), (served(POSTED), refused(400, 415, closes=None))),
    Case("json: no content type", "9110 8.3", (get(f"Content-Length: {len(BODY)}", method="POST", target=PATH) + BODY,), (served(POSTED), refused(400, 415, closes=None))),
    Case("json: a form's content type", "9110 8.3", (get("Content-Type: application/x-www-form-urlencoded", f"Content-Length: {len(BODY)}", method="POST", target=PATH) + BODY,), (served(POSTED), refused(400, 415, closes=None))),
    Case("json: chunked goes on byte for byte", "9112 7.1", (chunked(chunk(_SPACED[:9]) + chunk(_SPACED[9:]) + LAST),), (_as_is(_SPACED),)),
    _coded("identity", "identity", (served(POSTED),)),
    _coded("gzip", "gzip"),
    _coded("x-gzip", "x-gzip"),
    _coded("deflate", "deflate"),
    _coded("br", "br"),
    _coded("zstd", "zstd"),
    _coded("unknown", "cow"),
    _coded("in upper case", "GZIP"),
    _coded("a list", "identity, gzip"),
    _coded("twice", "gzip, gzip"),
    _coded("chunked is none", "chunked"),
    _coded("empty", "", (served(POSTED), refused(415))),
    Case("coded: a gzip bomb stays packed", "9110 8.4", (post("Content-Encoding: gzip", body=b"\x1f\x8b\x08" + b"\0" * 3000),), (refused(415),)),
    Case("coded: gzip without saying so", "9110 8.4", (post(body=b"\x1f\x8b\x08" + b"\0" * 3000),), _NO),
    Case("form: without a boundary", "7578 4.1", (get("Content-Type: multipart/form-data", "Content-Length: 4", method="POST", target="/v1/audio/transcriptions") + b"xxxx",), _NO),
    Case("form: JSON where a form is wanted", "7578 4.1", (post(target="/v1/audio/transcriptions"),), (refused(400, 415, closes=None),)),
)  # fmt: skip
