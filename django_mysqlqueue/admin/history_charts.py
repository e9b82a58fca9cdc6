"""The charts of a group: backlog, rates, latency and errors over time, with one table of all their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin import charts
from django_mysqlqueue.admin.formatting import clock, date, day, latency_text
from django_mysqlqueue.inspection.trends import SPANS, Point
from django_mysqlqueue.service.rollups import Percentile
from django_mysqlqueue.text.humanize import duration, messages_per_second

T = TypeVar("T")

TITLES = {
    "15m": gettext_lazy("15 min"),
    "1h": gettext_lazy("1 h"),
    "6h": gettext_lazy("6 h"),
    "24h": gettext_lazy("24 h"),
    "7d": gettext_lazy("7 d"),
}
"""By name in ``SPANS``."""
DEFAULT = "1h"


class Quantity(NamedTuple):
    """A quantity of the table."""

    name: str
    css: str
    """CSS class of its line in the chart; empty if it has none."""
    value: Callable[[Point], float | None]
    text: Callable[[Point], str]


@dataclass(frozen=True, slots=True)
class Plot:
    """A chart with its legend."""

    id: str
    title: str
    legend: list[tuple[str, str, str]]
    """The CSS class, name and latest value of each quantity."""
    picture: SafeString
    columns: str
    """The columns of the table that the crosshair shows."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table."""

    at: int
    """When it begins, in epoch milliseconds."""
    place: int
    """Its place in the charts, from 0."""
    time: str
    cells: list[str]


@dataclass(frozen=True, slots=True)
class History:
    """The charts of a group and their table."""

    spans: list[tuple[str, str]]
    """Name and title of each."""
    span: str
    plots: list[Plot]
    head: list[str]
    rows: list[Row]
    """Newest first."""


def _counted(name: str, css: str, value: Callable[[Point], int | None]) -> Quantity:
    return Quantity(name, css, value, lambda one: _text(value(one), lambda number: f"{number:,}"))


def _rate(name: str, css: str, value: Callable[[Point], float | None]) -> Quantity:
    return Quantity(name, css, value, lambda one: _text(value(one), messages_per_second))


def _latency(name: str, css: str, value: Callable[[Point], Percentile | None]) -> Quantity:
    def bound(one: Point) -> float | None:
        found = value(one)
        return None if found is None else found.ms

    return Quantity(name, css, bound, lambda one: latency_text(value(one)))


def _text(value: T | None, say: Callable[[T], str]) -> str:
    return "-" if value is None else say(value)


def _plots() -> list[tuple[str, str, charts.Axis, list[Quantity]]]:
    backlog = Quantity(
        _("backlog"),
        "mq-p50",
        lambda one: None if one.backlog is None else one.backlog.value,
        lambda one: _text(one.backlog, str),
    )
    oldest = Quantity(
        _("oldest"), "", lambda one: one.oldest_ms, lambda one: _text(one.oldest_ms, lambda ms: duration(ms / 1000))
    )
    rates = [_rate(_("in/s"), "mq-p50", lambda one: one.entered), _rate(_("out/s"), "mq-done", lambda one: one.settled)]
    latency = [_latency("p50", "mq-p50", lambda one: one.p50), _latency("p95", "mq-p95", lambda one: one.p95)]
    errors = [
        _counted(_("failed"), "mq-p95", lambda one: one.failed),
        _counted(_("dead-lettered"), "mq-lost", lambda one: one.dead_lettered),
    ]
    return [
        ("backlog", _("Backlog"), charts.COUNTS, [backlog, oldest]),
        ("rates", _("Messages per second"), charts.RATES, rates),
        ("latency", _("Latency, from entering the log to the ack"), charts.TIMES, latency),
        ("errors", _("Errors"), charts.COUNTS, errors),
    ]


def make_history(name: str, points: Sequence[Point]) -> History:
    """Return the charts of a group.

    ``name``: name of the span, in ``SPANS``.
    """
    span = SPANS[name]
    has_dates = span.length * span.points > 86_400
    times = [f"{date(one.at)} {clock(one.at)}" if has_dates else clock(one.at) for one in points]
    ticks = [day(one.at) for one in points] if has_dates else times
    plots: list[Plot] = []
    head: list[str] = []
    texts: list[list[str]] = [[] for _point in points]
    for id_, title, axis, quantities in _plots():
        first = len(head) + 1
        legend = []
        for one in quantities:
            head.append(one.name)
            said = [one.text(point) for point in points]
            for cells, text in zip(texts, said, strict=True):
                cells.append(text)
            legend.append((one.css, one.name, next((text for text in reversed(said) if text != "-"), "-")))
        series = [
            charts.Series(one.name, one.css, [one.value(point) for point in points]) for one in quantities if one.css
        ]
        names = ", ".join(one.name for one in series)
        label = _("%(title)s over time: %(names)s") % {"title": title, "names": names}
        columns = ",".join(str(first + number) for number in range(len(quantities)))
        plots.append(Plot(id_, title, legend, charts.lines(series, ticks, label, axis), columns))
    found = enumerate(zip(points, times, texts, strict=True))
    rows = [Row(point.at, place, time, cells) for place, (point, time, cells) in found]
    return History([(one, str(text)) for one, text in TITLES.items()], name, plots, head, rows[::-1])
