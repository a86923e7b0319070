"""The field `model` of a multipart form (RFC 7578), read while the form's bytes arrive, and whether it asks for a stream.

The models that an API key allows must be checked against what the instance's own parser reads. vLLM 0.32 reads forms with
Starlette 1.10 and python-multipart 0.0.34; other engines have parsers of their own. So a part is refused only where its
header, its value or its end can be read as a field `model` in two ways, or not at all by vLLM. The rest of a form is the
library's own style: charsets and transfer codings of other parts, escaped or quoted names, paths, sizes, dates, a line end
before the first boundary, an epilogue after the last (RFC 2046 5.1.1).
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from launcher.base.api_errors import HttpError
from launcher.base.text import quoted
from launcher.proxy.http1.fields import TOKEN
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
# Of one part: python-multipart's own limits (DEFAULT_MAX_HEADER_COUNT, DEFAULT_MAX_HEADER_SIZE).
_MAX_HEAD_LINES = 8
_MAX_LINE_BYTES = 4224
_MAX_HEAD_BYTES = _MAX_HEAD_LINES * (_MAX_LINE_BYTES + 2)
_MAX_PARAMETERS = 16  # of a Content-Disposition: 4 KiB of them take 6 ms
_BLANKS = b" \t"
_SHOWN = 60  # characters of a name in a message

_NAME = re.compile(TOKEN + rb"+")
_ODD = re.compile(rb"[\x00\r\n]")  # some parsers end the line, or the value, there
_PLAIN_MODEL = re.compile(
    rb'form-data[ \t]*(?:;.*)?;[ \t]*name=(?:"model"|model)[ \t]*(?:;.*)?', re.IGNORECASE | re.DOTALL
)
# A parameter that some parser reads as `name=model`: one that ignores quotation marks, unescapes, decodes percent signs
# (RFC 8187) or joins parts of a value (RFC 2231). Runs are possessive, so that a long header takes linear time.
_SPELLED = rb"\\*+".join(b"(?:%c|%%%02x|%%%02x)" % (char, char, char - 32) for char in _MODEL)
_MAY_BE_MODEL = re.compile(
    rb";[ \t]*+name(?:\*[0-9]|\*?+[ \t]*+=[\"'\\ \t]*+(?:[\w!#$%%&+^`{}~-]++'[\w-]*+')?[\"'\\ \t]*+%s"
    rb"[\"'\\ \t]*(?:[;\"']|\Z))" % _SPELLED,
    re.IGNORECASE,
)
_CHARSET = re.compile(rb"charset\s*=\s*[\"']?([^\s;\"']*)", re.IGNORECASE)
_UTF8 = frozenset({"utf-8", "utf8"})
_LATIN1 = frozenset({"iso-8859-1", "latin-1", "latin1"})
# In which ASCII text has other bytes. An unknown charset counts as one of the many that contain ASCII.
_NOT_ASCII = re.compile(
    r"utf-?_?(?:16|32|7)|ucs|iso-10646|unicode|ebcdic|(?:ibm|cp)-?0|(?:ibm|cp)-?(?:500|102|114)"
)
_ENCODED = frozenset({b"base64", b"uuencode", b"x-uuencode", b"x-uue", b"uue"})

_CONTENT_TYPE = re.compile(
    r'multipart/form-data((?:[ \t]*;[ \t]*[!#$%&\'*+.^_`|~0-9A-Za-z-]+=(?:"[^"\\;]*"|[^\s;",\\]+))*)[ \t]*;?[ \t]*',
    re.IGNORECASE,
)
_TYPE_PARAMETERS = re.compile(r';[ \t]*([^=\s;]+)=(?:"([^"]*)"|([^\s;",]*))')
_BOUNDARY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,68}[\x21-\x7e])?")  # RFC 2046 5.1.1


class _Part(NamedTuple):
    """The fields of a part's header."""

    shown: str  # for a message
    name: bytes = b""  # if it is one of the fields looked for
    charset: str = ""
    encoding: bytes = b""  # Content-Transfer-Encoding


