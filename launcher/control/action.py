"""A change that a peer of the control socket asked for, as the audit trail records it."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.control.peers import Peer


@dataclass(frozen=True, slots=True)
class ControlAction:
    """Texts are those of the peer, masked, and of any length."""

    verb: str
    arguments: str  # path and query of the request
    slot: str
    peer: Peer
    status: int
    reason: str = ""  # why it was refused

    @property
    def result(self) -> str:
        return "refused" if self.status >= 400 else "done"


def unrecorded(_action: ControlAction) -> None:
    """Nobody keeps it."""
