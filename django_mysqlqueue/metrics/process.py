"""The metrics of a subscriber process, and the port at which it serves them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

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

Count = TypeVar("Count")

LABELS = ("topic", "group")
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
BOUNDS = tuple(bound / 1000 for bound in LATENCY_BOUNDS_MS)
"""The bounds of the histograms' buckets in seconds, the same as those of the rollups."""


class ProcessMetrics:
    """Counters and histograms of one process.

    Args:
        refs: the groups of the process.
        inboxes: the inboxes whose deliveries are counted.
        registry: the registry to add the metrics to.
    """

    def __init__(
        self, refs: Iterable[GroupRef], inboxes: Sequence[Inbox], registry: CollectorRegistry = REGISTRY
    ) -> None:
        self._deliveries = Counter(
            "mysqlqueue_deliveries",
            "Deliveries of this process, by outcome.",
            (*LABELS, "outcome"),
            registry=registry,
        )
        self._processing = Histogram(
            "mysqlqueue_processing_seconds",
            "Seconds in the handler per message. The time of a batch is divided evenly among its messages.",
            LABELS,
            buckets=BOUNDS,
            registry=registry,
        )
        self._end_to_end = Histogram(
            "mysqlqueue_end_to_end_seconds",
            "Seconds from a message's entering the log to its ack, including retries.",
            LABELS,
            buckets=BOUNDS,
            registry=registry,
        )
        self._registry = registry
        self._collectors = (self._deliveries, self._processing, self._end_to_end, _InboxCollector(inboxes))
        registry.register(self._collectors[-1])
        for ref in refs:
            # Start at 0: a rate needs two samples, and it should include the first failure.
            for outcome in OUTCOMES:
                self._deliveries.labels(ref.topic, ref.group, outcome)
            self._processing.labels(ref.topic, ref.group)
            self._end_to_end.labels(ref.topic, ref.group)

    def unregister(self) -> None:
        """Remove all metrics from the registry."""
        for collector in self._collectors:
            self._registry.unregister(collector)

    def settled(self, ends: Sequence[Settled]) -> None:
        """Count settled deliveries whose outcomes are committed."""
        for end in ends:
            labels = (end.delivery.topic, end.delivery.group)
            self._deliveries.labels(*labels, end.outcome).inc()
            if end.messages:
                self._processing.labels(*labels).observe(end.seconds / end.messages)
            if end.outcome is Outcome.ACKED:
                self._end_to_end.labels(*labels).observe(end.latency)


class _InboxCollector(Collector):
    def __init__(self, inboxes: Sequence[Inbox]) -> None:
        self._inboxes = inboxes

    def _of_all(self, counts: Callable[[Inbox], Mapping[GroupRef, Count]]) -> Iterator[tuple[GroupRef, Count]]:
        for inbox in self._inboxes:
            yield from counts(inbox).items()

    def collect(self) -> Iterator[Metric]:
        running = GaugeMetricFamily(
            "mysqlqueue_process_running", "Messages that this process is handling.", labels=LABELS
        )
        waiting = GaugeMetricFamily(
            "mysqlqueue_process_waiting", "Messages that this process has claimed but not started.", labels=LABELS
        )
        for ref, (waits, runs) in self._of_all(Inbox.counts):
            running.add_metric((ref.topic, ref.group), runs)
            waiting.add_metric((ref.topic, ref.group), waits)
        yield running
        yield waiting
        deleted = CounterMetricFamily(
            "mysqlqueue_process_deleted", "Claimed messages that were deleted before they were handled.", labels=LABELS
        )
        for ref, number in self._of_all(Inbox.deleted_counts):
            deleted.add_metric((ref.topic, ref.group), number)
        yield deleted
        for reason, text in PASSED.items():
            passed = CounterMetricFamily(f"mysqlqueue_process_{reason}", text, labels=LABELS)
            for ref, number in self._of_all(partial(Inbox.passed_counts, reason=reason)):
                passed.add_metric((ref.topic, ref.group), number)
            yield passed


def serve(
    subscriber: Subscriber, address: str, port: int, registry: CollectorRegistry = REGISTRY
) -> Callable[[], None]:
    """Count a subscriber's deliveries, and serve all metrics of the registry.

    Args:
        subscriber: the subscriber.
        address: the address to bind to.
        port: the port.
        registry: the registry to serve.

    Returns:
        A function that stops counting and serving.

    Raises:
        SubscriberError: the address or port cannot be used.
    """
    inboxes = [worker.inbox for worker in subscriber.workers]
    metrics = ProcessMetrics(subscriber.handlers, inboxes, registry)
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        metrics.unregister()
        raise SubscriberError(_cannot_be_had(address, port, error)) from error
    for inbox in inboxes:
        inbox.watch.listeners.append(metrics.settled)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(5)
        for inbox in inboxes:
            inbox.watch.listeners.remove(metrics.settled)
        metrics.unregister()

    return stop


def require_ports(address: str, ports: Iterable[int]) -> None:
    """Check that ports are free before a supervisor starts processes that would all fail.

    Args:
        address: the address to bind to.
        ports: the ports.

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
