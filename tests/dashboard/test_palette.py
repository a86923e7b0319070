"""Contrast of the dashboard's colours in both schemes (WCAG 2.2 AA): 4.5 for text, 3 for shapes and borders of controls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.colours import contrast

import launcher.dashboard

STYLE = (Path(launcher.dashboard.__file__).parent / "static" / "style.css").read_text(encoding="utf-8")
SCHEMES = ("light", "dark")
TEXT = 4.5
SHAPE = 3.0
BACKGROUNDS = ("page", "panel", "good-tint", "warn-tint", "bad-tint", "quiet-tint")
TEXTS = ("text", "muted", "accent", "good", "warn", "bad", "alert", "info")
# Text of a badge or of a part of a bar, on its colour.
FILLED = ("good", "warn", "bad", "info", "muted")


def palette(scheme: str) -> dict[str, str]:
    """Custom properties of :root that are colours. The dark scheme's replace the light one's."""
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)", 1)
    found = colours(light)
    return found if scheme == "light" else found | colours(dark[: dark.index("}")])


def colours(text: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", text))


def test_contrast_of_known_colours() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_is_readable_on_every_background(scheme: str) -> None:
    found = palette(scheme)
    pairs = [(text, background) for text in TEXTS for background in BACKGROUNDS]
    assert [pair for pair in pairs if contrast(found[pair[0]], found[pair[1]]) < TEXT] == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_is_readable_on_filled_shapes(scheme: str) -> None:
    found = palette(scheme)
    assert [name for name in FILLED if contrast(found[name], found["panel"]) < TEXT] == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_borders_of_controls_are_visible(scheme: str) -> None:
    found = palette(scheme)
    assert [name for name in BACKGROUNDS if contrast(found["edge"], found[name]) < SHAPE] == []


def test_dark_scheme_has_every_colour() -> None:
    dark = STYLE.split("@media (prefers-color-scheme: dark)", 1)[1]
    assert set(colours(dark[: dark.index("}")])) == set(palette("light"))
