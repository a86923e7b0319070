"""The report as people open it: light, dark, on a phone, printed; by screen readers' rules; without any request."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from browser.dashboard_process import PHONE, serious
from support.bench_results import result

from launcher.measure.bench.page import html_page
from launcher.measure.bench.result import BenchResult

Visiting = Callable[..., Any]

MAX_BYTES = 300_000
HOSTILE = "<img src=https://example.invalid/x onerror=document.title='run'>"
LOADS = (1, 4, 16, 64)
LIGHT = {"viewport": {"width": 1200, "height": 900}, "color_scheme": "light"}
DARK = {"viewport": {"width": 1200, "height": 900}, "color_scheme": "dark"}
PRINTED = {
    "viewport": {"width": 695, "height": 1024},
    "color_scheme": "dark",
}  # A4 less its margins, at 96 per inch


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of results: measured (vLLM, a tiny model, 2 cores; without paths, samples thinned), planted on 2 sockets
    with 256 cores, both, and with hostile names."""
    folder = tmp_path_factory.mktemp("pages")
    large = on_two_sockets(folder)
    real = msgspec.json.decode((Path(__file__).parent / "measured.json").read_bytes(), type=BenchResult)
    hostile = result(
        model=HOSTILE, workload=HOSTILE, url=HOSTILE, workload_options={HOSTILE: HOSTILE}, plan=large.plan
    )
    hostile = msgspec.structs.replace(
        hostile, picture_svg=f"<svg xmlns='http://www.w3.org/2000/svg'>{HOSTILE}</svg>"
    )
    written = {}
    for name, results in {
        "real": [real],
        "large": [large],
        "both": [large, real],
        "hostile": [hostile],
    }.items():
        written[name] = folder / f"{name}.html"
        written[name].write_text(html_page(results), encoding="utf-8")
    return written


def on_two_sockets(folder: Path) -> BenchResult:
    """Planted figures with the plan and the picture of a described server."""
    picture = folder / "plan.svg"
    argv = [
        sys.executable,
        "-m",
        "launcher",
        "plan",
        "--machine",
        "epyc-9755-2p",
        "--json",
        "--svg",
        str(picture),
    ]
    plan = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    return result(
        concurrencies=LOADS,
        slo={"ttft_p99": 1.5, "itl_p99": 0.15},
        plan=plan,
        picture_svg=picture.read_text(),
    )


NAMES = ("real", "large", "both", "hostile")
# A phone's scale is its context's: the first.
WINDOWS = {"phone": PHONE, "light": LIGHT, "dark": DARK}


@pytest.mark.parametrize("name", NAMES)
def test_the_page_fits_and_asks_for_nothing(pages: dict[str, Path], visit: Visiting, name: str) -> None:
    with visit(pages[name], **PHONE) as visiting:
        for window, given in WINDOWS.items():
            visiting.resize(given)
            content, width = visiting.overflow()
            assert content <= width, window
        assert visiting.foreign_requests() == []
        assert visiting.errors == []
        assert visiting.page.title() != "run"


@pytest.mark.parametrize("name", [pytest.param("large", marks=pytest.mark.release), "both"])
def test_axe_finds_nothing_serious(pages: dict[str, Path], visit: Visiting, name: str) -> None:
    with visit(pages[name], **PHONE) as visiting:
        for window, given in WINDOWS.items():
            visiting.resize(given)
            assert serious(visiting) == [], window


@pytest.mark.parametrize("name", NAMES)
def test_the_page_is_small(pages: dict[str, Path], name: str) -> None:
    assert pages[name].stat().st_size < MAX_BYTES


def test_dark_and_light_are_the_readers_choice(pages: dict[str, Path], visit: Visiting) -> None:
    colours = []
    for window in (LIGHT, DARK):
        with visit(pages["large"], **window) as visiting:
            colours.append(visiting.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colours == ["rgb(255, 255, 255)", "rgb(18, 22, 27)"]


def test_print_is_light_and_cuts_nothing_off(pages: dict[str, Path], visit: Visiting) -> None:
    with visit(pages["large"], **PRINTED) as visiting:
        visiting.page.emulate_media(media="print", color_scheme="dark")
        assert (
            visiting.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        )
        content, width = visiting.overflow()
        assert content <= width
        pdf = visiting.page.pdf(prefer_css_page_size=True)
    assert pdf.startswith(b"%PDF-")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 9


def test_charts_are_drawn_and_their_texts_can_be_read(pages: dict[str, Path], visit: Visiting) -> None:
    """On a phone no text of a chart is below 9 px, and none reaches out of its chart's column."""
    with visit(pages["large"], **PHONE) as visiting:
        sizes = visiting.page.evaluate(
            """[...document.querySelectorAll("figure svg text")].map(text => {
                 const box = text.getBoundingClientRect(), column = text.closest("figure").getBoundingClientRect();
                 const drawn = text.ownerSVGElement;
                 const scale = drawn.getBoundingClientRect().width / drawn.viewBox.baseVal.width;
                 return [parseFloat(getComputedStyle(text).fontSize) * scale, box.left - column.left,
                         document.documentElement.clientWidth - box.right]})"""
        )
    assert len(sizes) > 100
    assert min(size for size, _, _ in sizes) >= 9
    assert min(left for _, left, _ in sizes) >= -1
    assert min(right for _, _, right in sizes) >= 0


def test_the_picture_of_the_machine_is_shown(pages: dict[str, Path], visit: Visiting) -> None:
    with visit(pages["large"], **LIGHT) as visiting:
        width, natural = visiting.page.evaluate(
            "(image => [image.getBoundingClientRect().width, image.naturalWidth])(document.images[0])"
        )
    assert natural > 1000
    assert width > 900
