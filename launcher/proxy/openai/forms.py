"""The field `model` of a multipart form (RFC 7578), read strictly while the form's bytes arrive, and whether it asks for
a stream.

The models that an API key allows must be checked against what the instance's own parser reads, and parsers disagree on
unusual forms. So only forms as clients send them are accepted: each part has one Content-Disposition with `name` and
perhaps `filename`, no parameter is hidden in another one's quotation marks, nothing precedes the first boundary or
follows the last. vLLM 0.32 reads forms with Starlette and python-multipart; their limits apply here, too.
"""

from __future__ import annotations

import re
from typing import Final

from launcher.base.api_errors import HttpError
from launcher.proxy.http1.fields import TOKEN, VALUE
from launcher.proxy.openai.body_schema import RequestBody

MAX_PARTS = 1000  # Starlette's own limit on fields (formparsers.MultiPartParser, 1.10)
MAX_MODEL_BYTES = 4096
_MAX_FLAG_BYTES = 16
_MODEL: Final = b"model"
_STREAM: Final = b"stream"
_USAGE: Final = b"stream_include_usage"
_FLAGS: Final = frozenset({_STREAM, _USAGE})
_TRUE: Final = frozenset({b"1", b"on", b"t", b"true", b"y", b"yes"})  # as pydantic reads a form's text
# As a JSON body would say it.
_ASKS_USAGE: Final = b'{"include_usage":true}'
_ASKS_NO_USAGE: Final = b'{"include_usage":false}'
_MAX_HEAD_BYTES = 4096  # of one part; python-multipart 0.0.34 takes 8 lines of 4,224 bytes
_MAX_HEAD_LINES = 8

_TOKEN = TOKEN + rb"+"
# No backslash: parsers disagree on whether it is an escape.
_QUOTED = rb'"[^"\\\x00-\x08\x0a-\x1f\x7f]*"'
_PARAMETER = rb"[ \t]*;[ \t]*(%s)=(%s|%s)" % (_TOKEN, _QUOTED, _TOKEN)
_PARAMETERS = re.compile(_PARAMETER)
_DISPOSITION = re.compile(rb"form-data((?:%s)+)" % _PARAMETER, re.IGNORECASE)
_LINE = re.compile(rb"(%s):[ \t]*(%s*?)[ \t]*" % (_TOKEN, VALUE))
_HIDDEN = re.compile(rb";\s*(?:file)?name\*?\s*=", re.IGNORECASE)  # for parsers that ignore quotation marks
_PLAIN_ENCODINGS = frozenset({b"binary", b"8bit", b"7bit"})
_CHARSET = re.compile(rb"charset\s*=\s*\"?([^\s;\"]*)", re.IGNORECASE)
_UTF8 = frozenset({b"utf-8", b"utf8"})

_CONTENT_TYPE = re.compile(
    r'multipart/form-data((?:[ \t]*;[ \t]*[!#$%&\'+.^_`|~0-9A-Za-z-]+=(?:"[^"\\;]*"|[^\s;",\\]+))*)[ \t]*;?[ \t]*',
    re.IGNORECASE,
)
_TYPE_PARAMETERS = re.compile(r';[ \t]*([^=\s;]+)=(?:"([^"]*)"|([^\s;",]*))')
_BOUNDARY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,68}[\x21-\x7e])?")  # RFC 2046 5.1.1


