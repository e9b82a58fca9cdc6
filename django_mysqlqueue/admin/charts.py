"""Charts as inline SVG without scripts or style attributes; the style sheet has the colors, by class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from django.utils.formats import number_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from django_mysqlqueue.text.humanize import duration

WIDTH, HEIGHT = 600, 140
LEFT, BOTTOM, TOP = 46, 20, 8
FLOOR, RISE = HEIGHT - BOTTOM, HEIGHT - TOP - BOTTOM
"""Where the value 0 is, and the height of the highest one above it."""
STRIP_HEIGHT = 12
SPARK_WIDTH, SPARK_HEIGHT = 120, 24
CELL, COLUMNS = 24, 24
"""Side of a cell of a heat map, and number of cells in a row."""
SIDES = (0, 6, 11, 16, 20, 0)
"""Side of the square in a cell, by level. So levels differ not only by their color."""


def sparkline(values: Sequence[float | None], label: str) -> SafeString:
    """Return a small line chart without axes, from value to value: None is not known."""
    known = [(place, value) for place, value in enumerate(values) if value is not None]
    top = max((value for _, value in known), default=0) or 1
    step = SPARK_WIDTH / max(1, len(values) - 1)
    points = [(f"{place * step:.1f}", SPARK_HEIGHT - 2 - value / top * (SPARK_HEIGHT - 4)) for place, value in known]
    line = " ".join(f"{x},{y:.1f}" for x, y in points)
    area = f"{points[0][0]},{SPARK_HEIGHT} {line} {points[-1][0]},{SPARK_HEIGHT}" if points else ""
    return format_html(
        '<svg class="mq-spark" viewBox="0 0 {} {}" role="img" aria-label="{}" preserveAspectRatio="none">'
        '<title>{}</title><polygon class="mq-area" points="{}"/><polyline class="mq-line" points="{}"/></svg>',
        SPARK_WIDTH,
        SPARK_HEIGHT,
        label,
        label,
        area,
        line,
    )


def strip(parts: Sequence[tuple[str, str, float]], label: str) -> SafeString:
    """Return one bar whose parts have the lengths of their values, and at least a visible one; with tooltips."""
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
class Cell:
    """A cell of a heat map."""

    level: int
    """0: nothing; 1 to 4: the larger, the more; 5: not known."""
    title: str
    href: str


def heat_map(cells: Sequence[Cell], label: str) -> SafeString:
    """Return rows of cells, each with a square that is larger the higher its level is.

    Cells with a level above 0 are links. The keyboard reaches them, but not the others.
    """
    shapes = []
    for place, cell in enumerate(cells):
        row, column = divmod(place, COLUMNS)
        inside = format_html("<title>{}</title>{}", cell.title, _cell(cell.level, column * CELL, row * CELL))
        if cell.level:
            shapes.append(format_html('<a href="{}" aria-label="{}">{}</a>', cell.href, cell.title, inside))
        else:
            shapes.append(format_html('<g aria-hidden="true">{}</g>', inside))
    return format_html(
        '<svg class="mq-heat" viewBox="0 0 {} {}" role="group" aria-label="{}">{}</svg>',
        COLUMNS * CELL,
        -(-len(cells) // COLUMNS) * CELL,
        label,
        format_html_join("", "{}", ((shape,) for shape in shapes)),
    )


def heat_key(level: int) -> SafeString:
    """Return a cell of a level for the legend."""
    return format_html(
        '<svg class="mq-heat-key" viewBox="0 0 {} {}" aria-hidden="true">{}</svg>', CELL, CELL, _cell(level, 0, 0)
    )


def _cell(level: int, x: int, y: int) -> SafeString:
    side = SIDES[level]
    frame = format_html(
        '<rect class="mq-cell mq-cell-{}" x="{}" y="{}" width="{}" height="{}"/>',
        level,
        x + 1,
        y + 1,
        CELL - 2,
        CELL - 2,
    )
    if not side:
        return frame
    at = (CELL - side) / 2
    return format_html(
        '{}<rect class="mq-level-{}" x="{}" y="{}" width="{}" height="{}"/>', frame, level, x + at, y + at, side, side
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
    """Return a chart of stacked bars with tooltips."""
    stacks = [sum(one.values[place] or 0 for one in series) for place in range(len(times))]
    top = nice(max(stacks, default=0))
    width = (WIDTH - LEFT) / max(1, len(times))
    size = f"{max(0.5, width - 1):.2f}"
    shapes = []
    for place, at in enumerate(times):
        x, base = f"{LEFT + place * width:.2f}", 0.0
        for one in series:
            if value := one.values[place]:
                height = value / top * RISE
                base += height
                shapes.append((one.css, x, f"{FLOOR - base:.2f}", size, f"{height:.2f}", at, one.name, f"{value:,.0f}"))
    inside = format_html_join(
        "",
        '<rect class="{}" x="{}" y="{}" width="{}" height="{}"><title>{} · {}: {}</title></rect>',
        shapes,
    )
    return _frame(inside, top, times, label, _number)


@dataclass(frozen=True, slots=True)
class Axis:
    """The axis of a line chart."""

    say: Callable[[float], str]
    """Formats a value."""
    end: Callable[[float], float]
    """Returns the end of the axis, at or above the highest value."""


def lines(series: Sequence[Series], times: Sequence[str], label: str, axis: Axis) -> SafeString:
    """Return a line chart. A value without neighbors is a dot, so that it is visible."""
    top = axis.end(max((value for one in series for value in one.values if value is not None), default=0))
    width = (WIDTH - LEFT) / max(1, len(times))
    runs, dots = [], []
    for one in series:
        run: list[str] = []
        for place, value in enumerate([*one.values, None]):
            if value is not None:
                y = FLOOR - value / top * RISE
                run.append(f"{LEFT + (place + 0.5) * width:.2f},{y:.2f}")
                continue
            if len(run) == 1:
                dots.append((one.css, *run[0].split(",")))
            elif run:
                runs.append((one.css, " ".join(run)))
            run = []
    inside = format_html(
        "{}{}",
        format_html_join("", '<polyline class="mq-line {}" points="{}"/>', runs),
        format_html_join("", '<circle class="{}" cx="{}" cy="{}" r="2.5"/>', dots),
    )
    return _frame(inside, top, times, label, axis.say)


def nice(highest: float) -> float:
    """Return the end of an axis: 1, 2 or 5 times a power of ten, at or above the highest value."""
    if highest <= 0:
        return 1.0
    power = 10.0 ** (len(str(int(highest))) - 1) if highest >= 1 else 0.1
    return next((power * step for step in (1, 2, 5, 10) if power * step >= highest), highest)


def nice_count(highest: float) -> float:
    """Return the end of an axis of numbers of messages: at least 2, so that the middle is a whole number, too."""
    return max(2.0, nice(highest))


NICE_SECONDS = (1, 2, 4, 10, 20, 60, 120, 240, 600, 1200, 3600, 7200, 14_400, 43_200, 86_400, 172_800)
"""Ends of axes of times of which the half is a short text, too."""


def nice_time(highest: float) -> float:
    """Return the end of an axis of times, in milliseconds."""
    if highest <= NICE_SECONDS[0] * 500:
        return max(2.0, nice(highest))
    found = next((seconds for seconds in NICE_SECONDS if seconds * 1000 >= highest), 0)
    return float(found * 1000) or nice(highest / 86_400_000) * 86_400_000


def _frame(inside: SafeString, top: float, times: Sequence[str], label: str, say: Callable[[float], str]) -> SafeString:
    """Return the chart with its axis, three grid lines, and the first, middle and last time."""
    grid = format_html_join(
        "",
        '<line class="mq-grid" x1="{}" x2="{}" y1="{}" y2="{}"/><text class="mq-tick mq-end" x="{}" y="{}">{}</text>',
        [
            (LEFT, WIDTH, y, y, LEFT - 5, y + 4, say(top * share))
            for share in (0.0, 0.5, 1.0)
            for y in (round(FLOOR - share * RISE, 1),)
        ],
    )
    width = (WIDTH - LEFT) / max(1, len(times))
    last = len(times) - 1
    places = sorted({0, len(times) // 2, last}) if times else []
    ticks = format_html_join(
        "",
        '<text class="mq-tick {}" x="{}" y="{}">{}</text>',
        [
            (
                "mq-end" if place == last else "",
                round(LEFT + (place + (place == last)) * width, 1),
                HEIGHT - 5,
                times[place],
            )
            for place in places
        ],
    )
    return format_html(
        '<svg class="mq-chart" viewBox="0 0 {} {}" role="img" aria-label="{}" data-left="{}">{}{}{}'
        '<line class="mq-cross" y1="{}" y2="{}" visibility="hidden"/></svg>',
        WIDTH,
        HEIGHT,
        label,
        LEFT,
        grid,
        inside,
        ticks,
        TOP,
        FLOOR,
    )


def _time(milliseconds: float) -> str:
    return duration(milliseconds / 1000)


def _number(value: float) -> str:
    if value >= 1_000_000:
        return f"{_digits(value / 1_000_000)}M"
    return f"{_digits(value / 1000)}k" if value >= 10_000 else _digits(value)


def _digits(value: float) -> str:
    return number_format(f"{value:g}")


TIMES = Axis(_time, nice_time)
COUNTS = Axis(_number, nice_count)
RATES = Axis(_number, nice)
