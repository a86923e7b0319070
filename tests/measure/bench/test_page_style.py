"""Contrast of every pair of colours that the page puts on each other."""

from __future__ import annotations

import pytest
from support.colours import contrast

from launcher.measure.bench.page_style import DARK, DASHES, LIGHT, SERIES, style_sheet


@pytest.mark.parametrize(
    ("one", "other", "ratio"),
    [("#000000", "#ffffff", 21.0), ("#777777", "#ffffff", 4.48), ("#0b5cad", "#0b5cad", 1.0)],
)
def test_contrast_is_wcags(one: str, other: str, ratio: float) -> None:
    assert contrast(one, other) == pytest.approx(ratio, abs=0.01)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("ground", ["page", "panel"])
@pytest.mark.parametrize("ink", ["text", "muted", "accent", "alert"])
def test_text_is_readable(palette: dict[str, str], ground: str, ink: str) -> None:
    assert contrast(palette[ink], palette[ground]) >= 4.5


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("index", range(SERIES))
def test_lines_and_marks_are_visible(palette: dict[str, str], index: int) -> None:
    assert contrast(palette[f"series{index}"], palette["page"]) >= 4.5


def test_series_differ_without_colour() -> None:
    assert len(set(DASHES)) == len(DASHES) == SERIES


def test_both_palettes_have_the_same_names() -> None:
    assert LIGHT.keys() == DARK.keys()


def test_print_is_light_whatever_the_screen() -> None:
    sheet = style_sheet()
    assert sheet.count("prefers-color-scheme") == 1
    assert "@media screen and (prefers-color-scheme:dark)" in sheet


def test_every_variable_is_defined() -> None:
    used = {part.split(")")[0] for part in style_sheet().split("var(--")[1:]}
    assert used <= LIGHT.keys()


def test_the_sheet_loads_nothing() -> None:
    assert "url(" not in style_sheet()
    assert "@import" not in style_sheet()
