"""Metrics of a subscriber process."""

from __future__ import annotations

import re
import time

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.filter_policies import parse
from django_mysqlqueue.metrics.process import OUTCOMES, ProcessMetrics, Source, serve
from django_mysqlqueue.models import DeliveryState
from django_mysqlqueue.signals import delivery_settled
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import GroupRef, Subscriber, get_settings
from tests.support.metrics import Samples, free_ports, parsed, scrape
from tests.support.still_time import Time

REF = GroupRef("g", "t")


class Process:
    """A subscriber by hand, with metrics in a registry of their own."""

    def __init__(self, *handlers, **options):
        self.sub = Sub(*handlers, **options)
        self.registry = CollectorRegistry()
        self.metrics = ProcessMetrics([Source(USING, self.sub.handlers, self.sub.inbox)], self.registry)
        self.sub.inbox.watch.listeners.append(self.metrics.settled)

    def samples(self):
        return Samples(parsed(generate_latest(self.registry).decode()))


def test_deliveries_by_outcome(db):
    assert not delivery_settled.receivers

    def work(delivery):
        match delivery.payload:
            case "nack" if delivery.attempt == 1:
                delivery.nack(0)
            case "reject":
                delivery.reject("never")
            case "snooze":
                delivery.snooze(3600)
            case "raise":
                raise ValueError("broken")

    process = Process(handler(function=work, max_attempts=2))
    found = process.samples()
    for outcome in OUTCOMES:
        assert found.value("deliveries_total", topic="t", group="g", outcome=outcome) == 0, "there from the start"
    publish_many("t", ["ack", "ack", "nack", "reject", "snooze", "raise"])
    process.sub.settle()
    publish("t", "lost")
    process.sub.step()
    held = process.sub.take()
    DeliveryState.objects.filter(message_offset=held.claimed.offset).update(delivery_token=12345)
    process.sub.run(held)
    process.sub.flush()
    found = process.samples()
    assert {
        outcome: found.value("deliveries_total", topic="t", group="g", outcome=outcome) for outcome in OUTCOMES
    } == {
        "acked": 3,
        "failed": 2,
        "snoozed": 1,
        "dead_lettered": 2,
        "released": 0,
        "lost": 1,
    }
    assert found.value("processing_seconds_count", topic="t", group="g") == 9
    assert found.value("end_to_end_seconds_count", topic="t", group="g") == 3
    assert {name for _, labels in found for name, _ in labels} == {"database", "topic", "group", "outcome", "le"}


def test_the_database_of_a_delivery(queue_db):
    """One process can have several, each with an inbox of its own."""
    subs = [Sub(handler(), using=alias) for alias in (USING, "queue")]
    registry = CollectorRegistry()
    metrics = ProcessMetrics([Source(sub.using, sub.handlers, sub.inbox) for sub in subs], registry)
    for sub in subs:
        sub.inbox.watch.listeners.append(metrics.settled)
    publish_many("t", [1, 2], using="queue")
    publish("t", 1)
    for sub in subs:
        sub.settle()
    found = Samples(parsed(generate_latest(registry).decode()))
    for alias, number in ((USING, 1), ("queue", 2)):
        labels = {"topic": "t", "group": "g", "database": alias}
        assert found.value("deliveries_total", outcome="acked", **labels) == number
        assert found.value("end_to_end_seconds_count", **labels) == number
        assert found.value("process_waiting", **labels) == 0


def test_a_message_that_is_dead_lettered_without_a_call_has_no_processing_time(db):
    publish("t", "deadly")
    process = Process(handler(max_attempts=1, mode="shared"))
    process.sub.step()
    assert process.sub.take() is not None
    # Its subscriber was lost in its only attempt.
    DeliveryState.objects.update(delivered_by="lost", retry_count=1, invisible_until=0)
    process = Process(handler(max_attempts=1, mode="shared"), name="next")
    process.sub.step()
    found = process.samples()
    assert found.value("deliveries_total", topic="t", group="g", outcome="dead_lettered") == 1
    assert found.value("processing_seconds_count", topic="t", group="g") == 0


