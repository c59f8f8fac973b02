"""Ticks, thinning, smoothing and the pixels of curves. Not covered: how the page looks."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest

from nemo_rl.cli.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    Line,
    chart_svg,
    format_number,
    moving_average,
    nice_ticks,
    thin,
)
from nemo_rl.cli.metrics_log import Series


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (1, 600, [100, 200, 300, 400, 500, 600]),
        (3, 3, [3]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round_and_inside(low, high, ticks) -> None:
    assert nice_ticks(low, high, 5 if high < 600 else 7) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (5e-6, "5.0e-06"),
        (0.03125, "0.03125"),
        (1319, "1,319"),
        (12345, "12.3k"),
        (999_999, "1000k"),
        (7_100_000, "7.1M"),
        (2.5e9, "2.5G"),
        (-3.14159, "-3.142"),
        (math.inf, "inf"),
    ],
)
def test_numbers_are_short(value, text) -> None:
    assert format_number(value) == text


def test_thinning_keeps_every_spike_and_the_order() -> None:
    points = [(step, 1.0) for step in range(10_000)]
    points[4321] = (4321, 9.0)
    points[777] = (777, -9.0)
    kept = thin(points, 1000)
    assert len(kept) <= 1000
    assert (4321, 9.0) in kept
    assert (777, -9.0) in kept
    assert kept == sorted(kept)
    assert thin(points[:50], 1000) == points[:50]


def test_the_moving_average_is_the_mean_of_its_window() -> None:
    values = [float(v * v % 17) for v in range(40)]
    smooth = moving_average(values, 7)
    for k, value in enumerate(smooth):
        reach = min(3, k)
        window = values[k - reach : k + reach + 1]
        assert value == pytest.approx(sum(window) / len(window))
    assert smooth[0] == values[0]


def test_a_curve_starts_and_ends_at_the_right_pixels() -> None:
    """A line from 0 to 100 with the axis from zero: the first point lies on it, the last one 6 % below the top."""
    series = Series("loss", (0, 5, 10), (0.0, 50.0, 100.0))
    svg = ET.fromstring(chart_svg(Chart("Loss", "", (Line("loss", series),), from_zero=True)))
    path = next(e for e in svg.iter("path") if e.get("class") == "tone0")
    points = [tuple(map(float, pair.split())) for pair in re.split("[ML]", path.get("d", ""))[1:]]
    bottom = HEIGHT - BOTTOM
    assert points[0] == pytest.approx((LEFT, bottom), abs=0.06)
    assert points[-1] == pytest.approx((WIDTH - RIGHT, bottom - (bottom - TOP) / 1.06), abs=0.06)
    assert points[1] == pytest.approx([(a + b) / 2 for a, b in zip(points[0], points[2], strict=True)], abs=0.11)


def test_a_value_that_is_not_finite_is_a_gap_with_a_mark() -> None:
    series = Series("grad<norm", (1, 2, 3), (1.0, math.nan, 3.0))
    svg = ET.fromstring(chart_svg(Chart("Norm", "", (Line("grad<norm", series),))))
    marks = [e for e in svg.iter("path") if e.get("class") == "broken"]
    assert [mark.findtext("title") for mark in marks] == ["grad<norm is not finite at step 2"]
    assert len(list(svg.iter("circle"))) == 2
    only = Series("x", (1,), (math.nan,))
    ET.fromstring(chart_svg(Chart("Nothing", "", (Line("x", only),))))
