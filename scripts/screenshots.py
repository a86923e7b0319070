"""scripts/screenshots: the dashboard of a planted machine (2 sockets, 512 CPUs) and of a planted fleet, each view in both
colour schemes and two widths, as PNG files of 256 colours or fewer."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from browser.conftest import COMMANDS  # noqa: E402  found beside this script
from browser.dashboard_process import DashboardProcess  # noqa: E402
from browser.planted import MISPLACED, REQUEST, PlantedMachine  # noqa: E402
from browser.planted_fleet import PlantedIngress, planted  # noqa: E402
from support.fake_operations import Backstage  # noqa: E402
from support.ledger_file import LedgerFile  # noqa: E402

VIEWS: Final = {
    "overview": "#/",
    "slot": f"#/slot/{MISPLACED}",
    "request": f"#/request/{REQUEST}",
    "usage": "#/usage",
}
FLEET_HOSTS: Final = 24
HEIGHT: Final = {1280: 900, 375: 812}
SCHEMES: Final = ("light", "dark")
# The whole hour follows the newest quarter of it after some seconds.
WHOLE_MS: Final = 9000
# The page polls every 2 s; the second frame has the load of each CPU.
SETTLED_MS: Final = 2500
COLOURS: Final = 128


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/screenshots", description=__doc__, allow_abbrev=False)
    folder = ROOT / "docs" / "dashboard"
    parser.add_argument(
        "folder", type=Path, nargs="?", default=folder, help="where to (default: docs/dashboard)"
    )
    parser.add_argument(
        "--only", choices=("machine", "fleet"), help="take these pictures only (default: all)"
    )
    return parser.parse_args()


@contextmanager
def dashboard() -> Iterator[str]:
    """A link to the dashboard of the planted machine, with a ledger of today."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        now = time.time()
        ledger = LedgerFile(folder / "usage" / "ledger.db", began=now - 90 * 86_400)
        machine = PlantedMachine(ledger=ledger.path, now=now)
        machine.serve_today(ledger)
        with Backstage(str(folder / "c.sock"), machine) as stage:
            process = DashboardProcess(stage.path, folder)
            try:
                yield process.link
            finally:
                process.end()


@contextmanager
def fleet() -> Iterator[str]:
    """A link to the dashboard of the planted fleet."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        link = {"dashboard": "https://{host}.example.com/"}
        with (
            Backstage(str(folder / "c.sock"), PlantedMachine()) as stage,
            PlantedIngress(folder / "i", planted(FLEET_HOSTS), **link) as ingress,
        ):
            process = DashboardProcess(stage.path, folder, "--fleet", str(ingress.config))
            try:
                yield process.link
            finally:
                process.end()


def take(browser: Browser, link: str, folder: Path) -> None:
    for page, name in _pages(browser, link):
        page.wait_for_selector("#machine [data-cpus]")
        page.wait_for_timeout(WHOLE_MS)
        for view, address in VIEWS.items():
            page.evaluate(f"location.hash = '{address}'")
            page.wait_for_timeout(SETTLED_MS)
            _save(page, folder / f"{view}-{name}.png")


def take_fleet(browser: Browser, link: str, folder: Path) -> None:
    for page, name in _pages(browser, link):
        page.wait_for_selector("tr[data-host]")
        page.wait_for_timeout(SETTLED_MS)
        _save(page, folder / f"fleet-{name}.png")


def _pages(browser: Browser, link: str) -> Iterator[tuple[Page, str]]:
    """An open page for each width and scheme, and the end of its pictures' names."""
    for width, height in HEIGHT.items():
        for scheme in SCHEMES:
            window = {"width": width, "height": height}
            with browser.new_context(viewport=window, color_scheme=scheme, timezone_id="UTC") as context:
                page = context.new_page()
                page.goto(link)
                yield page, f"{scheme}-{width}"


def _save(page: Page, path: Path) -> None:
    path.write_bytes(small(page.screenshot(full_page=True, animations="disabled")))
    print(f"{path.name}  {path.stat().st_size // 1024} KiB")


def small(picture: bytes) -> bytes:
    """The same with few colours."""
    image = Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    written = io.BytesIO()
    image.save(written, "PNG", optimize=True)
    return written.getvalue()


def main() -> int:
    args = parse()
    command = next(filter(None, map(shutil.which, COMMANDS)), None)
    if command is None:
        print(
            f"cannot take screenshots: no browser\n  what to do: install one of {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 1
    args.folder.mkdir(parents=True, exist_ok=True)
    sandbox = [] if os.geteuid() else ["--no-sandbox"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=command, args=sandbox)
        if args.only != "fleet":
            with dashboard() as link:
                take(browser, link, args.folder)
        if args.only != "machine":
            with fleet() as link:
                take_fleet(browser, link, args.folder)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
