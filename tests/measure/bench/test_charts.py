from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from launcher.measure.bench.charts import (
    Axis,
    Line,
    Mark,
    Markup,
    Row,
    distributions,
    line_key,
    lines,
    mark_key,
    marks_in_rows,
)
from launcher.measure.bench.figures import duration, number, tick_numbers

RATE = Axis("tokens/s", number, tick_numbers)
TIME = Axis("", duration, lambda ticks: [f"{tick:g} s" for tick in ticks])


def parsed(svg: Markup) -> ET.Element:
    return ET.fromstring(svg)  # noqa: S314  our own text


def texts(svg: Markup) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter("text")]


def circles(svg: Markup) -> list[tuple[float, float]]:
    return [(float(each.attrib["cx"]), float(each.attrib["cy"])) for each in parsed(svg).iter("circle")]


def line(name: str = "p50", **fields: float) -> Line:
    return Line(
        name=name, marks=[Mark(x=100, y=1, label="4"), Mark(x=200, y=2, label="16")], colour=0, **fields
    )


def test_both_axes_of_lines_start_at_zero() -> None:
    svg = lines("TTFT", RATE, TIME, [line()])
    assert texts(svg) == [
        "0 s", "0.5 s", "1 s", "1.5 s", "2 s", "0", "50", "100", "150", "200", "tokens/s", "4", "16", "p50",
    ]  # fmt: skip
    (x1, y1), (x2, y2) = circles(svg)
    assert (x1, y1) == pytest.approx((184, 114))
    assert (x2, y2) == pytest.approx((316, 14))


def test_a_limit_is_on_the_axis_and_named() -> None:
    svg = lines("TTFT", RATE, TIME, [line()], (4.0, "limit 4 s"))
    assert "limit 4 s" in texts(svg)
    assert "4 s" in texts(svg)


def test_a_limit_far_above_is_named_and_leaves_the_axis() -> None:
    svg = lines("TTFT", RATE, TIME, [line()], (4.1, "limit 4.1 s"))
    assert "limit 4.1 s (above)" in texts(svg)
    assert "2 s" in texts(svg)
    assert "4 s" not in texts(svg)


def test_names_of_lines_that_end_together_do_not_cover_each_other() -> None:
    svg = lines("TTFT", RATE, TIME, [line("p50"), line("p99", dash=1)])
    ends = [float(each.attrib["y"]) for each in parsed(svg).iter("text") if each.text in {"p50", "p99"}]
    assert abs(ends[0] - ends[1]) >= 15
    assert texts(svg).count("16") == 1


def test_runs_are_points_on_the_same_axes() -> None:
    mark = Mark(x=100, y=1, runs=[(50, 0.5), (150, 2)])
    svg = lines("TTFT", RATE, TIME, [Line(name="p50", marks=[mark], colour=0)])
    small, large, mean = circles(svg)
    assert small == pytest.approx((140, 164))
    assert large == pytest.approx((316, 14))
    assert mean == pytest.approx((228, 114))


def test_a_chart_is_described_in_words() -> None:
    svg = lines("TTFT over tokens/s", RATE, TIME, [line()])
    assert parsed(svg).attrib["aria-label"] == (
        "TTFT over tokens/s. p50: 4: 1.00 s at 100, 16: 2.00 s at 200"
    )
    assert parsed(svg).attrib["role"] == "img"


def test_a_distribution_rises_from_0_to_1_at_its_samples() -> None:
    svg = distributions("ITL", TIME, [("4", [0.1 * 10 ** (index / 100) for index in range(101)], 0)])
    (path,) = (each.attrib["d"] for each in parsed(svg).iter("path"))
    points = [tuple(map(float, pair.split())) for pair in path[1:].split("L")]
    assert points[0] == (52.0, 214.0)
    assert points[-1] == (342.0, 14.0)
    middle = next(y for x, y in points if x >= (52 + 342) / 2)
    assert middle == pytest.approx(114, abs=3)
    assert "half within 316 ms, 99% within 977 ms" in svg


def test_a_distribution_of_one_sample_is_drawn() -> None:
    assert "path" in distributions("ITL", TIME, [("4", [0.2], 0), ("none", [], 1)])


def test_rows_have_a_mark_per_series() -> None:
    svg = marks_in_rows(
        "per core", RATE, [Row(name="A", values={0: 1.0, 4: 10.0}, strong=True), Row(name="B", values={1: 3.0})],
        ["x", "y", "z", "u", "here"],
    )  # fmt: skip
    assert {"A", "B", "1", "10", "tokens/s"} <= set(texts(svg))
    assert "A: x 1.00, here 10.0; B: y 3.00" in svg
    assert len(circles(svg)) == 1
    (square,) = parsed(svg).iter("rect")
    assert float(square.attrib["x"]) > 150


@pytest.mark.parametrize("index", range(6))
def test_keys_of_a_legend_are_hidden_from_screen_readers(index: int) -> None:
    for key in (line_key(index, index), mark_key(index)):
        assert parsed(key).attrib["aria-hidden"] == "true"


def test_names_are_escaped() -> None:
    hostile = "<img src=x onerror=alert(1)>"
    svg = lines(hostile, RATE, TIME, [line(hostile)])
    assert "<img" not in svg
    assert hostile in texts(svg)
