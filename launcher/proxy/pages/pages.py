"""The proxy's own pages as functions of values. An error response is raised as HttpError."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec

from launcher.printable import quoted
from launcher.proxy.errors import HttpError, unavailable
from launcher.proxy.openai.answers import JSON
from launcher.proxy.pages.models import Entry

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


class Page(NamedTuple):
    """A response of the proxy's own, with status 200."""

    content_type: str
    body: bytes


def health(ready: int, *, stopping: bool, retry_after_s: int) -> Page:
    """GET /health: 200 while an instance is ready."""
    if not ready or stopping:
        raise unavailable("no instance is ready", retry_after_s)
    return _json({"status": "ok", "ready": ready})


def models(entries: Iterable[Entry], visible: Callable[[str], bool]) -> Page:
    """GET /v1/models: the models whose names are `visible` to the request's API key."""
    return _json({"object": "list", "data": [entry for entry in entries if visible(str(entry["id"]))]})


def model(
    entries: Iterable[Entry], wanted: str, visible: Callable[[str], bool], retry_after_s: Callable[[], int]
) -> Page:
    """GET /v1/models/ID: 503 for a configured model of which no instance was ready yet."""
    if not visible(wanted):
        raise HttpError(
            404,
            f"The model `{quoted(wanted)}` does not exist.",
            type_="NotFoundError",
            param="model",
            code="model_not_found",
        )
    for entry in entries:
        if entry["id"] == wanted:
            return _json(entry)
    raise unavailable(f"no instance of {quoted(wanted)} is ready", retry_after_s())


def metrics(own: str, merged: str) -> Page:
    """GET /metrics: the proxy's metrics, then those of the instances."""
    return Page(TEXT, (own + merged).encode())


def _json(value: object) -> Page:
    return Page(JSON, msgspec.json.encode(value))
