"""Spans of handling, and what links them."""

from __future__ import annotations

import pytest
from opentelemetry import baggage, context
from opentelemetry import trace as api
from opentelemetry.trace import SpanKind, StatusCode

from django_mysqlqueue import Message, otel, publish, publish_many
from django_mysqlqueue import subscriber as declare
from django_mysqlqueue.models import DeliveryState, OutboxMessage
from django_mysqlqueue.signals import delivery_handled, delivery_started
from django_mysqlqueue.testing import deliver_all
from tests.support.harness import Sub, handler
from tests.support.tracing import SOMEBODY, same


@pytest.mark.parametrize("atomic", [False, True])
def test_process(traced, atomic):
    inside = []

    def work(delivery):
        inside.append(api.get_current_span().get_span_context())
        with traced.tracer.start_as_current_span("inside"):
            pass

    publish("t", 1, id="one", key="private")
    sub = Sub(handler(function=work, atomic=atomic))
    sub.settle()
    send, process = traced.only("send t"), traced.only("process t")
    assert process.kind is SpanKind.CONSUMER
    assert process.parent is None
    assert process.context.trace_id != send.context.trace_id
    (link,) = process.links
    assert same(link.context, send.context)
    assert dict(link.attributes) == {"messaging.message.id": "one"}
    assert same(inside[0], process.context)
    assert same(traced.only("inside").parent, process.context)
    attributes = dict(process.attributes)
    attributes.pop("server.address", None)
    attributes.pop("server.port", None)
    assert attributes.pop("messaging.mysqlqueue.offset") > 0
    assert attributes == {
        "messaging.system": "mysqlqueue",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "t",
        "messaging.consumer.group.name": "g",
        "messaging.client.id": sub.name,
        "messaging.message.id": "one",
        "messaging.mysqlqueue.attempt": 1,
        "messaging.mysqlqueue.outcome": "acked",
    }
    assert "private" not in process.to_json(), "keys are often people"
    assert process.status.status_code is StatusCode.UNSET
    assert not api.get_current_span().get_span_context().is_valid


def test_errors(traced):
    def work(delivery):
        match delivery.payload:
            case "raise":
                raise ValueError("broken")
            case "exit":
                raise SystemExit(3)
            case "nack":
                delivery.nack(reason="a\nnot today")
            case "reject":
                delivery.reject("never")
            case "snooze":
                delivery.snooze(60)

    publish_many("t", [Message(what, key="k") for what in ("raise", "exit", "nack", "reject", "snooze", "ack")])
    sub = Sub(handler(function=work, max_attempts=1))
    sub.settle()
    spans = traced.spans("process t")
    assert [span.attributes["messaging.mysqlqueue.outcome"] for span in spans] == [
        *["dead_lettered"] * 4,
        "snoozed",
        "acked",
    ]
    assert [span.attributes.get("error.type") for span in spans] == [
        "ValueError",
        "SystemExit",
        "dead_lettered",
        "dead_lettered",
        None,
        None,
    ]
    assert [span.status.description for span in spans] == [
        "ValueError: broken",
        "SystemExit: 3",
        "not today",
        "never",
        None,
        None,
    ]
    assert [len(span.events) for span in spans] == [1, 1, 0, 0, 0, 0]
    assert "Traceback" in spans[0].events[0].attributes["exception.stacktrace"]


def test_a_batch_links_to_each_context_once(traced):
    publish("t", 1, id="alone", key="k")
    publish_many("t", [Message(n, key="k") for n in range(300)])
    OutboxMessage.objects.create(topic="t", payload=b"plain SQL", partition_key="k")
    sub = Sub(handler(batch=True, batch_size=500), claim_size=500, prefetch=500)
    sub.step()
    assert sub.work() == 302
    one, many = traced.spans("send t")
    process = traced.only("process t")
    assert [same(link.context, span.context) for link, span in zip(process.links, (one, many), strict=True)] == [
        True,
        True,
    ]
    assert [dict(link.attributes) for link in process.links] == [{"messaging.message.id": "alone"}, {}]
    assert process.attributes["messaging.batch.message_count"] == 302
    assert "messaging.message.id" not in process.attributes
    assert "messaging.mysqlqueue.outcome" not in process.attributes


def test_an_async_handler_is_inside_its_span(traced, no_handlers):
    inside = []

    @declare("t", group="g")
    async def work(delivery):
        inside.append(api.get_current_span().get_span_context())

    publish("t", 1)
    deliver_all()
    assert same(inside[0], traced.only("process t").context)


def test_what_a_handler_publishes_is_in_its_trace(traced):
    publish("t", 1)
    sub = Sub(handler(function=lambda delivery: publish("next", 1)), handler("next", "g2"))
    sub.settle()
    assert same(traced.only("send next").parent, traced.only("process t").context)
    assert same(traced.only("process next").links[0].context, traced.only("send next").context)


def test_signals_are_sent_inside_the_span(traced):
    seen = []

    def note(**_):
        seen.append(api.get_current_span().get_span_context())

    delivery_started.connect(note)
    delivery_handled.connect(note)
    try:
        publish("t", 1)
        Sub(handler()).settle()
    finally:
        delivery_started.disconnect(note)
        delivery_handled.disconnect(note)
    process = traced.only("process t")
    assert len(seen) == 2
    assert all(same(one, process.context) for one in seen)


def test_continuing_the_trace(traced, no_handlers):
    otel.instrument(tracer_provider=traced.provider, continue_trace=True)
    token = context.attach(baggage.set_baggage("tenant", "seven"))
    seen = []
    try:
        publish("t", 1)
    finally:
        context.detach(token)
    declare("t", group="g")(lambda delivery: seen.append(baggage.get_baggage("tenant")))
    with traced.tracer.start_as_current_span("ambient"):
        deliver_all()
    publish_many("t", [Message(1, key="k"), Message(2, key="k")])
    Sub(handler(group="g2", batch=True, batch_size=10)).settle()
    (send, _), (process, *batches) = traced.spans("send t"), traced.spans("process t")
    assert same(process.parent, send.context)
    assert process.context.trace_id == send.context.trace_id
    assert [link.context.span_id for link in process.links] == [
        send.context.span_id,
        traced.only("ambient").context.span_id,
    ]
    assert seen == ["seven"]
    assert all(span.parent is None for span in batches), "a batch has many, and only links to them"


@pytest.mark.parametrize(
    "metadata", [{"traceparent": 5}, {"traceparent": "nonsense"}, {"traceparent": None, "tracestate": ["x"]}]
)
def test_what_is_no_context_is_no_link(traced, metadata):
    publish("t", 1, metadata=metadata)
    Sub(handler()).settle()
    assert traced.only("process t").links == ()
    assert not DeliveryState.objects.exists()


def test_a_context_of_plain_sql_is_linked(traced):
    OutboxMessage.objects.create(topic="t", payload=b"1", metadata={"traceparent": SOMEBODY})
    Sub(handler()).settle()
    assert format(traced.only("process t").links[0].context.trace_id, "032x") == SOMEBODY[3:35]
