"""Path and query parameters of a request, checked."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from launcher.errors import LauncherError
from launcher.printable import quoted

MAX_TAIL_LINES: Final = 100_000
HISTORY_SPANS: Final = ("1h", "1d", "90d")
MAX_DEADLINE_S: Final = 86_400.0
# Characters of an X-Request-Id that the proxy takes, and of the longest prefix that an engine puts before it.
MAX_REQUEST_ID: Final = 128 + 16
# Characters of a value that an error quotes.
MAX_SHOWN: Final = 80


def command_of(request: web.Request) -> str:
    return request.path.rpartition("/")[2]


def slot_of(request: web.Request) -> int:
    text = request.match_info["slot"]
    if not (text.isascii() and text.isdecimal()) or len(text) > 6:
        raise LauncherError(
            f"cannot use slot '{quoted(text, MAX_SHOWN)}': not a number",
            "give a slot number from `numa-launcher status`",
        )
    return int(text)


def request_id_of(request: web.Request) -> str:
    text = request.match_info["request"]
    if len(text) > MAX_REQUEST_ID:
        raise LauncherError(
            f"cannot use request id '{quoted(text, MAX_SHOWN)}': more than {MAX_REQUEST_ID} characters",
            "give the X-Request-Id of a response",
        )
    return text


def number(request: web.Request, name: str, default: str, digits: int = 6) -> int:
    text = request.query.get(name, default)
    if (
        not (text.isascii() and text.isdecimal())
        or len(text) > digits
        or (digits == 6 and int(text) > MAX_TAIL_LINES)
    ):
        raise LauncherError(
            f"cannot show '{quoted(text, MAX_SHOWN)}' lines: not a number up to {MAX_TAIL_LINES}",
            f"give {name}={default}",
        )
    return int(text)


def span_of(request: web.Request) -> str:
    text = request.query.get("span", HISTORY_SPANS[0])
    if text not in HISTORY_SPANS:
        raise LauncherError(
            f"cannot show the history of '{quoted(text, MAX_SHOWN)}': no such span",
            f"spans are {', '.join(HISTORY_SPANS)}",
        )
    return text


def slots_of(request: web.Request) -> str:
    text = request.query.get("slots", "all")
    if text not in {"all", "none"} and (not (text.isascii() and text.isdecimal()) or len(text) > 6):
        raise LauncherError(
            f"cannot show the history of slots '{quoted(text, MAX_SHOWN)}'",
            "give slots=all, slots=none or the number of one slot",
        )
    return text if text in {"all", "none"} else str(int(text))


def flag(request: web.Request, name: str) -> bool:
    """A switch in the query. Raises LauncherError: what is meant to be one must not be taken for none."""
    text = request.query.get(name, "0")
    if text not in {"0", "1", "false", "true"}:
        raise LauncherError(
            f"cannot use {name}='{quoted(text, MAX_SHOWN)}': it is a switch", f"give {name}=1, or omit it"
        )
    return text in {"1", "true"}


def follows(request: web.Request) -> bool:
    return request.method == "GET" and flag(request, "follow")


def deadline(request: web.Request) -> float | None:
    text = request.query.get("deadline")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_DEADLINE_S:  # nan is neither
        raise LauncherError(
            f"cannot drain with deadline '{quoted(text, MAX_SHOWN)}': not seconds from 0 to {MAX_DEADLINE_S:.0f}",
            "give deadline=30",
        )
    return seconds
