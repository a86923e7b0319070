"""Rules of `[telemetry]` that the schema cannot express."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from launcher.config.telemetry_schema import Telemetry
from launcher.errors import LauncherError

_URL: Final = re.compile(r"https?://[^\s/?#@]+(?:/[^\s?#]*)?")


def check_telemetry(telemetry: Telemetry, origin_of: Callable[[str], str]) -> None:
    """Raises LauncherError."""
    endpoint, key = telemetry.otlp_endpoint, "telemetry.otlp_endpoint"
    if not endpoint:
        return
    try:
        url = urlsplit(endpoint)
        good = _URL.fullmatch(endpoint) is not None and bool(url.hostname) and url.port != 0
    except ValueError:
        good = False
    if not good:
        raise LauncherError(
            f"cannot use {origin_of(key)}: {key} = '{endpoint}' is not a base URL",
            'write "http://127.0.0.1:4318", the collector\'s address of OTLP over HTTP, without user, query and fragment',
        )
