"""Colours of slots, memory and traces (static/picture.css): contrast in both schemes, and distance with colour blindness."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
from support.colours import contrast

import launcher.dashboard

STATIC = Path(launcher.dashboard.__file__).parent / "static"
SCHEMES = ("light", "dark")
SLOTS = 16
TEXT = 4.5
SHAPE = 3.0
# Least distance (100 times Euclidean in Oklab) of any two slots' colours among the first so many. 2 can just be told apart
# side by side; beyond four slots the sign on each core tells as well.
DISTANCE = {4: 15.0, 8: 9.0, 16: 4.5}
# Linear RGB as seen without one kind of cones: Machado, Oliveira and Fernandes 2009, severity 1.
SEEN = {
    "trichromat": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanope": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranope": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanope": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
Linear = tuple[float, ...]


def palette(scheme: str) -> dict[str, str]:
    """Custom properties of both style sheets; the dark scheme's replace the light one's."""
    found: dict[str, str] = {}
    for name in ("style.css", "picture.css"):
        text = (STATIC / name).read_text(encoding="utf-8")
        light, dark = re.split(r"@media (?:screen and )?\(prefers-color-scheme: dark\)", text, maxsplit=1)
        found |= colours(light)
        if scheme == "dark":
            found |= colours(dark[: dark.index("}")])
    return found


def colours(text: str) -> dict[str, str]:
    found = re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", text)
    return {
        name: value if len(value) == 7 else "#" + "".join(2 * c for c in value[1:]) for name, value in found
    }


def linear(colour: str) -> Linear:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return tuple(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)


def oklab(colour: Linear) -> Linear:
    """Ottosson 2020."""
    red, green, blue = colour
    cones = (
        0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue,
        0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue,
        0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue,
    )
    long, middle, short = (cone ** (1 / 3) for cone in cones)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


def seen(colour: str, eyes: str) -> Linear:
    mixed = (sum(w * c for w, c in zip(row, linear(colour), strict=True)) for row in SEEN[eyes])
    return oklab(tuple(min(1.0, max(0.0, channel)) for channel in mixed))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_shapes_stand_out_from_their_background(scheme: str) -> None:
    found = palette(scheme)
    shapes = [
        *(f"slot{slot}" for slot in range(SLOTS)),
        "reserved",
        "trace-a",
        "trace-b",
        "trace-c",
        "trace-bad",
    ]
    shapes += ["weights", "kv-cache", "other", "foreign", "edge"]
    low = [name for name in shapes if contrast(found[name], found["panel"]) < SHAPE]
    assert low == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_signs_are_readable_on_their_slots_colour(scheme: str) -> None:
    found = palette(scheme)
    pairs = [(f"ink{slot}", f"slot{slot}") for slot in range(SLOTS)] + [("reserved-ink", "reserved")]
    pairs.append(("text", "quiet-tint"))
    assert [pair for pair in pairs if contrast(found[pair[0]], found[pair[1]]) < TEXT] == []


@pytest.mark.parametrize("eyes", SEEN)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("count", DISTANCE)
def test_slots_are_told_apart(count: int, scheme: str, eyes: str) -> None:
    found = palette(scheme)
    own = [seen(found[f"slot{slot}"], eyes) for slot in range(count)]
    nearest = min(math.dist(one, other) for one, other in itertools.combinations(own, 2))
    assert 100 * nearest >= DISTANCE[count]


def test_distance_of_known_colours() -> None:
    red, green = "#d00000", "#5f7300"
    near = math.dist(seen(red, "protanope"), seen(green, "protanope"))
    assert near < math.dist(seen(red, "trichromat"), seen(green, "trichromat")) / 2
    assert math.dist(oklab(linear("#000000")), oklab(linear("#ffffff"))) == pytest.approx(1, abs=1e-3)