class FormReader:
    """Reads one form: `feed` it the body as it grows, then `finish`. Both raise HttpError."""

    def __init__(self, content_type: str) -> None:
        boundary, self._charset = _type(content_type)
        self._mark = b"\r\n--" + boundary
        self._at = 0  # everything before it has been read
        self._begun = False  # the first boundary has been read
        # The current part, and where its data begins; None: a header comes next.
        self._part = _Part("")
        self._data: int | None = None
        self._parts = 0
        self._padded = False  # white space follows the latest boundary
        self._ended = False
        self._model: str | None = None
        self._flags: dict[bytes, bool] = {}  # the last one counts, as for Starlette

    def feed(self, body: bytes | bytearray) -> bool:
        """Read what is new; `body` is all that has arrived. Always True: a call takes 10 ms at most."""
        if not self._begun:
            self._preamble(body)
        while self._begun and not self._ended:
            if not (self._head(body) if self._data is None else self._end_of_part(body, self._data)):
                break
        if self._ended:
            self._epilogue(body)
        return True

    def finish(self, body: bytes | bytearray) -> RequestBody:
        self.feed(body)
        if not self._begun:
            raise _refused(f"its boundary {_shown(self._mark[2:])} is nowhere in it")
        if not self._ended:
            raise _refused(
                f"its last boundary {_shown(self._mark[2:] + b'--')} is missing: it may be cut off"
            )
        usage = self._flags.get(_USAGE)
        options = b"" if usage is None else _ASKS_USAGE if usage else _ASKS_NO_USAGE
        return RequestBody(
            self._model or None, stream=self._flags.get(_STREAM, False), stream_options=options
        )

    def _preamble(self, body: bytes | bytearray) -> None:
        """Find the first boundary, which begins a line."""
        first = self._mark[2:]
        at = body.find(first, self._at)
        if at < 0:
            self._at = max(0, len(body) - len(first) + 1)
            return
        if at and body[at - 1 : at] != b"\n":
            raise _refused(f"its first boundary does not begin a line (byte {at})")
        self._begun, self._at = True, at + len(first)

    def _epilogue(self, body: bytes | bytearray) -> None:
        """Some parsers read on at another boundary."""
        first = self._mark[2:]
        at = body.find(first, self._at)
        if at >= 0:
            raise _refused(f"a boundary follows the last one (byte {at})")
        self._at = max(self._at, len(body) - len(first) + 1)

    def _line_end(self, body: bytes | bytearray) -> int:
        """Index of the end of a boundary's line; -1: that has not come, or it is the last boundary."""
        at = self._at
        if body[at : at + 2] == b"--":
            self._ended, self._at = True, at + 2
            return -1
        while at < len(body) and body[at] in _BLANKS and at - self._at <= _MAX_LINE_BYTES:
            at += 1
        if len(body) - at < 2:
            return -1
        if body[at : at + 2] != b"\r\n":
            raise _refused(f"0x{body[at]:02x} (byte {at}) follows the boundary in place of a line end")
        self._padded = at > self._at
        return at

    def _head(self, body: bytes | bytearray) -> bool:
        """Read the end of a boundary's line, and a part's header. False: incomplete, or the form has ended."""
        at = self._line_end(body)
        if at < 0:
            return False
        end = body.find(b"\r\n\r\n", at, at + 6 + _MAX_HEAD_BYTES)
        if end < 0:
            if len(body) - at > _MAX_HEAD_BYTES:
                raise _refused(f"the header of part {self._parts + 1} is longer than {_MAX_HEAD_BYTES} bytes")
            return False
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _refused(f"it has more than {MAX_PARTS} parts")
        self._part = part = _read_head(bytes(body[at + 2 : end]), self._parts)
        if part.name == _MODEL:
            if self._model is not None:
                raise _refused(f"{part.shown} is another field `model`")
            self._refuse_padding()
        self._data = self._at = end + 4
        return True

    def _end_of_part(self, body: bytes | bytearray, data: int) -> bool:
        end = body.find(self._mark, self._at)
        name = self._part.name
        if name == _MODEL and (len(body) if end < 0 else end) - data > MAX_MODEL_BYTES + len(self._mark):
            raise _refused(f"the field `model` is longer than {MAX_MODEL_BYTES} bytes")
        if end < 0:
            self._at = max(data, len(body) - len(self._mark) + 1)
            return False
        self._at = end + len(self._mark)
        if name == _MODEL:
            self._model = _text(bytes(body[data:end]), self._part, self._charset)
            self._padded = bytes(body[self._at : self._at + 1]) in {b" ", b"\t"}
            self._refuse_padding()
        elif name:
            text = bytes(body[data : min(end, data + _MAX_FLAG_BYTES)])
            self._flags[name] = text.lower() in _TRUE
        self._data = None
        return True

    def _refuse_padding(self) -> None:
        """Parsers that do not know it (RFC 2046 5.1.1, transport-padding) read two parts as one."""
        if self._padded:
            raise _refused("white space follows the boundary before or after the field `model`")


