"""Charts have round numbers at their axes, all points inside of them, and no text that is not escaped."""

import re
import xml.etree.ElementTree as ET

import pytest

from model.report import svg
from model.training.calibration import Bin


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0.12, 3.9, [0, 1, 2, 3, 4]),
        (5, 5, [4.5, 4.75, 5, 5.25, 5.5]),
        (0, 0, [-0.1, -0.05, 0, 0.05, 0.1]),
        (-3, 4000, [-2000, 0, 2000, 4000]),
    ],
)
def test_ticks(low, high, expected):
    """Ticks are round and cover the range, also one of a single value."""
    assert expected == pytest.approx(svg.ticks(low, high))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (1500, "1,500"),
        (3e-5, "3e-05"),
        (2.5e-5, "2.5e-05"),
        (2e7, "2e+07"),
    ],
)
def test_numbers(value, expected):
    """Numbers are short."""
    assert expected == svg.show(value)


def test_lines():
    """Every point is inside of the chart, and lines have names where there are several."""
    chart = svg.line_chart({"a < b": [(0, 1.0), (100, 3.0)], "c": [(50, float("nan")), (60, 2.0)]})

    picture, legend = chart.split("</svg>")
    tree = ET.fromstring(picture + "</svg>")
    lines = [line.get("points").split() for line in tree.iter("polyline")]
    assert [2, 1] == [len(points) for points in lines]
    for place in (place for points in lines for place in points):
        x, y = map(float, place.split(","))
        assert svg.LEFT <= x <= svg.WIDTH - svg.RIGHT
        assert svg.TOP <= y <= svg.HEIGHT - svg.BOTTOM
    assert "a &lt; b" in legend
    assert re.findall(r"<text[^>]*>([^<]+)<", picture)[:5] == ["1", "1.5", "2", "2.5", "3"]


def test_nothing_to_draw():
    """A chart without a finite value is empty."""
    assert "" == svg.line_chart({}) == svg.line_chart({"a": [(0, float("inf"))]})
    assert "<polyline" in svg.line_chart({"a": [(3, 1.0)]})


def test_reliability():
    """A circle for each bin, larger for more answers."""
    chart = svg.reliability_chart({"as trained": [Bin(0.5, 0.4, 10), Bin(0.95, 0.9, 90)]})
    radii = [float(r) for r in re.findall(r'r="([\d.]+)"', chart)]
    assert radii[0] < radii[1]
    assert "90 answers: confidence 0.950, right 0.900" in chart
