"""Charts as inline SVG: lines over steps, and reliability curves. Colors follow the page's light or dark scheme."""

import html
import math
from collections.abc import Mapping, Sequence

from model.training.calibration import Bin

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 34  # margins
COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")

Points = Sequence[tuple[float, float]]


def line_chart(series: Mapping[str, Points], x_label: str = "step") -> str:
    """Return a chart of named lines. Values that are not finite are left out; an empty chart is empty text."""
    finite = {
        name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in series.items()
    }
    finite = {name: points for name, points in finite.items() if points}
    if not finite:
        return ""
    every = [point for points in finite.values() for point in points]
    xs, ys = [x for x, _ in every], [y for _, y in every]
    x_range, y_ticks = (min(xs), max(*xs, min(xs) + 1)), ticks(min(ys), max(ys))
    frame = Frame(x_range, (y_ticks[0], y_ticks[-1]))
    parts = [frame.axes(ticks(*x_range, inside=True), y_ticks, x_label)]
    for number, points in enumerate(finite.values()):
        color = COLORS[number % len(COLORS)]
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if len(points) <= 30:
            parts += [
                f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.5" fill="{color}">'
                f"<title>step {x:,.0f}: {y:.6g}</title></circle>"
                for x, y in points
            ]
    return svg(parts) + legend(list(finite))


def reliability_chart(curves: Mapping[str, Sequence[Bin]]) -> str:
    """Return a chart of the share of right answers over their confidence, with a circle by the number of answers."""
    frame = Frame((0.0, 1.0), (0.0, 1.0))
    edge = [0.0, 0.25, 0.5, 0.75, 1.0]
    parts = [frame.axes(edge, edge, "confidence")]
    diagonal = f'x1="{frame.x(0)}" y1="{frame.y(0)}" x2="{frame.x(1)}" y2="{frame.y(1)}"'
    parts.append(f'<line {diagonal} stroke="currentColor" stroke-dasharray="4 4" opacity="0.5"/>')
    for number, bins in enumerate(curves.values()):
        color, total = COLORS[number % len(COLORS)], sum(each.count for each in bins)
        path = " ".join(f"{frame.x(b.confidence):.1f},{frame.y(b.accuracy):.1f}" for b in bins)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts += [
            f'<circle cx="{frame.x(each.confidence):.1f}" cy="{frame.y(each.accuracy):.1f}" '
            f'r="{2 + 8 * math.sqrt(each.count / total):.1f}" fill="{color}" fill-opacity="0.4">'
            f"<title>{each.count:,} answers: confidence {each.confidence:.3f}, "
            f"right {each.accuracy:.3f}</title></circle>"
            for each in bins
        ]
    return svg(parts) + legend(list(curves))


class Frame:
    """The place of values in a chart. x_range, y_range: the smallest and the largest value"""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]):
        self.x_range, self.y_range = x_range, y_range

    def x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def axes(self, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str) -> str:
        """Return grid lines and the numbers at them."""
        parts = []
        for value in y_ticks:
            y = self.y(value)
            parts.append(
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
                'stroke="currentColor" opacity="0.15"/>'
                f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{show(value)}</text>'
            )
        for value in x_ticks:
            text = f'<text x="{self.x(value):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
            parts.append(f"{text}{show(value)}</text>")
        middle = (LEFT + WIDTH - RIGHT) / 2
        label = html.escape(x_label)
        parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{label}</text>')
        return "".join(parts)


def ticks(low: float, high: float, inside: bool = False) -> list[float]:
    """Return about five round numbers that cover a range, or that lie inside of it."""
    if high <= low:
        low, high = low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
    raw = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw)
    first = math.ceil(low / step) if inside else math.floor(low / step)
    last = math.floor(high / step) if inside else math.ceil(high / step)
    return [number * step for number in range(first, last + 1)]


def show(value: float) -> str:
    """Return a number of an axis: `0.25`, `1,500`, `3e-05`."""
    if value and not 1e-3 <= abs(value) < 1e7:
        return (
            f"{value:.0e}" if f"{value:.0e}" == f"{value:.1e}".replace(".0", "") else f"{value:.1e}"
        )
    return f"{value:,.6g}" if abs(value) < 1000 else f"{value:,.0f}"


def svg(parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f'<svg {size} role="img">{"".join(parts)}</svg>'


def legend(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    keys = (
        f'<span><i style="background:{COLORS[number % len(COLORS)]}"></i>{html.escape(name)}</span>'
        for number, name in enumerate(names)
    )
    return f'<p class="legend">{"".join(keys)}</p>'
