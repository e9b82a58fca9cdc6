"""Draw charts as HTML and SVG that fit any width and follow the page's colors. Texts are escaped by ``Markup``."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from pyspark_mysqlqueue.report import words

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MOST_BARS = 150
STEPS = (1, 7, 28, 364)
"""Possible lengths of a bar over time, in days."""
RECT = Markup('<rect class="{}" x="{:.3f}" y="{:.3f}" width="{:.3f}" height="{:.3f}"><title>{}</title></rect>')
LINE = Markup('<line class="{}" x1="{:.3f}" y1="{:.3f}" x2="{:.3f}" y2="{:.3f}"/>')
LABEL = Markup('<span style="{}:{:.3f}%">{}</span>')


def step_for(days: int) -> int:
    """Return the shortest step that divides a period into at most ``MOST_BARS`` bars."""
    return next((step for step in STEPS if days <= step * MOST_BARS), STEPS[-1])


def bars(
    values: Mapping[datetime.date, Mapping[str, int]],
    names: Sequence[str],
    text: str,
    *,
    step: int,
    line: Sequence[tuple[datetime.date, float]] = (),
) -> Markup:
    """Return a chart of stacked bars over time.

    Args:
        values: The first day of each bar → series → value.
        names: The series, from bottom to top.
        text: The description, for screen readers.
        step: The number of days of a bar.
        line: Two days and the values there, of a dashed line.
    """
    first, last = min(values), max(values)
    count = (last - first).days // step + 1
    top = _round(max([*(sum(one.values()) for one in values.values()), *(value for _, value in line), 2]))
    width = 100 / count
    marks = [LINE.format("grid", 0, at, 100, at) for at in (0, 50, 100)]
    for day, parts in sorted(values.items()):
        base = 0
        x = (day - first).days / step * width
        for number, name in enumerate(names, 1):
            value = parts.get(name, 0)
            base += value
            if value:
                tip = f"{day} · {words.shown(name, 40)}: {value:,} messages"
                y = 100 - 100 * base / top
                marks.append(RECT.format(f"c{number}", x + width * 0.08, y, width * 0.84, 100 * value / top, tip))
    if line:
        points = [((day - first).days / step * width, 100 - 100 * value / top) for day, value in line]
        marks.append(
            LINE.format("trend", points[0][0] + width / 2, points[0][1], points[1][0] + width / 2, points[1][1])
        )
    every = -(-count // 6)
    days = [first + datetime.timedelta(days=number * step) for number in range(0, count, every)]
    below = [LABEL.format("left", (number * every + 0.5) * width, day.isoformat()) for number, day in enumerate(days)]
    beside = [LABEL.format("bottom", share, words.short(top * share / 100)) for share in (0, 50, 100)]
    key = Markup('<p class="key">{}</p>').format(
        Markup("").join(
            Markup('<span class="c{}">{}</span>').format(number, words.shown(name, 40))
            for number, name in enumerate(names, 1)
        )
    )
    return (key if len(names) > 1 else Markup("")) + _plot(marks, below, beside, text, "0 0 100 100")


def heat(values: Mapping[tuple[int, int], float], text: str) -> Markup:
    """Return a chart of weekdays and hours, in five shades. Missing hours are blank.

    Args:
        values: (weekday, hour) → value. Weekday 1 is Monday.
        text: The description, for screen readers.
    """
    top = max(values.values())
    marks = []
    for (day, hour), value in sorted(values.items()):
        tip = f"{DAYS[day - 1]}, {hour:02}:00 to {(hour + 1) % 24:02}:00 UTC: {value:,.0f} messages on average"
        shade = min(5, 1 + int(5 * value / top))
        marks.append(RECT.format(f"h{shade}", hour + 0.04, day - 1 + 0.05, 0.92, 0.9, tip))
    below = [LABEL.format("left", (hour + 0.5) / 0.24, f"{hour:02}") for hour in range(0, 24, 3)]
    beside = [LABEL.format("bottom", (6.5 - number) / 0.07, day[:3]) for number, day in enumerate(DAYS)]
    return _plot(marks, below, beside, text, "0 0 24 7")


def rows(values: Sequence[tuple[str, int, str]]) -> Markup:
    """Return a chart of horizontal bars.

    Args:
        values: (label, value, value as text).
    """
    top = max(value for _, value, _ in values)
    item = Markup('<li><span class="label">{}</span><span class="bar"><i style="width:{:.2f}%"></i></span>{}</li>')
    return Markup('<ul class="rows">{}</ul>').format(
        Markup("").join(item.format(words.shown(label, 60), 100 * value / top, text) for label, value, text in values)
    )


def _plot(marks: Sequence[Markup], below: Sequence[Markup], beside: Sequence[Markup], text: str, box: str) -> Markup:
    return Markup(
        '<div class="plot"><div class="y" aria-hidden="true">{}</div><svg role="img" aria-label="{}" viewBox="{}" '
        'preserveAspectRatio="none">{}</svg><div class="x" aria-hidden="true">{}</div></div>'
    ).format(Markup("").join(beside), text, box, Markup("").join(marks), Markup("").join(below))


def _round(value: float) -> float:
    """Return the next number of a form such as 1, 1.5, 2 or 3 times a power of ten."""
    power = 10 ** (len(str(int(value))) - 1)
    return next(float(factor * power) for factor in (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 20) if value <= factor * power)