def boundary_of(content_type: str) -> bytes:
    """The boundary that a form's Content-Type names. Raises HttpError."""
    return _type(content_type)[0]


def _type(content_type: str) -> tuple[bytes, str]:
    """`(boundary, charset)` of a form's Content-Type; the charset in lower case, "" where it names none."""
    matched = _CONTENT_TYPE.fullmatch(content_type.strip(" \t"))
    parameters = [] if matched is None else _TYPE_PARAMETERS.findall(matched[1])
    found: list[tuple[str, str]] = [(name.lower(), whole or plain) for name, whole, plain in parameters]
    boundaries = [value for name, value in found if name.rstrip("*") == "boundary"]
    if (
        len(boundaries) != 1
        or ("boundary", boundaries[0]) not in found
        or not _BOUNDARY.fullmatch(boundaries[0])
    ):
        given = f"not {quoted(content_type)!r}" if content_type else "it is missing"
        raise _refused(f"Content-Type must be multipart/form-data with one boundary, {given}")
    charsets = [value.lower() for name, value in found if name == "charset"]
    for charset in charsets:
        if _NOT_ASCII.match(charset):
            raise _refused(f"its charset must contain ASCII, as UTF-8 does, not {quoted(charset, _SHOWN)!r}")
    return boundaries[0].encode("ascii"), charsets[-1] if charsets else ""


def _read_head(head: bytes, number: int) -> _Part:
    """Read a part's header. Raises HttpError unless all parsers agree whether it is the field `model`."""
    shown = f"part {number}"
    fields = [_field(line, shown) for line in head.split(b"\r\n")] if head else []
    if len(fields) > _MAX_HEAD_LINES:
        raise _refused(f"{shown} has more than {_MAX_HEAD_LINES} header lines")
    dispositions = [value for name, value in fields if name == b"content-disposition"]
    if not dispositions:
        raise _refused(f"{shown} has no header Content-Disposition")
    named = _parameters(dispositions[-1], shown)
    name = named.get(b"name")
    if name is None:
        raise _refused(f"the Content-Disposition of {shown} has no parameter `name`")
    shown = f"{shown} ({_shown(name)})"
    similar = sum(len(_MAY_BE_MODEL.findall(value)) for value in dispositions)
    if name != _MODEL and not similar:
        return _Part(shown, name if name in _FLAGS and b"filename" not in named else b"")
    if name != _MODEL or similar > 1 or len(dispositions) > 1 or not _PLAIN_MODEL.fullmatch(dispositions[0]):
        raise _refused(
            f'the Content-Disposition of {shown} can be read as a field `model`, which must be form-data; name="model"'
        )
    if b"filename" in dispositions[0].lower():
        raise _refused(f"the Content-Disposition of {shown} has a file name: the field `model` must be text")
    others = dict(fields)
    charset = _CHARSET.search(others.get(b"content-type", b""))
    return _Part(
        shown,
        name,
        "" if charset is None else charset[1].decode("ascii", "replace").lower(),
        others.get(b"content-transfer-encoding", b"").strip().lower(),
    )


