"""The table `[telemetry]` of the configuration."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from launcher.config.values import Section, doc

Share = Annotated[float, Meta(ge=0, le=1)]


class Telemetry(Section, frozen=True):
    """`[telemetry]`: history of the machine's load, and traces of requests."""

    history: Annotated[
        bool,
        doc(
            "Keep the history that the dashboard shows: 2 s for an hour, 60 s for a day, 10 minutes for 90 days. At most "
            "8 MB."
        ),
    ] = True
    history_path: Annotated[
        str | None, doc("File of the history. Default: history/history.bin in the state folder.")
    ] = None
    otlp_endpoint: Annotated[
        str,
        doc(
            "OpenTelemetry collector that gets traces of requests, as OTLP over HTTP, such as http://127.0.0.1:4318. "
            "Empty: no traces."
        ),
    ] = ""
    otlp_sampling: Annotated[
        Share, doc("Share of requests that are traced, if the client's `traceparent` does not decide it.")
    ] = 0.1