class FormReader:
    """Reads one form: `feed` it the body as it grows, then `finish`. Both raise HttpError."""

    def __init__(self, content_type: str) -> None:
        self._mark = b"\r\n--" + _boundary(content_type)
        self._at = 0  # everything before it has been read
        # Of the current part: where its data begins, and its name if that is one of the fields looked for.
        self._data: int | None = None
        self._name = b""
        self._parts = 0
        self._ended = False
        self._model: bytes | None = None
        self._flags: dict[bytes, bool] = {}  # the last one counts, as for Starlette

    def feed(self, body: bytes | bytearray) -> bool:
        """Read what is new; `body` is all that has arrived. Always True: a call takes 10 ms at most."""
        if not self._at and len(body) >= len(self._mark) - 2:
            if not body.startswith(self._mark[2:]):
                raise _refused("it does not begin with its boundary")
            self._at = len(self._mark) - 2
        while self._at and not self._ended:
            if not (self._head(body) if self._data is None else self._end_of_part(body, self._data)):
                break
        return True

    def finish(self, body: bytes | bytearray) -> RequestBody:
        self.feed(body)
        if not self._ended:
            raise _refused("its last boundary is missing")
        if bytes(body[self._at : self._at + 3]) not in {b"", b"\r\n"}:
            raise _refused("something follows its last boundary")
        try:
            model = None if self._model is None else self._model.decode() or None
        except UnicodeDecodeError:
            raise _refused("the field `model` is not UTF-8") from None
        usage = self._flags.get(_USAGE)
        options = b"" if usage is None else _ASKS_USAGE if usage else _ASKS_NO_USAGE
        return RequestBody(model, stream=self._flags.get(_STREAM, False), stream_options=options)

    def _head(self, body: bytes | bytearray) -> bool:
        """Read the line end after a boundary and a part's header. False: incomplete."""
        at = self._at
        after = bytes(body[at : at + 2])
        if len(after) < 2:
            return False
        if after == b"--":
            self._ended, self._at = True, at + 2
            return True
        if after != b"\r\n":
            raise _refused("its boundary is followed by other characters")
        end = body.find(b"\r\n\r\n", at + 2, at + 6 + _MAX_HEAD_BYTES)
        if end < 0:
            if len(body) - at > _MAX_HEAD_BYTES:
                raise _refused("a part's header has no end")
            return False
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _refused(f"it has more than {MAX_PARTS} parts")
        self._name = _field_of(bytes(body[at + 2 : end]))
        if self._name == _MODEL and self._model is not None:
            raise _refused("it has more than one field `model`")
        self._data = end + 4
        self._at = end + 4
        return True

    def _end_of_part(self, body: bytes | bytearray, data: int) -> bool:
        end = body.find(self._mark, self._at)
        long = (len(body) if end < 0 else end) - data > MAX_MODEL_BYTES + len(self._mark)
        if self._name == _MODEL and long:
            raise _refused("the field `model` is too long")
        if end < 0:
            self._at = max(data, len(body) - len(self._mark) + 1)
            return False
        if self._name == _MODEL:
            self._model = bytes(body[data:end])
        elif self._name:
            text = bytes(body[data : min(end, data + _MAX_FLAG_BYTES)])
            self._flags[self._name] = text.lower() in _TRUE
        self._data = None
        self._at = end + len(self._mark)
        return True


def _boundary(content_type: str) -> bytes:
    matched = _CONTENT_TYPE.fullmatch(content_type.strip(" \t"))
    parameters = [] if matched is None else _TYPE_PARAMETERS.findall(matched[1])
    found: list[tuple[str, str]] = [(name.lower(), quoted or plain) for name, quoted, plain in parameters]
    boundaries = [value for name, value in found if name == "boundary"]
    if len(boundaries) != 1 or not _BOUNDARY.fullmatch(boundaries[0]):
        raise _refused("Content-Type must be multipart/form-data with one boundary")
    if any(name == "charset" and value.lower().encode() not in _UTF8 for name, value in found):
        raise _refused("its charset must be utf-8")
    return boundaries[0].encode("ascii")


def _field_of(head: bytes) -> bytes:
    """The name of a part that is one of the fields looked for, else b""."""
    lines = head.split(b"\r\n")
    if len(lines) > _MAX_HEAD_LINES:
        raise _refused("a part has too many header lines")
    fields: dict[bytes, bytes] = {}
    for line in lines:
        matched = _LINE.fullmatch(line)
        if matched is None or matched[1].lower() in fields:
            raise _refused("a part's header is not a list of different fields")
        fields[matched[1].lower()] = matched[2]
    named = _disposition(fields.get(b"content-disposition", b""))
    name = named[b"name"]
    if name in _FLAGS and len(named) == 1:
        return name
    if name.strip().lower() != _MODEL:
        return b""
    if name != _MODEL or len(named) > 1:
        raise _refused("the field `model` must be a plain field of this name")
    charset = _CHARSET.search(fields.get(b"content-type", b""))
    encoding = fields.get(b"content-transfer-encoding", b"binary").lower()
    if encoding not in _PLAIN_ENCODINGS or (charset is not None and charset[1].lower() not in _UTF8):
        raise _refused("the field `model` must be plain UTF-8")
    return name


def _disposition(value: bytes) -> dict[bytes, bytes]:
    """The parameters of a Content-Disposition. Raises HttpError unless all parsers read the same."""
    matched = _DISPOSITION.fullmatch(value)
    if matched is None:
        raise _refused("a part's Content-Disposition is not form-data with a name")
    found: dict[bytes, bytes] = {}
    for key, text in _PARAMETERS.findall(matched[1]):
        lowered = key.lower()
        if lowered in found or lowered not in {b"name", b"filename", b"filename*"} or _HIDDEN.search(text):
            raise _refused("a part's Content-Disposition has other parameters than one name and one filename")
        found[lowered] = text[1:-1] if text[:1] == b'"' else text
    if b"name" not in found:
        raise _refused("a part has no name")
    return found


def _refused(why: str) -> HttpError:
    return HttpError(400, f"cannot read the form: {why}", code="invalid_form")