def _field(line: bytes, shown: str) -> tuple[bytes, bytes]:
    """A header line's name in lower case, and its value."""
    name, colon, value = line.partition(b":")
    if line[:1] in {b" ", b"\t"}:
        raise _refused(f"the header of {shown} has a folded line, which vLLM does not read")
    if not colon or not _NAME.fullmatch(name):
        raise _refused(f"the header of {shown} has a line that is no field: {_shown(line)}")
    if len(line) > _MAX_LINE_BYTES:
        raise _refused(f"the header {_shown(name)} of {shown} is longer than {_MAX_LINE_BYTES} bytes")
    odd = _ODD.search(value)
    if odd is not None:
        raise _refused(f"the header {_shown(name)} of {shown} has the control character 0x{odd[0][0]:02x}")
    return name.lower(), value.strip(b" \t")


def _parameters(value: bytes, shown: str) -> dict[bytes, bytes]:
    """The parameters of a Content-Disposition, as vLLM reads them (python_multipart.multipart.parse_options_header)."""
    found: dict[bytes, bytes] = {}
    start = value.find(b";")
    for _ in range(_MAX_PARAMETERS):
        if start < 0:
            return found
        start += 1
        end, counted, marks = value.find(b";", start), start, 0
        while end >= 0:
            marks += value.count(b'"', counted, end) - value.count(b'\\"', counted, end)
            if marks % 2 == 0:
                break
            counted, end = end, value.find(b";", end + 1)
        stop = len(value) if end < 0 else end
        key, _, text = value[start:stop].partition(b"=")
        key, text, start = key.strip(b" \t").lower(), text.strip(b" \t"), end
        if len(text) > 1 and text[:1] == text[-1:] == b'"':
            text = text[1:-1].replace(b"\\\\", b"\\").replace(b'\\"', b'"')
        if b"*" not in key:
            found[key] = text
    if start < 0:
        return found
    raise _refused(f"the Content-Disposition of {shown} has more than {_MAX_PARAMETERS} parameters")


def _text(value: bytes, part: _Part, form_charset: str) -> str:
    """The model's name. Raises HttpError where it depends on who decodes it."""
    charsets = {name for name in (part.charset, form_charset) if name}
    if _NOT_ASCII.match(part.charset):
        raise _refused(
            f"the field `model` must be ASCII or UTF-8, but its charset is {quoted(part.charset, _SHOWN)!r}"
        )
    if part.encoding in _ENCODED or (part.encoding == b"quoted-printable" and b"=" in value):
        raise _refused(
            f"the field `model` must be plain text, but its Content-Transfer-Encoding is {_shown(part.encoding)}"
        )
    if value.isascii():
        return value.decode("ascii")
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        if charsets and charsets <= _LATIN1:
            return value.decode("latin-1")  # as Starlette does with what is no UTF-8
        raise _refused(f"the field `model` is not UTF-8: byte 0x{value[error.start]:02x}") from None
    if not charsets <= _UTF8:
        other = ", ".join(sorted(charsets - _UTF8))
        raise _refused(f"the field `model` is UTF-8, but its charset is {quoted(other, _SHOWN)!r}")
    return text


def _shown(data: bytes) -> str:
    return repr(quoted(data.decode("utf-8", "backslashreplace"), _SHOWN))


def _refused(why: str) -> HttpError:
    return HttpError(400, f"cannot read the form: {why}", code="invalid_form")
