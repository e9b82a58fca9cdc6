"""Charts as inline SVG without scripts or style attributes; the style sheet has the colors, by class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from django_mysqlqueue.humanize import duration

WIDTH, HEIGHT = 600, 140
LEFT, BOTTOM, TOP = 46, 20, 8
SPARK_WIDTH, SPARK_HEIGHT = 120, 24
STRIP_HEIGHT = 12


def sparkline(values: Sequence[float], label: str) -> SafeString:
    """Return a small line chart without axes.

    Args:
        values: the values, at equal distances.
        label: text for screen readers.
    """
    top = max(values, default=0) or 1
    step = SPARK_WIDTH / max(1, len(values) - 1)
    points = [(place * step, SPARK_HEIGHT - 2 - value / top * (SPARK_HEIGHT - 4)) for place, value in enumerate(values)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    area = f"0,{SPARK_HEIGHT} {line} {SPARK_WIDTH},{SPARK_HEIGHT}"
    return format_html(
        '<svg class="mq-spark" viewBox="0 0 {} {}" role="img" aria-label="{}" preserveAspectRatio="none">'
        '<polygon class="mq-area" points="{}"/><polyline class="mq-line" points="{}"/></svg>',
        SPARK_WIDTH,
        SPARK_HEIGHT,
        label,
        area,
        line,
    )


def strip(parts: Sequence[tuple[str, str, float]], label: str) -> SafeString:
    """Return one bar whose parts have the lengths of their values, and at least a visible one; with tooltips.

    Args:
        parts: the CSS class, the tooltip and the value of each part.
        label: text for screen readers.
    """
    whole = sum(value for _, _, value in parts) or 1
    shares = [max(value / whole, 0.005) for _, _, value in parts]
    scale = WIDTH / (sum(shares) or 1)
    shapes = [
        (css, f"{sum(shares[:place]) * scale:.2f}", f"{share * scale:.2f}", tooltip)
        for place, (share, (css, tooltip, _)) in enumerate(zip(shares, parts, strict=True))
    ]
    return format_html(
        '<svg class="mq-strip" viewBox="0 0 {} {}" role="img" aria-label="{}" preserveAspectRatio="none">{}</svg>',
        WIDTH,
        STRIP_HEIGHT,
        label,
        format_html_join(
            "",
            '<rect class="{}" x="{}" y="0" width="{}" height="{}"><title>{}</title></rect>',
            [(css, x, width, STRIP_HEIGHT, tooltip) for css, x, width, tooltip in shapes],
        ),
    )


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity over time."""

    name: str
    css: str
    """CSS class of its shapes."""
    values: Sequence[float | None]
    """One value per time; None is a gap."""


def bars(series: Sequence[Series], times: Sequence[str], label: str) -> SafeString:
    """Return a chart of stacked bars with tooltips.

    Args:
        series: the quantities, from bottom to top.
        times: label of each stack.
        label: text for screen readers.
    """
    stacks = [sum(one.values[place] or 0 for one in series) for place in range(len(times))]
    top = nice(max(stacks, default=0))
    width = (WIDTH - LEFT) / max(1, len(times))
    shapes = []
    for place, at in enumerate(times):
        base = 0.0
        for one in series:
            value = one.values[place] or 0
            if value:
                height = value / top * (HEIGHT - TOP - BOTTOM)
                y = HEIGHT - BOTTOM - base - height
                x = LEFT + place * width
                shapes.append(
                    (
                        one.css,
                        f"{x:.2f}",
                        f"{y:.2f}",
                        f"{max(0.5, width - 1):.2f}",
                        f"{height:.2f}",
                        at,
                        one.name,
                        f"{value:,.0f}",
                    )
                )
                base += height
    inside = format_html_join(
        "",
        '<rect class="{}" x="{}" y="{}" width="{}" height="{}"><title>{} · {}: {}</title></rect>',
        shapes,
    )
    return _frame(inside, top, times, label)


def lines(series: Sequence[Series], times: Sequence[str], label: str) -> SafeString:
    """Return a line chart with a dot for each value, so that single values are visible.

    Args:
        series: the quantities, in milliseconds.
        times: label of each point.
        label: text for screen readers.
    """
    top = nice(max((value for one in series for value in one.values if value is not None), default=0))
    width = (WIDTH - LEFT) / max(1, len(times))
    runs, dots = [], []
    for one in series:
        run: list[str] = []
        for place, value in enumerate(one.values):
            if value is None:
                runs.append((one.css, " ".join(run)))
                run = []
                continue
            x = LEFT + (place + 0.5) * width
            y = HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)
            run.append(f"{x:.2f},{y:.2f}")
            dots.append((one.css, f"{x:.2f}", f"{y:.2f}", times[place], one.name, _time(value)))
        runs.append((one.css, " ".join(run)))
    inside = format_html(
        "{}{}",
        format_html_join("", '<polyline class="mq-line {}" points="{}"/>', [run for run in runs if " " in run[1]]),
        format_html_join("", '<circle class="{}" cx="{}" cy="{}" r="2"><title>{} · {}: {}</title></circle>', dots),
    )
    return _frame(inside, top, times, label, _time)


def nice(highest: float) -> float:
    """Return the end of an axis: 1, 2 or 5 times a power of ten, at or above the highest value."""
    if highest <= 0:
        return 1.0
    power = 10.0 ** (len(str(int(highest))) - 1) if highest >= 1 else 0.1
    return next((power * step for step in (1, 2, 5, 10) if power * step >= highest), highest)


def _frame(
    inside: SafeString, top: float, times: Sequence[str], label: str, say: Callable[[float], str] | None = None
) -> SafeString:
    """Return the chart with its axis, three grid lines, and the first, middle and last time."""
    shown = say or _number
    grid = format_html_join(
        "",
        '<line class="mq-grid" x1="{}" x2="{}" y1="{}" y2="{}"/><text class="mq-tick mq-end" x="{}" y="{}">{}</text>',
        [
            (LEFT, WIDTH, y, y, LEFT - 5, y + 4, shown(top * share))
            for share in (0.0, 0.5, 1.0)
            for y in (round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1),)
        ],
    )
    width = (WIDTH - LEFT) / max(1, len(times))
    places = sorted({0, len(times) // 2, len(times) - 1}) if times else []
    ticks = format_html_join(
        "",
        '<text class="mq-tick {}" x="{}" y="{}">{}</text>',
        [
            (
                "mq-end" if place == len(times) - 1 else "",
                round(LEFT + place * width + (width if place == len(times) - 1 else 0), 1),
                HEIGHT - 5,
                times[place],
            )
            for place in places
        ],
    )
    return format_html(
        '<svg class="mq-chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}{}{}</svg>',
        WIDTH,
        HEIGHT,
        label,
        grid,
        inside,
        ticks,
    )


def _time(milliseconds: float) -> str:
    return duration(milliseconds / 1000)


def _number(value: float) -> str:
    if value >= 1_000_000:
        return f"{value / 1_000_000:g}M"
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}"
