"""Draw charts as SVG with Vega-Lite, which vl-convert contains. Needs no browser, script or network.

Colors are CSS variables of the page, so that a chart suits the light and the dark scheme. Each chart is drawn for a
wide and for a narrow page, because the text of a scaled chart would be too small to read.
"""

from __future__ import annotations

import datetime
import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

import vl_convert

from pyspark_mysqlqueue.report import words
from pyspark_mysqlqueue.report.model import Picture

WIDE, NARROW = 860, 330
"""Width of a chart in pixels."""
COLORS = tuple(f"var(--c{number})" for number in range(1, 7))
PERCENTILES = ("p50", "p90", "p99")
HEAT = tuple(f"var(--h{number})" for number in range(1, 6))
VERSION = "6.4"
"""The version of Vega-Lite."""
DURATION = (
    "datum.value < 1000 ? datum.value + ' ms' : datum.value < 60000 ? datum.value / 1000 + ' s' : "
    "datum.value < 3600000 ? datum.value / 60000 + ' min' : datum.value / 3600000 + ' h'"
)
DURATIONS = (1, 10, 100, 1000, 10_000, 60_000, 600_000, 3_600_000, 36_000_000, 360_000_000)
"""The ticks of a logarithmic axis, in milliseconds."""
TIME = (
    "utchours(datum.value) + utcminutes(datum.value) + utcseconds(datum.value) == 0 ? utcFormat(datum.value, '%d %b') "
    ": utcFormat(datum.value, utcseconds(datum.value) == 0 ? '%H:%M' : '%H:%M:%S')"
)
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
"""Fonts of nearly the same width on all systems, because labels are laid out before the reader's fonts are known."""
CONFIG: Mapping[str, Any] = {
    "background": None,
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "gridColor": "var(--line)",
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
        "labelLimit": 220,
    },
    "axisX": {"grid": False},
    "axisY": {"domain": False, "ticks": False, "labelPadding": 6},
    "legend": {
        "labelColor": "var(--ink)",
        "orient": "top",
        "title": None,
        "labelFontSize": 12,
        "symbolType": "square",
        "labelLimit": 200,
        "columnPadding": 24,
    },
    "line": {"strokeWidth": 2},
}

Row = Mapping[str, Any]


def picture(title: str, text: str, spec: Mapping[str, Any], *, height: int = 240) -> Picture:
    """Draw a chart in both widths.

    Args:
        title: The title.
        text: The description, for screen readers.
        spec: A Vega-Lite specification without size and configuration.
        height: The height in pixels, unless the specification has one.
    """
    return Picture(title, text, *(_svg(spec, text, width, height) for width in (WIDE, NARROW)))


def _svg(spec: Mapping[str, Any], text: str, width: int, height: int) -> str:
    small = width == NARROW
    config = {**CONFIG, "legend": {**CONFIG["legend"], "columns": 2 if small else 6}}
    if small:
        config["axis"] = {
            **CONFIG["axis"],
            "labelLimit": 110,
            "labelOverlap": True,
            "labelSeparation": 10,
            "tickCount": 4,
        }
    fit = "fit-x" if "height" in spec else "fit"  # a specification with rows of a fixed height has its own height
    full = {
        "height": height,
        **spec,
        "width": width,
        # The labels of rows may be wider in the browser's font than in the layout.
        "padding": {"left": 16, "right": 8, "top": 4, "bottom": 4} if fit == "fit-x" else 4,
        "autosize": {"type": fit, "contains": "padding"},
        "config": config,
    }
    # URLs in the data are treated as text: allow no requests.
    made = vl_convert.vegalite_to_svg(full, vl_version=VERSION, allowed_base_urls=[])
    return _for_page(made, text)


_MARK = re.compile(
    r'<(path|text|line|rect) aria-label="([^"]*)" role="graphics-symbol" aria-roledescription="[^"]*"([^>]*?)/>'
)
_ROLES = re.compile(r' (?:role="graphics-[a-z]+"|aria-roledescription="[^"]*"|aria-label="[^"]*"|aria-hidden="true")')


