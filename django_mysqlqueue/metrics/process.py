"""What a subscriber's process counts of its own work, and the port where it says so."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.limits import LATENCY_BOUNDS_MS
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.runtime.handling.inbox import Inbox
from django_mysqlqueue.runtime.handling.observers import Settled
from django_mysqlqueue.runtime.process.subscriber import Subscriber
from django_mysqlqueue.service.refs import GroupRef

LABELS = ("topic", "group")
OUTCOMES = tuple(outcome for outcome in Outcome if outcome is not Outcome.DELETED)
"""What may become of a message that is there: deleted ones have a counter of their own."""
BOUNDS = tuple(bound / 1000 for bound in LATENCY_BOUNDS_MS)
"""Seconds; those of the latencies that the queue keeps itself."""


class ProcessMetrics:
    """Counters and histograms of one process. ``settled`` is called for what has been committed."""

    def __init__(self, refs: Iterable[GroupRef], inbox: Inbox, registry: CollectorRegistry = REGISTRY) -> None:
        self._deliveries = Counter(
            "mysqlqueue_deliveries",
            "Deliveries of this process that ended, by what became of them.",
            (*LABELS, "outcome"),
            registry=registry,
        )
        self._processing = Histogram(
            "mysqlqueue_processing_seconds",
            "Time in the handler for each message; the call of a batch is shared out evenly.",
            LABELS,
            buckets=BOUNDS,
            registry=registry,
        )
        self._end_to_end = Histogram(
            "mysqlqueue_end_to_end_seconds",
            "Time from a message's place in the log to its ack, retries included.",
            LABELS,
            buckets=BOUNDS,
            registry=registry,
        )
        self._registry = registry
        self._collectors = (self._deliveries, self._processing, self._end_to_end, _InboxCollector(inbox))
        registry.register(self._collectors[-1])
        for ref in refs:
            # From 0: a rate needs two samples, and the first failure should show in it.
            for outcome in OUTCOMES:
                self._deliveries.labels(ref.topic, ref.group, outcome)
            self._processing.labels(ref.topic, ref.group)
            self._end_to_end.labels(ref.topic, ref.group)

    def unregister(self) -> None:
        """Takes all of it out of the registry."""
        for collector in self._collectors:
            self._registry.unregister(collector)

    def settled(self, ends: Sequence[Settled]) -> None:
        for end in ends:
            labels = (end.delivery.topic, end.delivery.group)
            self._deliveries.labels(*labels, end.outcome).inc()
            if end.messages:
                self._processing.labels(*labels).observe(end.seconds / end.messages)
            if end.outcome is Outcome.ACKED:
                self._end_to_end.labels(*labels).observe(end.latency)


class _InboxCollector(Collector):
    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def collect(self) -> Iterator[Metric]:
        running = GaugeMetricFamily("mysqlqueue_process_running", "Messages in this process's handlers.", labels=LABELS)
        waiting = GaugeMetricFamily(
            "mysqlqueue_process_waiting", "Messages that this process has claimed and not started.", labels=LABELS
        )
        for ref, (waits, runs) in self._inbox.counts().items():
            running.add_metric((ref.topic, ref.group), runs)
            waiting.add_metric((ref.topic, ref.group), waits)
        yield running
        yield waiting
        deleted = CounterMetricFamily(
            "mysqlqueue_process_deleted", "Claimed messages that were deleted before they were handled.", labels=LABELS
        )
        for ref, number in self._inbox.deleted_counts().items():
            deleted.add_metric((ref.topic, ref.group), number)
        yield deleted


def serve(
    subscriber: Subscriber, address: str, port: int, registry: CollectorRegistry = REGISTRY
) -> Callable[[], None]:
    """Counts what a subscriber does, and serves that with all else in the registry; returns what ends the serving.

    Raises:
        SubscriberError: the port cannot be had.
    """
    metrics = ProcessMetrics(subscriber.handlers, subscriber.inbox, registry)
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        metrics.unregister()
        raise SubscriberError(_cannot_be_had(address, port, error)) from error
    subscriber.inbox.watch.listeners.append(metrics.settled)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(5)
        subscriber.inbox.watch.listeners.remove(metrics.settled)
        metrics.unregister()

    return stop


def require_ports(address: str, ports: Iterable[int]) -> None:
    """What a supervisor looks at before it starts processes that would all fail.

    Raises:
        SubscriberError: a port cannot be had.
    """
    for port in ports:
        try:
            family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            socket.create_server(place[:2], family=family).close()
        except OSError as error:
            raise SubscriberError(_cannot_be_had(address, port, error)) from error


def _cannot_be_had(address: str, port: int, error: OSError) -> str:
    return f"The metrics cannot be served at {address} port {port}: {error}"
