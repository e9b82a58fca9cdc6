"""The charts of a group: backlog, rates, latency and errors over time, with one table of all their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin import charts
from django_mysqlqueue.admin.formatting import clock, date, day, latency_text
from django_mysqlqueue.inspection.trends import SPANS, Point
from django_mysqlqueue.text.humanize import duration, messages_per_second

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
    read: Callable[[Point], Any]
    """Returns its value at a point, or None if there is none."""
    say: Callable[[Any], str]
    number: Callable[[Any], float] = float

    def value(self, point: Point) -> float | None:
        """Return the number in the chart."""
        found = self.read(point)
        return None if found is None else self.number(found)

    def text(self, point: Point) -> str:
        """Return the text in the table."""
        found = self.read(point)
        return "-" if found is None else self.say(found)


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


def _plots() -> list[tuple[str, str, charts.Axis, list[Quantity]]]:
    backlog = [
        Quantity(_("backlog"), "mq-p50", attrgetter("backlog"), str, attrgetter("value")),
        Quantity(_("oldest"), "", attrgetter("oldest_ms"), lambda ms: duration(ms / 1000)),
    ]
    rates = [
        Quantity(_("in/s"), "mq-p50", attrgetter("entered"), messages_per_second),
        Quantity(_("out/s"), "mq-done", attrgetter("settled"), messages_per_second),
    ]
    latency = [
        Quantity(name, f"mq-{name}", attrgetter(name), latency_text, attrgetter("ms")) for name in ("p50", "p95")
    ]
    errors = [
        Quantity(_("failed"), "mq-p95", attrgetter("failed"), "{:,}".format),
        Quantity(_("dead-lettered"), "mq-lost", attrgetter("dead_lettered"), "{:,}".format),
    ]
    return [
        ("backlog", _("Backlog"), charts.COUNTS, backlog),
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
    columns: list[list[str]] = []
    for id_, title, axis, quantities in _plots():
        first = len(head) + 1
        legend = []
        for quantity in quantities:
            texts = [quantity.text(point) for point in points]
            head.append(quantity.name)
            columns.append(texts)
            legend.append((quantity.css, quantity.name, next((text for text in reversed(texts) if text != "-"), "-")))
        series = [
            charts.Series(quantity.name, quantity.css, [quantity.value(point) for point in points])
            for quantity in quantities
            if quantity.css
        ]
        label = _("%(title)s over time: %(names)s") % {"title": title, "names": ", ".join(one.name for one in series)}
        numbers = ",".join(str(first + number) for number in range(len(quantities)))
        plots.append(Plot(id_, title, legend, charts.lines(series, ticks, label, axis), numbers))
    rows = [
        Row(point.at, place, times[place], [texts[place] for texts in columns]) for place, point in enumerate(points)
    ]
    return History([(one, str(text)) for one, text in TITLES.items()], name, plots, head, rows[::-1])
