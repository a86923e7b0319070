"""Visits of the dashboard by a real browser."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

from playwright.sync_api import Page, Request

# Longest wait for an element. Pages poll every 2 s.
SOON_MS: Final = 60_000
# Between two looks at a page.
PAUSE_MS: Final = 200
MOVING: Final = "document.getAnimations().some(each => each.playState === 'running')"
# The verdict once the page shows data, or says that the daemon does not answer.
ANSWERED: Final = '#verdict[data-level]:not([data-level="asking"])'


class Visit:
    """An open page, its console errors, and the requests it made."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on(
            "console", lambda message: self.errors.append(message.text) if message.type == "error" else None
        )
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._requested)

    def _requested(self, request: Request) -> None:
        self.requests.append(request.url)

    def foreign_requests(self, origin: str = "") -> list[str]:
        """All but the page itself, data it carries, and its own origin's."""
        own = [self.page.url, *([f"{origin}/"] if origin else [])]
        return [url for url in self.requests if not url.startswith(("data:", *own))]

    def soon(self, check: Callable[[], Any], what: str = "", within_s: float = SOON_MS / 1000) -> Any:
        """The first true value of `check`; the page goes on meanwhile."""
        deadline = time.monotonic() + within_s
        while not (value := check()):
            assert time.monotonic() < deadline, (
                f"not within {within_s:g} s: {what}; the page: {self.page.inner_text('main')}"
            )
            self.page.wait_for_timeout(PAUSE_MS)
        return value

    def resize(self, window: Mapping[str, Any]) -> None:
        """Gives the open page another `viewport` and `color_scheme`. Its scale stays: that is the context's."""
        self.page.set_viewport_size(window["viewport"])
        self.page.emulate_media(color_scheme=window["color_scheme"])
        self.soon(lambda: not self.page.evaluate(MOVING), "that no colour is on its way")

    def overflow(self) -> list[int]:
        """Width of the content and of the window, in CSS px."""
        widths: list[int] = self.page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        return widths

    def faults(self, origin: str) -> dict[str, list[str]]:
        """What no page may do: errors on the console, violations of its policy, requests to anyone else."""
        return {
            "console": self.errors,
            "violations": self.page.evaluate("window.violations"),
            "foreign requests": self.foreign_requests(origin),
        }


Open = Callable[..., AbstractContextManager[Visit]]
