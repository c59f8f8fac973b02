"""Line charts as inline SVG: no library in the page, no network, colours from the page's style sheet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from nemo_rl.cli.metrics_log import Series

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 30
_MAX_POINTS = 1000
_SMOOTH_FROM = 60
"""Runs with more points than this get a smoothed line over a faint one."""


@dataclass(frozen=True)
class Line:
    """One curve of a chart. `smooth` adds a moving average where the curve is long enough to need one."""

    label: str
    series: Series
    smooth: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves over the same steps in one frame; `unit` stands beside the title."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    from_zero: bool = False


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten) inside `[low, high]`."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [low]
    rough = span / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def format_number(value: float) -> str:
    """A short form for axes and tables: `5.4k`, `0.0312`, `5.0e-06`, `1,319`."""
    size = abs(value)
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    if size >= 1e12 or size < 1e-3:
        return f"{value:.1e}"
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= max(factor, 1e4):
            short = value / factor
            return f"{short:.0f}{suffix}" if abs(short) >= 100 else f"{short:.3g}{suffix}"
    if value == round(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """The mean of up to `window` values around each one.

    The window is centred, so that a falling curve isn't drawn late. It shrinks towards the start to stay centred there,
    where curves are steep; at the end, where they are flat, it only loses its right half, which keeps the tail calm.
    """
    sums = [0.0, *itertools.accumulate(values)]
    smooth = []
    for k in range(len(values)):
        reach = min(window // 2, k)
        first, end = k - reach, min(len(values), k + reach + 1)
        smooth.append((sums[end] - sums[first]) / (end - first))
    return smooth


def thin(points: Sequence[tuple[int, float]], limit: int) -> list[tuple[int, float]]:
    """At most `limit` of the points: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / (limit // 2))
    kept = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept.extend(sorted(ends))
    return kept


class _Frame:
    """Maps (step, value) to pixels."""

    def __init__(self, chart: Chart) -> None:
        steps = [s for line in chart.lines for s in line.series.steps]
        values = [v for line in chart.lines for _, v in line.series.finite]
        self.x0, self.x1 = min(steps), max(steps)
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if chart.from_zero:
            low = min(low, 0.0)
        margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        # Values that can't be negative get no room below zero.
        self.y0 = max(0.0, low - margin) if low >= 0 else low - margin
        self.y1 = high + margin

    def x(self, step: float) -> float:
        part = (step - self.x0) / (self.x1 - self.x0) if self.x1 > self.x0 else 0.5
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Sequence[tuple[int, float]]) -> str:
        return "M" + "L".join(f"{self.x(s):.1f} {self.y(v):.1f}" for s, v in points)


def _axes(frame: _Frame) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value in nice_ticks(frame.y0, frame.y1, 5):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{format_number(value)}</text>')
    ticks = [t for t in nice_ticks(frame.x0, frame.x1, 7) if t == round(t)]
    for step in ticks:
        parts.append(
            f'<text x="{frame.x(step):.1f}" y="{bottom + 18}" text-anchor="middle">{format_number(step)}</text>'
        )
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
    return parts


def _curve(frame: _Frame, line: Line, tone: int) -> list[str]:
    points = line.series.finite
    bottom = HEIGHT - BOTTOM
    parts = [
        f'<path class="broken" d="M{frame.x(step):.1f} {bottom}v-7"><title>{escape(line.label)} is not finite at step '
        f"{step}</title></path>"
        for step in line.series.broken_steps[:_MAX_POINTS]
    ]
    if not points:
        return parts
    if len(points) <= 30:
        parts += [
            f'<circle class="tone{tone}" cx="{frame.x(s):.1f}" cy="{frame.y(v):.1f}" r="2.6"/>' for s, v in points
        ]
    faint = line.smooth and len(points) > _SMOOTH_FROM
    parts.append(f'<path class="tone{tone}{" faint" if faint else ""}" d="{frame.path(thin(points, _MAX_POINTS))}"/>')
    if faint:
        averaged = moving_average([v for _, v in points], max(5, len(points) // 30))
        smooth = list(zip((s for s, _ in points), averaged, strict=True))
        parts.append(f'<path class="tone{tone}" d="{frame.path(thin(smooth, _MAX_POINTS))}"/>')
    return parts


def chart_svg(chart: Chart) -> str:
    """The chart as an `<svg>` element; non-finite values are gaps with a red mark on the axis."""
    frame = _Frame(chart)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title, quote=True)}">',
        *_axes(frame),
    ]
    for tone, line in enumerate(chart.lines):
        parts += _curve(frame, line, tone)
    parts.append(f'<line class="cursor" x1="0" y1="{TOP}" x2="0" y2="{HEIGHT - BOTTOM}" visibility="hidden"/></svg>')
    return "".join(parts)


def chart_points(chart: Chart) -> dict[str, object]:
    """What the page's script needs to name the values under the pointer: the frame and each curve's points."""
    frame = _Frame(chart)
    return {
        "x0": frame.x0,
        "x1": frame.x1,
        "lines": [
            {"label": line.label, "points": [[s, format_number(v)] for s, v in thin(line.series.finite, _MAX_POINTS)]}
            for line in chart.lines
        ],
    }
