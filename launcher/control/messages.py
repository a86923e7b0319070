"""The control protocol: verbs, paths and replies. HTTP + JSON over a UNIX socket.

Every reply is a JSON object; an error is ``{"error": {"message": "cannot X: why", "remedy": "..."}}``
with a 4xx status. Every verb is idempotent: asking twice changes nothing more. What `GET /v1/status`
answers is launcher.status.Status.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

PREFIX: Final = "/v1"


class Verb(StrEnum):
    """What an operator can ask of one slot: ``POST /v1/slots/SLOT/VERB``."""

    RESTART = "restart"
    DRAIN = "drain"
    RESUME = "resume"
    STOP = "stop"
    START = "start"
    HOLD = "hold"
    QUARANTINE = "quarantine"
    RELEASE = "release"


SUMMARY: Final[dict[Verb, str]] = {
    Verb.RESTART: "take a slot out of rotation, wait for its requests, stop and start it again",
    Verb.DRAIN: "take a slot out of rotation and keep its instance alive",
    Verb.RESUME: "put a drained slot back into rotation",
    Verb.STOP: "drain a slot, stop its instance and leave it stopped",
    Verb.START: "start a stopped or failed slot",
    Verb.HOLD: "drain a slot, stop its instance and keep it stopped until `release`",
    Verb.QUARANTINE: "take a slot out of rotation and keep its instance alive for a look, until `release`",
    Verb.RELEASE: "end a hold or a quarantine",
}

DISRUPTIVE: Final = frozenset({Verb.RESTART, Verb.DRAIN, Verb.STOP, Verb.HOLD, Verb.QUARANTINE})
"""Verbs that take an instance out of rotation: refused where too few would be left, unless forced."""


@dataclass(frozen=True, slots=True)
class Request:
    """One verb with its options: ``?force=1&deadline=30``."""

    verb: Verb
    force: bool = False
    """Also when fewer than `supervision.min_ready` instances would be left."""
    deadline_s: float | None = None
    """`drain` only: requests that are in flight after this time are ended."""
