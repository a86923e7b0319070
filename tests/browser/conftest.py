"""A headless Chromium, and what a page did in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.sync_api import Browser, BrowserContext, sync_playwright
from support.visits import ANSWERED, SOON_MS, Open, Visit

# Debian's shell first: it opens no window of a browser for a page, whose own pages take more CPU time than ours.
COMMANDS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# The suggestions of an address bar, which no test sees: their two pages take more CPU time than the page of a new window.
# Nor is a renderer kept in reserve for the next page.
# Of several such options Chromium reads the last, so that this is Playwright's list, too (chromiumSwitches.ts, 1.65.2).
WITHOUT: Final = (
    "WebUIOmniboxPopup", "WebUIOmniboxAimPopup", "SpareRendererForSitePerProcess",
    "AvoidUnnecessaryBeforeUnloadCheckSync", "DestroyProfileOnBrowserClose", "HttpsUpgrades",
    "HttpsFirstBalancedModeAutoEnable", "LensOverlay", "MediaRouter", "PaintHolding", "ThirdPartyStoragePartitioning",
    "AvoidCorsURLLoaderRestartOnRedirect", "OptimizationHints", "NetworkTimeServiceQuerying", "AimEnabled",
    "PreconnectToSearch",
)  # fmt: skip
# Also what the page's Content-Security-Policy refused without a message on the console.
NOTE_VIOLATIONS: Final = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`);
});
"""


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
        running = playwright.chromium.launch(
            executable_path=command, args=[*sandbox, f"--disable-features={','.join(WITHOUT)}"]
        )
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
