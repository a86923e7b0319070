"""Charts as inline SVG: lines over two axes from zero, cumulative distributions, marks in rows. Pure.

Sizes are in the view box's units; the page scales a chart to its column. Every chart has a title and a description
for screen readers; what it shows is also in a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Final

import msgspec

from launcher.base.text import printable
from launcher.measure.bench.page_style import DASHES, series

# --- Scales and ticks of charts. ---

_MAX_TICKS: Final = 6


class Scale(msgspec.Struct, frozen=True):
    """Maps values to positions; `ticks` are the values to label, from the scale's start to its end."""

    start: float
    end: float
    at_start: float
    at_end: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """The position, at most at the scale's ends."""
        low, high, value = (
            (math.log(each) if each > 0 else -math.inf) if self.logarithmic else each
            for each in (self.start, self.end, value)
        )
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return self.at_start + share * (self.at_end - self.at_start)


def from_zero(values: Sequence[float], at_start: float, at_end: float, steps: int = 5) -> Scale:
    """From 0 to a round number at or above the largest value, with at most `steps` intervals of 1, 2, 2.5 or 5."""
    largest = max(values, default=0) or 1.0
    step = next(step for step in _steps(largest / steps) if step * steps >= largest * (1 - 1e-9))
    count = math.ceil(largest / step - 1e-9)
    ticks = tuple(step * index for index in range(count + 1))
    return Scale(0.0, ticks[-1], at_start, at_end, ticks)


def logarithmic(values: Sequence[float], at_start: float, at_end: float) -> Scale:
    """From 1, 2 or 5 times a power of ten below the positive values to one above; at most six ticks."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    marks = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
    start = max(mark for mark in marks if mark <= low * (1 + 1e-9))
    end = min(mark for mark in marks if mark >= high * (1 - 1e-9) and mark > start)
    candidates = (
        [factor * 10.0**exponent for exponent in exponents for factor in factors]
        for factors in ((1, 2, 5), (1, 3), (1,))
    )
    inside = [[tick for tick in ticks if start <= tick <= end] for ticks in candidates]
    ticks = next((ticks for ticks in inside if len(ticks) <= _MAX_TICKS), inside[-1])
    return Scale(start, end, at_start, at_end, tuple(ticks), logarithmic=True)


def _steps(least: float) -> Sequence[float]:
    exponent = math.floor(math.log10(least))
    return [
        factor * 10.0**power for power in (exponent - 1, exponent, exponent + 1) for factor in (1, 2, 2.5, 5)
    ]


def apart(positions: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """Positions of labels, moved as little as keeps them `distance` apart and between `low` and `high`."""
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    placed = [0.0] * len(positions)
    previous = low - distance
    for index in order:
        previous = placed[index] = max(positions[index], previous + distance)
    following = high + distance
    for index in reversed(order):
        following = placed[index] = min(placed[index], following - distance)
    return placed


# --- HTML and SVG elements from values. Every text is escaped; only `Markup` is taken as it is. ---

_VOID: Final = frozenset({"meta", "img", "br", "rect", "line", "circle", "path"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Content = str | None


def tag(name: str, /, *content: Content, **attributes: str | float | None) -> Markup:
    """`<name attribute="value">content</name>`. An attribute that is None is left out.

    In attributes' names `_` stands for `-`, and one at the end is dropped: `class_`, `text_anchor`."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID and not content:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{joined(*content)}</{name}>")


def joined(*content: Content) -> Markup:
    return Markup(
        "".join(each if isinstance(each, Markup) else text(each) for each in content if each is not None)
    )


def text(value: str) -> Markup:
    """Escaped for content and for quoted attributes, without invisible and bidirectional characters."""
    return Markup(escape(printable(value), quote=True))


