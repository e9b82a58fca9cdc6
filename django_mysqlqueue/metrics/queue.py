"""The queue's state as metrics, which are read at each scrape at a bounded cost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, NamedTuple

from django.db import Error
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from django_mysqlqueue.inspection import SCRAPES, Bounds, GroupOverview, QueueOverview, TaskBacklog, get_overview
from django_mysqlqueue.inspection.tasks import count_backlogs
from django_mysqlqueue.metrics.labels import TaskLabels
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.databases import queue_alias, queue_aliases
from django_mysqlqueue.service.job_results import is_of_jobs
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.sql.several import TOTAL_SECONDS, start_each

UP_TO = f"counted up to {SCRAPES.count:,}, see mysqlqueue_count_exact"
DATABASE = ("database",)
RELAY = (*DATABASE, "target")
LABELS = ("database", "topic", "group")
COUNTS = {
    "lag": f"Messages in the log that the group has not settled ({UP_TO}).",
    "in_flight": f"Messages that subscribers have claimed and not settled ({UP_TO}).",
    "retrying": f"Messages that failed and wait for another attempt ({UP_TO}).",
    "dead_letters": f"Messages in the DLQ that the group has dead-lettered ({UP_TO}).",
}
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "database_up": ("0 if the database cannot be read, otherwise 1.", DATABASE),
    **{name: (text, LABELS) for name, text in COUNTS.items()},
    "count_exact": (
        "0 if the count that the label names stopped at its limit: the true number may be larger.",
        (*LABELS, "count"),
    ),
    "oldest_unacked_age_seconds": (
        "Age of the oldest message that waits for the group, in the log or due in the outbox; 0 if there is none.",
        LABELS,
    ),
    "subscribers": ("Live subscribers.", LABELS),
    "paused": ("1 while the group is paused.", LABELS),
    "outbox_waiting": (f"Due messages in the outbox (counted up to {SCRAPES.count:,}).", DATABASE),
    "outbox_oldest_age_seconds": ("Age of the oldest due message in the outbox; 0 if there is none.", DATABASE),
    "outbox_scheduled": (f"Scheduled messages (counted up to {SCRAPES.count:,}).", DATABASE),
    "relay_waiting": (f"Messages that wait to be relayed (counted up to {SCRAPES.walked:,}).", RELAY),
    "relay_oldest_age_seconds": ("Age of the oldest message that waits to be relayed; 0 if there is none.", RELAY),
    "reader_unread_offsets": (
        "Offsets of the log that a registered reader, such as the archive, has yet to read.",
        (*DATABASE, "reader"),
    ),
    "reader_age_seconds": ("Time since a registered reader last stored its position.", (*DATABASE, "reader")),
    "round_trip_seconds": (
        "Time that the database takes to answer a poll of the slowest live subscriber, by percentile.",
        (*DATABASE, "percentile"),
    ),
    "bell_age_seconds": (
        "Time since a publisher last woke a live subscriber of the host; missing if none has.",
        (*DATABASE, "host"),
    ),
    "debounced": ("Debounced messages that later ones have replaced before they entered the log.", DATABASE),
    "jobs": (
        f"Jobs that have not ended (of all tasks together, up to {SCRAPES.count:,} that run and as many others).",
        (*DATABASE, "task", "state"),
    ),
    "last_offset": ("The highest offset of the log. It grows with every message.", DATABASE),
    "log_bytes": ("Disk that the log takes, as the server estimates it; on SQLite, the size of the file.", DATABASE),
    "more_groups": (f"1 if there are more groups than the {SCRAPES.groups:,} that are included.", DATABASE),
}
"""By name, the help text and the labels of each metric."""
STATES = ("waiting", "scheduled", "running")
"""The values of the label ``state``: attributes of a ``TaskBacklog``."""
COUNTERS = ("debounced",)
"""The metrics that are counters. All others are gauges."""


class _State(NamedTuple):
    """The state of the queue in one database."""

    queue: QueueOverview
    jobs: Mapping[str, TaskBacklog]
    """By task; empty without queues of jobs."""


class QueueCollector(Collector):
    """Reads the state of the queue at each scrape. Register it with a ``CollectorRegistry``.

    All metrics have the label ``database``, also if there is only one. Several databases are read at the same time.

    Args:
        using: alias of the only database to read (default: all of the queue's databases).
    """

    bounds: ClassVar[Bounds] = SCRAPES
    patience: ClassVar[float] = TOTAL_SECONDS
    """Seconds after which the metrics of other databases do not wait any longer for one that does not answer:
    Prometheus, by default, waits for 10."""

    def __init__(self, using: str | None = None) -> None:
        self.using = using

    @property
    def aliases(self) -> list[str]:
        """The aliases of the databases to read."""
        return queue_aliases() if self.using is None else [queue_alias(self.using)]

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, so that registering the collector needs no query."""
        return _families().values()

    def collect(self) -> Iterator[Metric]:
        """Read the queue's state and return all metrics.

        Of a database that cannot be read, there is only ``mysqlqueue_database_up``, which is 0.

        Raises:
            django.db.Error: none of the databases can be read.
        """
        aliases = self.aliases
        states = [self._read(aliases[0])] if len(aliases) == 1 else self._read_each(aliases)
        if not any(isinstance(state, _State) for state in states):
            raise next(state for state in states if isinstance(state, Error))
        families = _families()
        for alias, state in zip(aliases, states, strict=True):
            families["database_up"].add_metric((alias,), int(isinstance(state, _State)))
            if isinstance(state, _State):
                _add_queue(families, state.queue)
                _add_jobs(families, state)
        yield from families.values()

    def _read_each(self, aliases: list[str]) -> list[_State | Error | None]:
        """Return the state of each database, the error, or None if it is late."""
        states: list[_State | Error | None] = []
        deadline = time.monotonic() + self.patience
        answers = list(start_each(aliases, self._read).values())
        for answer in answers:
            try:
                states.append(answer.result(max(0.0, deadline - time.monotonic())))
            except TimeoutError:
                states.append(None)
        if not any(isinstance(state, _State) for state in states) and None in states:
            states[0] = answers[0].result()  # There is nothing to show meanwhile.
        return states

    def _read(self, alias: str) -> _State | Error:
        try:
            found = get_overview(using=alias, bounds=self.bounds)
            has_jobs = any(is_of_jobs(group.ref) for group in found.groups)
            session = Session(alias)
            jobs = count_backlogs(session, found.now, bounds=self.bounds) if has_jobs else {}
            return _State(found, jobs)
        except Error as error:
            return error


Families = dict[str, GaugeMetricFamily | CounterMetricFamily]


def _families() -> Families:
    """Return the metrics of a scrape by name, without values."""
    return {
        name: (CounterMetricFamily if name in COUNTERS else GaugeMetricFamily)(
            f"mysqlqueue_{name}", text, labels=labels
        )
        for name, (text, labels) in FAMILIES.items()
    }


def _add_queue(families: Families, state: QueueOverview) -> None:
    values = {
        "outbox_waiting": state.outbox.waiting.value,
        "outbox_oldest_age_seconds": _age(state.outbox.waiting_since, state.now),
        "outbox_scheduled": state.outbox.scheduled.value,
        "debounced": state.debounced,
        "last_offset": state.last_offset,
        "more_groups": int(state.more_groups),
        "log_bytes": state.log_bytes or 0,
    }
    for name, value in values.items():
        families[name].add_metric((state.using,), value)
    if (took := state.slowest_round_trip) is not None:
        for percentile, seconds in (("50", took.p50), ("95", took.p95)):
            families["round_trip_seconds"].add_metric((state.using, percentile), seconds)
    for bell in state.bells:
        if bell.rung_at is not None:
            families["bell_age_seconds"].add_metric((state.using, bell.host), _age(bell.rung_at, state.now))
    for relay in state.relays:
        families["relay_waiting"].add_metric((state.using, relay.target), relay.messages.value)
        families["relay_oldest_age_seconds"].add_metric((state.using, relay.target), _age(relay.oldest_at, state.now))
    for reader in state.readers:
        labels = (state.using, reader.name)
        families["reader_unread_offsets"].add_metric(labels, max(0, state.last_offset - reader.offset))
        families["reader_age_seconds"].add_metric(labels, _age(reader.moved_at, state.now))
    for group in state.groups:
        _add_group(families, state, group)


def _add_group(families: Families, state: QueueOverview, group: GroupOverview) -> None:
    labels = (state.using, group.ref.topic, group.ref.group)
    for name in COUNTS:
        count: Count = getattr(group, name)
        families[name].add_metric(labels, count.value)
        families["count_exact"].add_metric((*labels, name), int(count.exact))
    families["oldest_unacked_age_seconds"].add_metric(labels, _age(group.oldest_at, state.now))
    families["subscribers"].add_metric(labels, len(group.live))
    families["paused"].add_metric(labels, int(group.paused))


def _add_jobs(families: Families, state: _State) -> None:
    label = TaskLabels().of
    numbers: Counter[tuple[str, str]] = Counter()
    for task, backlog in state.jobs.items():
        for name in STATES:
            numbers[label(task), name] += getattr(backlog, name).value
    for labels, number in numbers.items():
        families["jobs"].add_metric((state.queue.using, *labels), number)


def _age(since: int | None, now: int) -> float:
    return 0.0 if since is None else max(0.0, (now - since) / 1000)
