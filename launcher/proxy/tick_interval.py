"""How often the proxy's clock looks for what is due. Pure."""

from __future__ import annotations

from typing import Final

from launcher.config.schema import Proxy

TICK_MAX_S: Final = 0.25  # deadlines are held this exactly; shorter where one that is set is short
TICK_MIN_S: Final = 0.01


def tick_interval_s(proxy: Proxy) -> float:
    """A quarter of the shortest deadline, within the bounds."""
    shortest = min(
        proxy.header_timeout_s,
        proxy.body_timeout_s,
        proxy.idle_timeout_s,
        proxy.first_token_timeout_s,
        proxy.answer_timeout_s,
        proxy.queue_timeout_s,
        proxy.park_timeout_s,
        proxy.keepalive_comment_s,
        proxy.hung_timeout_s,
        proxy.client_stall_timeout_s,
        proxy.client_grace_s,
        proxy.client_keepalive_s,
    )
    return max(TICK_MIN_S, min(TICK_MAX_S, shortest / 4))