def _for_page(svg: str, text: str) -> str:
    """Give the SVG one accessible name. Vega's label of each mark becomes its tooltip."""
    svg = _MARK.sub(r"<\1\3><title>\2</title></\1>", svg)
    head, rest = svg.split(">", 1)
    head = re.sub(r' xmlns:xlink="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{html.escape(text)}">{_ROLES.sub("", rest)}'


def milliseconds(moment: datetime.datetime) -> int:
    """Return a time in epoch milliseconds."""
    return round(moment.timestamp() * 1000)


TICKS = (1, 5, 15, 30, 60, 300, 900, 1800, 3600, 10_800, 21_600, 43_200, 86_400, 172_800, 604_800, 2_419_200)
"""Possible distances of the ticks of a time axis, in seconds."""
MOST_TICKS = 10


def _ticks(times: Sequence[int]) -> list[int]:
    """Return ticks at round times between the first and the last of ``times`` (milliseconds)."""
    first, last = min(times, default=0), max(times, default=0)
    seconds = next((one for one in TICKS if (last - first) / 1000 <= one * MOST_TICKS), TICKS[-1])
    length = seconds * 1000
    return list(range(-(-first // length) * length, last + 1, length)) or [first]


def _time(field: str, times: Sequence[int]) -> dict[str, Any]:
    return {
        "field": field,
        "type": "temporal",
        "scale": {"type": "utc"},
        "axis": {
            "title": None,
            "labelExpr": TIME,
            "labelOverlap": True,
            "labelSeparation": 12,
            "values": _ticks(times),
        },
    }


def _color(names: Sequence[str]) -> dict[str, Any]:
    return {
        "field": "series",
        "type": "nominal",
        "scale": {"domain": list(names), "range": list(COLORS)},
        "legend": {} if len(names) > 1 else None,
    }


TIP = {"field": "tip", "type": "nominal"}


def stacked(
    rows: Sequence[tuple[datetime.datetime, str, float]], names: Sequence[str], *, seconds: int, unit: str
) -> dict[str, Any]:
    """Return a chart of stacked bars over time.

    Args:
        rows: (begin, series, value) in any order.
        names: The series, from bottom to top.
        seconds: The length of a step.
        unit: The unit of the values, for tooltips.
    """
    base: dict[datetime.datetime, float] = {}
    values = []
    for at, series, value in sorted(rows, key=lambda row: (row[0], names.index(row[1]))):
        low = base.get(at, 0.0)
        base[at] = low + value
        start = milliseconds(at)
        values.append(
            {
                "start": start,
                "end": start + seconds * 1000,
                "low": low,
                "high": low + value,
                "series": words.shown(series, 40),
                "tip": f"{words.moment(at)} · {words.shown(series, 40)}: {words.number(value)} {unit}",
            }
        )
    return {
        "data": {"values": values},
        "mark": {"type": "bar", "strokeWidth": 0},
        "encoding": {
            "x": _time("start", [milliseconds(at) for at, _, _ in rows]),
            "x2": {"field": "end"},
            "y": {"field": "low", "type": "quantitative", "axis": {"title": None, "tickCount": 4, "format": "~s"}},
            "y2": {"field": "high"},
            "color": _color([words.shown(one, 40) for one in names]),
            "description": TIP,
        },
    }


def lines(
    rows: Sequence[tuple[datetime.datetime, str, float]],
    names: Sequence[str],
    *,
    written: Any,
    logarithmic: bool = False,
    steps: bool = False,
) -> dict[str, Any]:
    """Return a chart of lines over time. Invisible points carry the tooltips.

    Args:
        rows: (time, series, value).
        names: The series.
        written: Formats a value.
        logarithmic: Use a logarithmic axis for values.
        steps: Draw steps instead of straight lines.
    """
    lowest = 1.0 if logarithmic else 0.0
    values = [
        {
            "at": milliseconds(at),
            "value": max(lowest, value),
            "series": words.shown(series, 40),
            "tip": f"{words.moment(at)} · {words.shown(series, 40)}: {written(value)}",
        }
        for at, series, value in rows
    ]
    axis: dict[str, Any] = {"title": None, "tickCount": 4}
    axis |= {"labelExpr": DURATION} if written is words.duration else {"format": "~s"}
    scale: dict[str, Any] = {"zero": True}
    if logarithmic:
        scale, axis["values"] = {"type": "log", "nice": True}, DURATIONS
    encoding = {
        "x": _time("at", [milliseconds(at) for at, _, _ in rows]),
        "y": {"field": "value", "type": "quantitative", "axis": axis, "scale": scale},
        "color": _color([words.shown(one, 40) for one in names]),
    }
    few = len(values) <= 3 * len(names)
    return {
        "data": {"values": values},
        "layer": [
            {
                "mark": {"type": "line", "interpolate": "step-before" if steps else "linear"},
                "encoding": encoding,
            },
            {
                "mark": {"type": "point", "size": 60, "filled": True, "opacity": 1 if few else 0},
                "encoding": {**encoding, "description": TIP},
            },
        ],
    }


def curves(rows: Sequence[tuple[float, str, float]], names: Sequence[str], x: str, y: str) -> dict[str, Any]:
    """Return a chart of cumulative shares, with the diagonal of an even distribution.

    Args:
        rows: (share on the x axis, series, share on the y axis).
        names: The series.
        x: The title of the x axis.
        y: The title of the y axis.
    """
    values = [
        {
            "x": across,
            "value": up,
            "series": words.shown(series, 40),
            "tip": f"{words.shown(series, 40)}: the largest {words.share(across)} have {words.share(up)}",
        }
        for across, series, up in rows
    ]

    def percent(field: str, title: str) -> dict[str, Any]:
        axis = {"title": title, "format": "%", "tickCount": 5}
        return {"field": field, "type": "quantitative", "axis": axis, "scale": {"domain": [0, 1]}}

    encoding = {"x": percent("x", x), "y": percent("value", y), "color": _color([words.shown(n, 40) for n in names])}
    return {
        "data": {"values": values},
        "layer": [
            {
                "data": {"values": [{"x": 0, "value": 0}, {"x": 1, "value": 1}]},
                "mark": {"type": "line", "color": "var(--muted)", "strokeDash": [3, 4], "strokeWidth": 1},
                "encoding": {"x": percent("x", x), "y": percent("value", y)},
            },
            {"mark": {"type": "line"}, "encoding": encoding},
            {
                "mark": {"type": "point", "size": 40, "filled": True, "opacity": 0},
                "encoding": {**encoding, "description": TIP},
            },
        ],
    }


def bars(rows: Sequence[tuple[str, str, float, str]], names: Sequence[str]) -> dict[str, Any]:
    """Return a chart of horizontal bars, stacked if a label has several series.

    Args:
        rows: (label, series, value, tooltip) in the order of the bars.
        names: The series.
    """
    labels = list(dict.fromkeys(label for label, _, _, _ in rows))
    values = [
        {"label": words.shown(label, 60), "series": words.shown(series, 40), "value": value, "tip": tip, "order": place}
        for place, (label, series, value, tip) in enumerate(rows)
    ]
    return {
        "data": {"values": values},
        "height": {"step": 26},
        "mark": {"type": "bar", "height": {"band": 0.72}},
        "encoding": {
            "y": {
                "field": "label",
                "type": "nominal",
                "sort": list(dict.fromkeys(words.shown(label, 60) for label in labels)),
                "axis": {"title": None},
            },
            "x": {
                "field": "value",
                "type": "quantitative",
                "axis": {"title": None, "grid": True, "format": "~s", "tickCount": 5},
            },
            "order": {"field": "order", "type": "quantitative"},
            "color": _color([words.shown(one, 40) for one in names]),
            "description": TIP,
        },
    }


def ranges(rows: Sequence[tuple[str, float, float, float, bool, str]]) -> dict[str, Any]:
    """Return a chart with three percentiles per row.

    Args:
        rows: (label, 50th, 90th and 99th percentile in milliseconds, whether they are exact, tooltip).
    """
    dots, spans = [], []
    for label, *values, exact, tip in rows:
        text = words.shown(label, 60)
        spans.append({"label": text, "low": max(1, values[0]), "high": max(1, values[2]), "tip": tip})
        dots += [
            {
                "label": text,
                "value": max(1, value),
                "series": series,
                "known": "exact" if exact else "bound",
                "tip": f"{text}, {series}: {'' if exact else 'at most '}{words.duration(value)}",
            }
            for series, value in zip(PERCENTILES, values, strict=True)
        ]
    y = {"field": "label", "type": "nominal", "sort": [row["label"] for row in spans], "axis": {"title": None}}
    axis = {"title": None, "grid": True, "labelExpr": DURATION, "values": DURATIONS}
    scale = {"type": "log", "nice": True}
    return {
        "height": {"step": 40},
        "layer": [
            {
                "data": {"values": spans},
                "mark": {"type": "rule", "strokeWidth": 3, "color": "var(--line)"},
                "encoding": {
                    "y": y,
                    "x": {"field": "low", "type": "quantitative", "axis": axis, "scale": scale},
                    "x2": {"field": "high"},
                },
            },
            {
                "data": {"values": dots},
                "mark": {"type": "point", "size": 110, "strokeWidth": 2, "opacity": 1},
                "encoding": {
                    "y": y,
                    "x": {"field": "value", "type": "quantitative", "axis": axis, "scale": scale},
                    "color": _color(PERCENTILES),
                    "fill": {
                        "condition": {"test": "datum.known == 'bound'", "value": "var(--paper)"},
                        "field": "series",
                        "type": "nominal",
                        "scale": {"domain": list(PERCENTILES), "range": list(COLORS)},
                        "legend": None,
                    },
                    "description": TIP,
                },
            },
        ],
    }


DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def heat(values: Mapping[tuple[int, int], float], written: Any) -> dict[str, Any]:
    """Return a chart of weekdays and hours, in five shades. Missing hours are blank.

    Args:
        values: (weekday, hour) → value. Weekday 1 is Monday.
        written: Formats a value.
    """
    cells = [
        {
            "day": DAYS[day - 1],
            "hour": hour,
            "value": value,
            "tip": f"{DAYS[day - 1]}, {hour:02}:00 to {(hour + 1) % 24:02}:00 UTC: {written(value)}",
        }
        for (day, hour), value in sorted(values.items())
    ]
    return {
        "data": {"values": cells},
        "height": {"step": 26},
        "mark": {"type": "rect", "stroke": "var(--paper)", "strokeWidth": 2, "cornerRadius": 3},
        "encoding": {
            "x": {
                "field": "hour",
                "type": "ordinal",
                "scale": {"domain": list(range(24))},
                "axis": {
                    "title": "hour (UTC)",
                    "labelAngle": 0,
                    "values": [0, 3, 6, 9, 12, 15, 18, 21],
                    "domain": False,
                    "ticks": False,
                },
            },
            "y": {
                "field": "day",
                "type": "ordinal",
                "scale": {"domain": list(DAYS)},
                "axis": {"title": None, "labelExpr": "slice(datum.label, 0, 3)"},
            },
            "color": {
                "field": "value",
                "type": "quantitative",
                "scale": {"type": "quantize", "domain": [0, max(values.values(), default=1) or 1], "range": list(HEAT)},
                "legend": None,
            },
            "description": TIP,
        },
    }


def days(rows: Sequence[tuple[datetime.date, float]], line: Sequence[tuple[datetime.date, float]]) -> dict[str, Any]:
    """Return a chart with a bar per day, and a line.

    Args:
        rows: (day, value) of the bars.
        line: (day, value) of the line's points.
    """

    def start(day: datetime.date) -> int:
        return milliseconds(datetime.datetime.combine(day, datetime.time(), datetime.timezone.utc))

    length = 86_400_000
    bars_ = [
        {
            "start": start(day) + length // 12,
            "end": start(day) + length - length // 12,
            "value": value,
            "tip": f"{day}: {words.number(value)} messages",
        }
        for day, value in rows
    ]
    points = [{"start": start(day) + length // 2, "value": value} for day, value in line]
    y = {"type": "quantitative", "axis": {"title": None, "tickCount": 4, "format": "~s"}}
    x = _time("start", [start(day) for day, _ in rows])
    return {
        "layer": [
            {
                "data": {"values": bars_},
                "mark": {"type": "bar", "color": COLORS[0]},
                "encoding": {
                    "x": x,
                    "x2": {"field": "end"},
                    "y": {"field": "value", **y},
                    "y2": {"datum": 0},
                    "description": TIP,
                },
            },
            {
                "data": {"values": points},
                "mark": {"type": "line", "color": COLORS[1], "strokeDash": [6, 4]},
                "encoding": {"x": x, "y": {"field": "value", **y}},
            },
        ],
    }
