"""The first page: key numbers, problems, charts and groups; or the state of each database, if there are several."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin import causes, charts
from django_mysqlqueue.admin.causes import ShownCause
from django_mysqlqueue.admin.formatting import clock, latency_text
from django_mysqlqueue.admin.group_table import in_order
from django_mysqlqueue.admin.history_charts import Row
from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.admin.permissions import visible
from django_mysqlqueue.admin.status import worst
from django_mysqlqueue.inspection import QueueOverview, QueueStatus
from django_mysqlqueue.inspection.causes import QueueState, unavailable
from django_mysqlqueue.inspection.trends import passed_texts, read_rows
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service import rollups
from django_mysqlqueue.service.rollups import HOUR, MINUTE, Bucket
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.sql.several import Unread, read_each
from django_mysqlqueue.text.humanize import duration

SPANS = {"hour": (MINUTE, 60), "day": (HOUR, 24)}
"""For each span: seconds per bucket, and number of buckets in a chart."""
CSS = {"ok": "mq-ok", "degraded": "mq-warn", "stopped": "mq-bad"}
"""By state, the class of its name."""


@dataclass(frozen=True, slots=True)
class Card:
    """A number in the first row."""

    name: str
    value: str
    link: str = ""
    alarming: bool = False


@dataclass(frozen=True, slots=True)
class Summary:
    """The state of one database in short."""

    cards: list[Card]
    status: QueueStatus
    causes: list[ShownCause]


class OverviewPage(Page):
    """The overview of one database."""

    name = "changelist"
    title = gettext_lazy("Overview")
    template = "overview.html"
    shows_several_topics = True

    def heading(self) -> str:
        return _("Dashboard")

    def context(self) -> dict[str, Any]:
        read = self.read_state()
        found, summary = read.overview, self.summary(read)
        session = self.session
        span = self.text("span")
        span = span if span in SPANS else "hour"
        grain, number = SPANS[span]
        rows, columns = in_order(read_rows(found, read.problems), self.text("sort"))
        return {
            "overview": found,
            "cards": summary.cards,
            "banner": causes.banner(self.dashboard, summary.status, self.errors),
            **causes.split(summary.causes),
            "rows": rows,
            "columns": columns,
            "span": span,
            "spans": [("hour", _("last hour")), ("day", _("last day"))],
            **self._charts(self._buckets(session, grain, found.now - grain * number * 1000), grain, number, found.now),
        }

    def summary(self, read: QueueState, *, alias: str = "") -> Summary:
        """Return in short what was read."""
        found = causes.shown(self.dashboard, read.causes, read.overview.now, self.errors, alias=alias)
        return Summary(self._cards(read.overview), read.status, found)

    def unread(self, reason: str) -> Summary:
        """Return in short that the database could not be read."""
        status = unavailable(self.using, reason)
        found = [] if status.cause is None else [status.cause]
        return Summary([], status, causes.shown(self.dashboard, found, 0, self.errors, alias=self.using))

    def _buckets(self, session: Session, grain: int, since: int) -> list[Bucket]:
        return [one for one in rollups.sums(session, grain, since) if self.may_view(one.ref.topic)]

    def _cards(self, found: QueueOverview) -> list[Card]:
        to = self.dashboard.url
        sees_all = self.topics_to_view() is None
        dead_letters = to("deadletters") if sees_all else ""
        backlog = Card(_("backlog"), str(found.lag))
        of_groups = [
            Card(_("in flight"), str(found.in_flight), to("inflight")),
            Card(_("retrying"), str(found.retrying), to("deadletters", state="retrying")),
            Card(_("dead letters"), str(found.dead_letters), dead_letters, bool(found.dead_letters)),
        ]
        if not sees_all:
            return [backlog, *of_groups]
        oldest = [at for at in (found.oldest_at, found.outbox.waiting_since) if at is not None]
        waits = duration((found.now - min(oldest)) / 1000) if oldest else "-"
        took, limit = found.slowest_round_trip, get_settings().health.max_round_trip
        return [
            backlog,
            Card(_("oldest unsettled message"), waits),
            *of_groups,
            Card(_("due in the outbox"), str(found.outbox.waiting)),
            Card(_("scheduled"), str(found.outbox.scheduled), to("scheduled")),
            Card(
                _("live subscribers"),
                str(len(found.live)),
                to("inflight"),
                bool(found.lag or found.outbox.waiting) and not found.live,
            ),
            Card(
                _("slowest round trip (p50, p95)"),
                "-" if took is None else f"{duration(took.p50)}, {duration(took.p95)}",
                to("inflight"),
                took is not None and limit is not None and took.p50 > limit,
            ),
        ]

    @staticmethod
    def _charts(buckets: list[Bucket], grain: int, number: int, now: int) -> dict[str, Any]:
        """Return the charts of throughput and latency, over all groups."""
        first = now // (grain * 1000) - number + 1
        sums = [[0, 0, 0] for _place in range(number)]
        latency = [list(rollups.NO_LATENCY) for _place in range(number)]
        passed = Counter[str]()
        for bucket in buckets:
            place = bucket.at // (grain * 1000) - first
            if 0 <= place < number:
                passed += bucket.passed
                for kind, count in enumerate((bucket.acked, bucket.failed, bucket.dead_lettered)):
                    sums[place][kind] += count
                latency[place] = [a + b for a, b in zip(latency[place], bucket.latency, strict=True)]
        times = [clock((first + place) * grain * 1000) for place in range(number)]
        kinds = ((_("acked"), "mq-acked"), (_("failed"), "mq-failed"), (_("dead-lettered"), "mq-dead"))
        counted = [charts.Series(name, css, [one[kind] for one in sums]) for kind, (name, css) in enumerate(kinds)]
        found = {share: [rollups.percentile(one, share) for one in latency] for share in (0.5, 0.95)}
        percentiles = [
            charts.Series(name, f"mq-{name}", [None if one is None else one.ms for one in found[share]])
            for name, share in (("p50", 0.5), ("p95", 0.95))
        ]
        values = [
            Row(
                (first + place) * grain * 1000,
                place,
                times[place],
                [*(f"{count:,}" for count in sums[place]), *(latency_text(one[place]) for one in found.values())],
            )
            for place in range(number)
        ]
        whole = [sum(column) for column in zip(*latency, strict=True)]
        return {
            "throughput": charts.bars(counted, times, _("Deliveries over time: acked, failed, dead-lettered")),
            "latency": charts.lines(
                percentiles, times, _("Latency from entering the log to the ack, over time: p50 and p95"), charts.TIMES
            ),
            "values": values[::-1],
            "totals": [f"{sum(column):,}" for column in zip(*sums, strict=True)],
            "passed": passed_texts(passed),
            "p50": latency_text(rollups.percentile(whole, 0.5)),
            "p95": latency_text(rollups.percentile(whole, 0.95)),
            "throughput_heading": _("Deliveries per minute") if grain == MINUTE else _("Deliveries per hour"),
        }


@dataclass(frozen=True, slots=True)
class DatabaseRow:
    """A database in the table."""

    alias: str
    link: str
    state: str
    css: str
    cards: list[Card]
    """Its numbers; empty if it could not be read."""


class DatabasesPage(OverviewPage):
    """The overview: of one database, or of all if there are several and the query string names none."""

    shows_all_databases = True

    def context(self) -> dict[str, Any]:
        if self.dashboard.database or not self.dashboard.databases:
            return super().context()
        self.template = "databases.html"
        found = self._summaries()
        shown = [cause for one in found.values() for cause in one.causes]
        alias, status = worst({alias: one.status for alias, one in found.items()})
        return {
            "banner": causes.banner(self.dashboard.on(alias), status, self.errors),
            "headings": next((one.cards for one in found.values() if one.cards), []),
            "rows": [self._database_row(alias, one) for alias, one in found.items()],
            **causes.split(sorted(shown, key=lambda one: one.cause.rank)),
        }

    def _summaries(self) -> dict[str, Summary]:
        """Read all databases at once, apart from those that did not answer to the question for the user's topics.

        Each is waited for as ``read_each`` says, so that one that is down delays the page by that time at most.
        """
        unread = visible(self.request).unread
        pages = {alias: OverviewPage(self.dashboard.on(alias), self.request) for alias in self.dashboard.databases}
        for alias, page in pages.items():
            page.using = alias
        read = read_each([alias for alias in pages if alias not in unread], lambda alias: pages[alias].read_state())
        found: dict[str, Summary] = {}
        for alias, page in pages.items():
            one = unread[alias] if alias in unread else read[alias]
            found[alias] = page.unread(one.reason) if isinstance(one, Unread) else page.summary(one, alias=alias)
        return found

    def _database_row(self, alias: str, found: Summary) -> DatabaseRow:
        link = self.dashboard.url("changelist", database=alias)
        return DatabaseRow(alias, link, found.status.name, CSS[found.status.state], found.cards)
