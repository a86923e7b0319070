"""A headless Chromium, and what a page did in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

COMMANDS = ("chromium", "chromium-browser", "google-chrome")


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
        page.on("request", lambda request: self.requests.append(request.url))

    def foreign_requests(self) -> list[str]:
        """All but the page itself and data it carries."""
        return [url for url in self.requests if url != self.page.url and not url.startswith("data:")]

    def overflow(self) -> list[int]:
        """Width of the content and of the window, in CSS px."""
        widths: list[int] = self.page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        return widths


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