def test_latency_is_from_the_place_in_the_log_to_the_ack(db, clock):
    process = Process(handler(function=lambda delivery: time.sleep(0.02)))
    publish("t", 1)
    sequence()
    clock.advance(100)
    process.sub.settle()
    found = process.samples()
    labels = {"topic": "t", "group": "g"}
    assert 100 <= found.value("end_to_end_seconds_sum", **labels) < 120
    assert found.value("end_to_end_seconds_bucket", le="60.0", **labels) == 0
    assert found.value("end_to_end_seconds_bucket", le="600.0", **labels) == 1
    assert 0.02 <= found.value("processing_seconds_sum", **labels) < 5


def test_the_call_of_a_batch_is_shared_out(db):
    process = Process(handler(function=lambda deliveries: time.sleep(0.2), batch=True, batch_size=100))
    publish_many("t", [Message(n, key="k") for n in range(100)])
    process.sub.settle()
    found = process.samples()
    assert found.value("processing_seconds_count", topic="t", group="g") == 100
    assert 0.2 <= found.value("processing_seconds_sum", topic="t", group="g") < 2


def test_what_runs_and_what_waits(db):
    process = Process(handler(), handler(group="other"))
    publish_many("t", [Message(n, key="k") for n in range(5)])
    process.sub.step()
    process.sub.take()
    found = process.samples()
    counts = sorted(
        (found.value("process_running", topic="t", group=group), found.value("process_waiting", topic="t", group=group))
        for group in ("g", "other")
    )
    assert counts == [(0, 5), (1, 4)]


def test_counting_costs_no_statement(db, monkeypatch):
    Time(monkeypatch)  # Nothing becomes due, however slow the machine is.

    def sent(make):
        made = make(handler())
        sub = made.sub if isinstance(made, Process) else made
        sub.step()  # By what it looks for work at its start depends on the server's statistics (``last_offsets``).
        publish_many("t", [Message(n, key="k") for n in range(20)])
        with CaptureQueriesContext(connection) as captured:
            sub.step()
            assert sub.work() == 20
            sub.flush()
        sub.leave()
        return [re.sub(r"\d+", "0", query["sql"]) for query in captured]

    sent(Sub)
    assert sent(Process) == sent(Sub)


@pytest.mark.any_engine
def test_serving(db):
    subscriber = Subscriber({USING: {REF: handler()}}, get_settings())
    port = free_ports(1)
    stop = serve(subscriber, "127.0.0.1", port)
    try:
        assert scrape(port).value("process_running", topic="t", group="g") == 0
        assert ("process_cpu_seconds_total", ()) in scrape(port), "with all else in the registry"
        before = generate_latest(REGISTRY)
        with pytest.raises(SubscriberError, match=f"127.0.0.1 port {port}: .*in use"):
            serve(Subscriber({USING: {REF: handler()}}, get_settings()), "127.0.0.1", port, CollectorRegistry())
        assert b"mysqlqueue_deliveries" in before
    finally:
        stop()
    assert b"mysqlqueue_" not in generate_latest(REGISTRY)
    assert not subscriber.workers[0].inbox.watch.is_wanted()
    with pytest.raises(OSError, match="refused"):
        scrape(port)
    serve(subscriber, "127.0.0.1", port)()  # and again


def test_messages_that_the_filter_passes(db):
    process = Process(handler(filter=parse({"region": ["eu"]})), handler(group="all"))
    for group in ("g", "all"):
        assert process.samples().value("process_filtered_total", topic="t", group=group) == 0, "there from the start"
    publish_many("t", [Message(n, metadata={"region": region}) for n, region in enumerate(["us", "eu", "us"])])
    process.sub.settle()
    found = process.samples()
    assert found.value("process_filtered_total", topic="t", group="g") == 2
    assert found.value("process_filtered_total", topic="t", group="all") == 0
    assert found.value("deliveries_total", topic="t", group="g", outcome="acked") == 1