def _plain(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


WIDTH: Final = 360
HEIGHT: Final = 256
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 44, 14, 42
_LINE: Final = 15
_ROW: Final = 20
_ROWS_WIDTH: Final = 440
_NAMES: Final = 150
_SHAPES: Final = 5

Format = Callable[[float], str]
Ticks = Callable[[Sequence[float]], list[str]]


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A point of a line: the mean of `runs`, which are drawn as small points."""

    x: float
    y: float
    label: str = ""
    runs: Sequence[tuple[float, float]] = ()


class Line(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Written at its last point."""
    marks: Sequence[Mark]
    colour: int
    dash: int = 0


class Axis(msgspec.Struct, frozen=True):
    name: str
    """"" where the title says it."""
    shown: Format
    """A value in words, with its unit."""
    ticks: Ticks


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A row of marks: values by the index of their series."""

    name: str
    values: dict[int, float]
    strong: bool = False


_SHARE: Final = Axis("", "{:.0%}".format, lambda ticks: [f"{tick:.0%}" for tick in ticks])


def lines(
    title: str, x: Axis, y: Axis, drawn: Sequence[Line], limit: tuple[float, str] | None = None
) -> Markup:
    """Lines with marks, both axes from zero; `limit` is a dashed line across, with its label."""
    every = [mark for line in drawn for mark in line.marks]
    right = WIDTH - _RIGHT
    points = [point for mark in every for point in ((mark.x, mark.y), *mark.runs)]
    across = from_zero([x for x, _ in points], _LEFT, right)
    # A limit far above the figures would press them onto the axis: it is named, not drawn.
    is_near = limit is not None and limit[0] <= 2 * max(y for _, y in points)
    limits = [limit[0]] if limit and is_near else []
    up = from_zero([*(y for _, y in points), *limits], HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(across, up, x, y)]
    if limit and not is_near:
        parts.append(tag("text", f"{limit[1]} (above)", x=_LEFT + 4, y=_TOP - 4, class_="limit-label"))
    elif limit:
        at = up(limit[0])
        parts += [
            tag("line", x1=_LEFT, x2=right, y1=at, y2=at, class_="limit"),
            tag("text", limit[1], x=_LEFT + 4, y=at - 4, class_="limit-label"),
        ]
    taken: list[tuple[float, float]] = []
    ends = apart([up(line.marks[-1].y) for line in drawn if line.marks], _LINE, _TOP, HEIGHT - _BOTTOM)
    for line, end in zip([line for line in drawn if line.marks], ends, strict=True):
        parts += [
            _path(line, across, up),
            *_labels(line, across, up, taken),
            tag("text", line.name, x=across(line.marks[-1].x) + 9, y=end + 4),
        ]
    described = "; ".join(f"{line.name}: {_described(line, x, y)}" for line in drawn)
    return _chart(title, described, HEIGHT, *parts)


def distributions(title: str, x: Axis, drawn: Sequence[tuple[str, Sequence[float], int]]) -> Markup:
    """The share of samples up to each value, on a logarithmic axis; `drawn` are name, samples in order, series."""
    quantiles = [(name, _quantiles(samples), index) for name, samples, index in drawn if samples]
    # The fastest 5 % (tokens that arrived together) would take most of the axis: their curve starts at its end.
    upper = [value for _, points, _ in quantiles for value, share in points if share >= 0.05]
    across = logarithmic(upper, _LEFT, WIDTH - 18)
    bottom = HEIGHT - _BOTTOM
    up = Scale(0.0, 1.0, bottom, _TOP, (0.0, 0.25, 0.5, 0.75, 1.0))
    parts = [_frame(across, up, x, _SHARE)]
    for _, points, index in quantiles:
        path = "M" + "L".join(f"{across(value):.1f} {up(share):.1f}" for value, share in points)
        parts.append(tag("path", d=path, class_="line", style=_stroke(index, index)))
    described = "; ".join(
        f"{name}: half within {x.shown(_at(points, 0.5))}, 99% within {x.shown(_at(points, 0.99))}"
        for name, points, _ in quantiles
    )
    return _chart(title, described, bottom + 24, *parts)


def marks_in_rows(title: str, x: Axis, rows: Sequence[Row], names: Sequence[str]) -> Markup:
    """One row per name with a mark per series, on a logarithmic axis above and below the rows."""
    bottom = _TOP + 18 + len(rows) * _ROW
    across = logarithmic([value for row in rows for value in row.values.values()], _NAMES, _ROWS_WIDTH - 20)
    parts = []
    for tick, label in zip(across.ticks, x.ticks(across.ticks), strict=True):
        at = across(tick)
        parts += [
            tag("line", x1=at, x2=at, y1=_TOP + 8, y2=bottom, class_="grid"),
            tag("text", label, x=at, y=_TOP + 2, text_anchor="middle", class_="axis"),
            tag("text", label, x=at, y=bottom + 15, text_anchor="middle", class_="axis"),
        ]
    for number, row in enumerate(rows):
        at = _TOP + 18 + number * _ROW + _ROW / 2 - 4
        weight = "font-weight:700" if row.strong else None
        parts.append(tag("text", row.name, x=_NAMES - 12, y=at + 4, text_anchor="end", style=weight))
        spots = sorted(row.values.values())
        parts.append(
            tag("line", x1=across(spots[0]), x2=across(spots[-1]), y1=at, y2=at, class_="zero", opacity=0.5)
        )
        parts += [
            _shape(across(value), at, index, 6 if row.strong else 5) for index, value in row.values.items()
        ]
    parts.append(
        tag(
            "text",
            x.name,
            x=(_NAMES + _ROWS_WIDTH - 20) / 2,
            y=bottom + 32,
            text_anchor="middle",
            class_="axis",
        )
    )
    described = "; ".join(
        f"{row.name}: " + ", ".join(f"{names[index]} {x.shown(value)}" for index, value in row.values.items())
        for row in rows
    )
    return _chart(title, described, bottom + 40, *parts, width=_ROWS_WIDTH)


def line_key(index: int, dash: int) -> Markup:
    """A line of a series, for a legend."""
    line = tag("line", x1=1, x2=33, y1=6, y2=6, class_="line", style=_stroke(index, dash))
    return tag("svg", line, viewBox="0 0 34 12", aria_hidden="true")


def mark_key(index: int) -> Markup:
    return tag("svg", _shape(17, 6, index, 5), viewBox="0 0 34 12", aria_hidden="true")


def _chart(title: str, described: str, height: float, *parts: Markup, width: float = WIDTH) -> Markup:
    label = f"{title}. {described}"
    return tag("svg", *parts, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label)


def _frame(across: Scale, up: Scale, x: Axis, y: Axis) -> Markup:
    parts = []
    for tick, label in zip(up.ticks, y.ticks(up.ticks), strict=True):
        at = up(tick)
        parts += [
            tag("line", x1=_LEFT, x2=across.at_end, y1=at, y2=at, class_="grid" if tick else "zero"),
            tag("text", label, x=_LEFT - 7, y=at + 4, text_anchor="end", class_="axis"),
        ]
    for tick, label in zip(across.ticks, x.ticks(across.ticks), strict=True):
        at = across(tick)
        parts += [
            tag("line", x1=at, x2=at, y1=up.at_start, y2=up.at_start + 4, class_="zero"),
            tag("text", label, x=at, y=up.at_start + 18, text_anchor="middle", class_="axis"),
        ]
    if x.name:
        middle = (across.at_start + across.at_end) / 2
        parts.append(tag("text", x.name, x=middle, y=HEIGHT - 6, text_anchor="middle", class_="axis"))
    return joined(*parts)


def _path(line: Line, across: Scale, up: Scale) -> Markup:
    colour = series(line.colour)
    points = "L".join(f"{across(mark.x):.1f} {up(mark.y):.1f}" for mark in line.marks)
    parts = [tag("path", d=f"M{points}", class_="line", style=_stroke(line.colour, line.dash))]
    for mark in line.marks:
        x, y = across(mark.x), up(mark.y)
        parts += [
            tag("circle", cx=across(its), cy=up(run), r=2, style=f"fill:{colour}", opacity=0.55)
            for its, run in mark.runs
        ]
        parts.append(tag("circle", cx=x, cy=y, r=3.5, style=f"fill:{colour}"))
    return joined(*parts)


def _labels(line: Line, across: Scale, up: Scale, taken: list[tuple[float, float]]) -> Iterator[Markup]:
    """Names of marks below them, or above near the axis; a name that would cover one in `taken` is left out."""
    for mark in line.marks:
        x, y = across(mark.x), up(mark.y)
        y += -9 if y + 17 > HEIGHT - _BOTTOM - 2 else 17
        if mark.label and all(abs(x - other) > 16 or abs(y - its) > 12 for other, its in taken):
            taken.append((x, y))
            yield tag("text", mark.label, x=x, y=y, text_anchor="middle", class_="axis")


def _stroke(colour: int, dash: int) -> str:
    return f"stroke:{series(colour)};stroke-dasharray:{DASHES[dash % len(DASHES)]}"


def _shape(x: float, y: float, index: int, size: float) -> Markup:
    """Circle, square, diamond, triangle, star: told apart without colour."""
    fill = f"fill:{series(index)}"
    match index % _SHAPES:
        case 0:
            return tag("circle", cx=x, cy=y, r=size, style=fill)
        case 1:
            return tag(
                "rect", x=x - size * 0.85, y=y - size * 0.85, width=size * 1.7, height=size * 1.7, style=fill
            )
        case 2:
            half = size * 1.2
            d = f"M{x:.1f} {y - half:.1f}l{half:g} {half:g}l{-half:g} {half:g}l{-half:g} {-half:g}z"
        case 3:
            d = f"M{x:.1f} {y - size:.1f}l{size * 1.1:.1f} {size * 1.9:.1f}h{-size * 2.2:.1f}z"
        case _:
            tips = [(size * (1.6 if tip % 2 == 0 else 0.65), tip * math.pi / 5) for tip in range(10)]
            d = "M" + "L".join(f"{x + r * math.sin(a):.1f} {y - r * math.cos(a):.1f}" for r, a in tips) + "z"
    return tag("path", d=d, style=fill)


_SHARES: Final = (
    *(index / 50 for index in range(1, 48)), 0.95, 0.96, 0.97, 0.975, 0.98, 0.985, 0.99, 0.995, 1.0,
)  # fmt: skip


def _quantiles(samples: Sequence[float]) -> list[tuple[float, float]]:
    """Values at shares that draw the curve in a fraction of its samples' size; the first is the smallest sample."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return [(ordered[0], 0.0), *((ordered[round(share * last)], share) for share in _SHARES)]


def _at(points: Sequence[tuple[float, float]], share: float) -> float:
    return next(value for value, its in points if its >= share)


def _described(line: Line, x: Axis, y: Axis) -> str:
    return ", ".join(
        f"{mark.label + ': ' if mark.label else ''}{y.shown(mark.y)} at {x.shown(mark.x)}"
        for mark in line.marks
    )
