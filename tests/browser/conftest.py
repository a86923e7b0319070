"""A headless Chromium, and what a page did in it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Request, sync_playwright

COMMANDS = ("chromium", "chromium-browser", "google-chrome")
# Longest wait for an element. Pages poll every 2 s.
SOON_MS: Final = 20_000
# The verdict once the page shows data, or says that the daemon does not answer.
ANSWERED: Final = '#verdict[data-level]:not([data-level="asking"])'
# Also what the page's Content-Security-Policy refused without a message on the console.
NOTE_VIOLATIONS: Final = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`);
});
"""


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
            self.page.wait_for_timeout(50)
        return value

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


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        command = next(filter(None, map(shutil.which, COMMANDS)), playwright.chromium.executable_path)
        assert Path(command).exists(), (
            f"no browser: install one of {', '.join(COMMANDS)} (on Debian scripts/test browser does), "
            "or run: .venv/bin/playwright install chromium"
        )
        # Chromium's sandbox needs user namespaces, which root in a container lacks; the pages are our own.
        sandbox = [] if os.geteuid() else ["--no-sandbox"]
        running = playwright.chromium.launch(executable_path=command, args=sandbox)
        yield running
        running.close()


@pytest.fixture
def visit(browser: Browser) -> Callable[..., Any]:
    @contextmanager
    def opened(file: Path, **context: Any) -> Iterator[Visit]:
        with browser.new_context(**context) as own:
            visiting = Visit(own.new_page())
            visiting.page.goto(file.as_uri())
            yield visiting

    return opened


Open = Callable[..., AbstractContextManager[Visit]]


@pytest.fixture(scope="session")
def open_page(browser: Browser) -> Open:
    """open_page(link, **context): a page that shows data."""

    @contextmanager
    def opened(link: str, *, usable: bool = True, **context: Any) -> Iterator[Visit]:
        own: BrowserContext
        with browser.new_context(**context) as own:
            own.set_default_timeout(SOON_MS)
            own.add_init_script(NOTE_VIOLATIONS)
            visiting = Visit(own.new_page())
            visiting.page.goto(link)
            if usable:
                visiting.page.wait_for_selector(ANSWERED)
            yield visiting

    return opened
