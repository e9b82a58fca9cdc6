"""The queue's state as metrics, which are read at each scrape at a bounded cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from django_mysqlqueue.inspection import SCRAPES, Bounds, GroupOverview, QueueOverview, get_overview
from django_mysqlqueue.service.counts import Count

UP_TO = f"counted up to {SCRAPES.count:,}, see mysqlqueue_count_exact"
LABELS = ("topic", "group")
COUNTS = {
    "lag": f"Messages in the log that the group has not settled ({UP_TO}).",
    "in_flight": f"Messages that subscribers have claimed and not settled ({UP_TO}).",
    "retrying": f"Messages that failed and wait for another attempt ({UP_TO}).",
    "dead_letters": f"Messages in the DLQ that the group has dead-lettered ({UP_TO}).",
}


class QueueCollector(Collector):
    """Reads the state of the queue at each scrape. Register it with a ``CollectorRegistry``.

    Args:
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
    """

    bounds: ClassVar[Bounds] = SCRAPES

    def __init__(self, using: str | None = None) -> None:
        self.using = using

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, so that registering the collector needs no query."""
        return _Families().all()

    def collect(self) -> Iterator[Metric]:
        """Read the queue's state and return all metrics.

        Raises:
            django.db.Error: the database cannot be read.
        """
        state = get_overview(using=self.using, bounds=self.bounds)
        families = _Families()
        families.add_queue(state)
        for group in state.groups:
            families.add_group(group, state.now)
        yield from families.all()


class _Families:
    """The metrics of one scrape."""

    def __init__(self) -> None:
        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"mysqlqueue_{name}", text, labels=labels)

        self.counts = {name: gauge(name, text, LABELS) for name, text in COUNTS.items()}
        self.exact = gauge(
            "count_exact",
            "0 if the count that the label names stopped at its limit: the true number may be larger.",
            (*LABELS, "count"),
        )
        self.oldest = gauge(
            "oldest_unacked_age_seconds",
            "Age of the oldest message in the log that the group has not settled; 0 if there is none.",
            LABELS,
        )
        self.subscribers = gauge("subscribers", "Live subscribers.", LABELS)
        self.paused = gauge("paused", "1 while the group is paused.", LABELS)
        self.outbox = gauge("outbox_waiting", f"Due messages in the outbox (counted up to {SCRAPES.count:,}).")
        self.outbox_age = gauge(
            "outbox_oldest_age_seconds", "Age of the oldest due message in the outbox; 0 if there is none."
        )
        self.scheduled = gauge("outbox_scheduled", f"Scheduled messages (counted up to {SCRAPES.count:,}).")
        self.debounced = CounterMetricFamily(
            "mysqlqueue_debounced", "Debounced messages that later ones have replaced before they entered the log."
        )
        self.last_offset = gauge("last_offset", "The highest offset of the log. It grows with every message.")
        self.more = gauge("more_groups", f"1 if there are more groups than the {SCRAPES.groups:,} that are included.")

    def all(self) -> list[Metric]:
        return [
            *self.counts.values(),
            self.exact,
            self.oldest,
            self.subscribers,
            self.paused,
            self.outbox,
            self.outbox_age,
            self.scheduled,
            self.debounced,
            self.last_offset,
            self.more,
        ]

    def add_queue(self, state: QueueOverview) -> None:
        waiting = state.outbox.waiting_since
        self.outbox.add_metric((), state.outbox.waiting.value)
        self.outbox_age.add_metric((), _age(waiting, state.now))
        self.scheduled.add_metric((), state.outbox.scheduled.value)
        self.debounced.add_metric((), state.debounced)
        self.last_offset.add_metric((), state.last_offset)
        self.more.add_metric((), int(state.more_groups))

    def add_group(self, group: GroupOverview, now: int) -> None:
        labels = (group.ref.topic, group.ref.group)
        for name, family in self.counts.items():
            count: Count = getattr(group, name)
            family.add_metric(labels, count.value)
            self.exact.add_metric((*labels, name), int(count.exact))
        self.oldest.add_metric(labels, _age(group.oldest_at, now))
        self.subscribers.add_metric(labels, len(group.live))
        self.paused.add_metric(labels, int(group.paused))


def _age(since: int | None, now: int) -> float:
    return 0.0 if since is None else max(0.0, (now - since) / 1000)
