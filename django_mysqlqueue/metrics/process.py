"""The metrics of a subscriber process, and the port at which it serves them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from django_mysqlqueue.db.sizes import LATENCY_BOUNDS_MS
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.metrics.labels import TaskLabels
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.runtime.handling.inbox import Inbox
from django_mysqlqueue.runtime.handling.observers import Settled
from django_mysqlqueue.runtime.process.subscriber import Subscriber
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.subscriptions.handler import Handler

LABELS = ("database", "topic", "group")
OUTCOMES = tuple(
    outcome for outcome in Outcome if outcome not in (Outcome.DELETED, Outcome.EXPIRED, Outcome.SUPERSEDED)
)
"""The outcomes that are counted. Those of messages that no handler got have counters of their own."""
PASSED = {
    "filtered": "Messages that the group's filter has passed without a call.",
    "expired": "Messages that have expired before their handler was called.",
    "superseded": "Messages that a later one with their coalesce key superseded before their handler was called.",
}
"""By reason, the help text of the counter of messages that were settled without a call."""
FAMILIES = {
    "running": (GaugeMetricFamily, "Messages that this process is handling."),
    "waiting": (GaugeMetricFamily, "Messages that this process has claimed but not started."),
    "deleted": (CounterMetricFamily, "Claimed messages that were deleted before they were handled."),
    "unknown_task": (CounterMetricFamily, "Deliveries of jobs whose task this process could not import or run."),
    **{reason: (CounterMetricFamily, text) for reason, text in PASSED.items()},
}
"""By name, the type and the help text of the metrics that are read from inboxes."""
BOUNDS = tuple(bound / 1000 for bound in LATENCY_BOUNDS_MS)
"""The bounds of the histograms' buckets in seconds, the same as those of the rollups."""


class Source(NamedTuple):
    """What a process subscribes to in one database."""

    using: str
    """Alias of the database."""
    handlers: Mapping[GroupRef, Handler]
    """The handlers of the groups."""
    inbox: Inbox
    """The inbox whose deliveries are counted."""


class ProcessMetrics:
    """Counters and histograms of one process.

    Args:
        sources: what the process subscribes to, by database.
        registry: the registry to add the metrics to.
    """

    def __init__(self, sources: Sequence[Source], registry: CollectorRegistry = REGISTRY) -> None:
        self._deliveries = Counter(
            "mysqlqueue_deliveries",
            "Deliveries of this process, by outcome.",
            (*LABELS, "task", "outcome"),
            registry=registry,
        )
        self._processing = Histogram(
            "mysqlqueue_processing_seconds",
            "Seconds in the handler per message. The time of a batch is divided evenly among its messages.",
            (*LABELS, "task"),
            buckets=BOUNDS,
            registry=registry,
        )
        self._end_to_end = Histogram(
            "mysqlqueue_end_to_end_seconds",
            "Seconds from a message's entering the log to its ack, including retries.",
            (*LABELS, "task"),
            buckets=BOUNDS,
            registry=registry,
        )
        self._registry = registry
        self._collectors = (self._deliveries, self._processing, self._end_to_end, _InboxCollector(sources))
        registry.register(self._collectors[-1])
        self._label = TaskLabels().of
        for source in sources:
            for ref, handler in source.handlers.items():
                labels = (source.using, ref.topic, ref.group)
                # Start at 0: a rate needs two samples, and it should include the first failure.
                for task in sorted({self._label(task) for task in handler.tasks()}) if handler.runs_jobs else [""]:
                    for outcome in OUTCOMES:
                        self._deliveries.labels(*labels, task, outcome)
                if not handler.runs_jobs:  # 50 series for a task that may never run are too many.
                    self._processing.labels(*labels, "")
                    self._end_to_end.labels(*labels, "")

    def unregister(self) -> None:
        """Remove all metrics from the registry."""
        for collector in self._collectors:
            self._registry.unregister(collector)

    def settled(self, ends: Sequence[Settled]) -> None:
        """Count settled deliveries whose outcomes are committed."""
        for end in ends:
            job = end.delivery._claimed.job
            task = "" if job is None else self._label(job.task)
            labels = (end.delivery._using, end.delivery.topic, end.delivery.group, task)
            self._deliveries.labels(*labels, end.outcome).inc()
            if end.messages:
                self._processing.labels(*labels).observe(end.seconds / end.messages)
            if end.outcome is Outcome.ACKED:
                self._end_to_end.labels(*labels).observe(end.latency)


class _InboxCollector(Collector):
    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        families = {
            name: family(f"mysqlqueue_process_{name}", text, labels=LABELS) for name, (family, text) in FAMILIES.items()
        }
        for source in self._sources:
            for name, ref, value in _values(source):
                families[name].add_metric((source.using, ref.topic, ref.group), value)
        yield from families.values()


def _values(source: Source) -> Iterator[tuple[str, GroupRef, int]]:
    for ref, handler in source.handlers.items():
        if handler.unknown is not None:
            yield "unknown_task", ref, handler.unknown.deliveries
    for ref, (waits, runs) in source.inbox.counts().items():
        yield "running", ref, runs
        yield "waiting", ref, waits
    for ref, number in source.inbox.deleted_counts().items():
        yield "deleted", ref, number
    for reason in PASSED:
        for ref, number in source.inbox.passed_counts(reason).items():
            yield reason, ref, number


def serve(
    subscriber: Subscriber, address: str, port: int, registry: CollectorRegistry = REGISTRY
) -> Callable[[], None]:
    """Count a subscriber's deliveries, and serve all metrics of the registry.

    Returns:
        A function that stops counting and serving.

    Raises:
        SubscriberError: the address or port cannot be used.
    """
    sources = [Source(one.using, one.handlers, one.inbox) for one in subscriber.workers]
    metrics = ProcessMetrics(sources, registry)
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        metrics.unregister()
        raise SubscriberError(_cannot_be_had(address, port, error)) from error
    for source in sources:
        source.inbox.watch.listeners.append(metrics.settled)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(5)
        for source in sources:
            source.inbox.watch.listeners.remove(metrics.settled)
        metrics.unregister()

    return stop


def require_ports(address: str, ports: Iterable[int]) -> None:
    """Check that ports are free before a supervisor starts processes that would all fail.

    Raises:
        SubscriberError: the address or a port cannot be used.
    """
    for port in ports:
        try:
            family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            socket.create_server(place[:2], family=family).close()
        except OSError as error:
            raise SubscriberError(_cannot_be_had(address, port, error)) from error


def _cannot_be_had(address: str, port: int, error: OSError) -> str:
    return f"The metrics cannot be served at {address} port {port}: {error}"
