"""Spans of publishing, and the context that travels."""

from __future__ import annotations

import pytest
from asgiref.sync import async_to_sync
from django.db import connections, transaction
from opentelemetry import baggage, context, propagate
from opentelemetry import trace as api
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from django_mysqlqueue import InvalidMessage, Message, TransactionMismatch, apublish, otel, publish, publish_many
from django_mysqlqueue.models import QueueMessage
from tests.support.harness import Sub, handler
from tests.support.tracing import SOMEBODY, same, stored, traceparent


def test_publish(traced):
    with traced.tracer.start_as_current_span("request"):
        publish("orders", 1, id="one", metadata={"from": "web"})
    send, request = traced.only("send orders"), traced.only("request")
    assert send.kind is SpanKind.PRODUCER
    assert same(send.parent, request.context)
    assert dict(send.attributes) | {"server.address": "", "server.port": 0} == {
        "messaging.system": "mysqlqueue",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.message.id": "one",
        "server.address": "",
        "server.port": 0,
    }
    assert stored() == [{"content_type": "application/json", "from": "web", "traceparent": traceparent(send)}]
    assert send.status.status_code is StatusCode.UNSET
    assert not send.links


def test_the_servers_address(traced, settings):
    alias = connections["default"]
    before = alias.settings_dict
    try:
        alias.settings_dict = {**before, "HOST": "db.internal", "PORT": "3307"}
        assert otel._attributes("send", "t", "default")["server.address"] == "db.internal"
        assert otel._attributes("send", "t", "default")["server.port"] == 3307
        alias.settings_dict = {**before, "HOST": "/run/mysqld/mysqld.sock", "PORT": ""}
        assert "server.port" not in otel._attributes("send", "t", "default")
        alias.settings_dict = {**before, "HOST": ""}
        assert "server.address" not in otel._attributes("send", "t", "default")
    finally:
        alias.settings_dict = before


def test_many_messages_share_a_span(traced):
    assert publish_many("orders", (Message(n, metadata={"n": n}) if n % 2 else n for n in range(1000))) == 1000
    send = traced.only("send orders")
    assert len(traced.spans()) == 1
    assert send.attributes["messaging.batch.message_count"] == 1000
    assert "messaging.message.id" not in send.attributes
    rows = stored()
    assert {row["traceparent"] for row in rows} == {traceparent(send)}
    assert [row.get("n") for row in rows[:4]] == [None, 1, None, 3]


def test_apublish_joins_the_trace(traced):
    async def request():
        with traced.tracer.start_as_current_span("request"):
            await apublish("orders", 1)

    async_to_sync(request)()
    assert same(traced.only("send orders").parent, traced.only("request").context)


def test_a_context_that_the_publisher_gives_stays(traced):
    publish("orders", 1, metadata={"traceparent": SOMEBODY})
    publish_many("orders", [Message(2, metadata={"traceparent": SOMEBODY}), Message(3)])
    one, many = traced.spans("send orders")
    assert one.kind is SpanKind.CLIENT, "its context is not the message's"
    assert format(one.links[0].context.span_id, "016x") == SOMEBODY[36:52]
    assert many.kind is SpanKind.PRODUCER
    assert [row["traceparent"] for row in stored()] == [SOMEBODY, SOMEBODY, traceparent(many)]


def test_the_configured_propagator_writes_and_reads(traced, monkeypatch):
    class Own(TextMapPropagator):
        fields = {"x-own"}

        def inject(self, carrier, context=None, setter=None):
            span = api.get_current_span(context).get_span_context()
            carrier["x-own"] = f"{span.trace_id:x}/{span.span_id:x}"

        def extract(self, carrier, context=None, getter=None):
            if "x-own" not in carrier:
                return context
            trace_id, span_id = (int(part, 16) for part in carrier["x-own"].split("/"))
            span = api.SpanContext(trace_id, span_id, is_remote=True)
            return api.set_span_in_context(api.NonRecordingSpan(span), context)

    monkeypatch.setattr(propagate, "_HTTP_TEXT_FORMAT", Own())
    publish("t", 1)
    Sub(handler()).settle()
    send = traced.only("send t")
    assert stored() == []
    (row,) = QueueMessage.objects.all()
    assert row.metadata["x-own"] == f"{send.context.trace_id:x}/{send.context.span_id:x}"
    assert "traceparent" not in row.metadata
    assert same(traced.only("process t").links[0].context, send.context)


def test_baggage_travels(traced):
    token = context.attach(baggage.set_baggage("tenant", "seven"))
    try:
        publish("t", 1)
    finally:
        context.detach(token)
    assert stored()[0]["baggage"] == "tenant=seven"


def test_a_publish_that_fails_is_an_error(traced):
    with pytest.raises(InvalidMessage):
        publish("orders", object())
    with transaction.atomic("other"), pytest.raises(TransactionMismatch):
        publish("orders", 1)
    with pytest.raises(InvalidMessage, match="message 1"):
        publish_many("orders", [1, object()])
    spans = traced.spans("send orders")
    assert [span.attributes["error.type"] for span in spans] == [
        "django_mysqlqueue.exceptions.InvalidMessage",
        "django_mysqlqueue.exceptions.TransactionMismatch",
        "django_mysqlqueue.exceptions.InvalidMessage",
    ]
    assert all(span.status.status_code is StatusCode.ERROR for span in spans)
    assert all(span.events[0].name == "exception" for span in spans)
    assert stored() == []


def test_what_has_no_room_for_the_context_is_published_without(traced):
    full = {"text": "x" * (65_535 - len('{"text":"","content_type":"application/json"}'))}
    publish("orders", 1, metadata=full)
    publish_many("orders", [Message(2, metadata=full), Message(3)])
    assert ["traceparent" in row for row in stored()] == [False, False, True]
    with pytest.raises(InvalidMessage, match="65536 bytes"):
        publish("orders", 1, metadata={"text": full["text"] + "x"})
    with pytest.raises(InvalidMessage, match="must be a mapping"):
        publish("orders", 1, metadata=5)  # type: ignore[arg-type]


def test_a_trace_that_is_not_sampled_is_told_on(db):
    provider = TracerProvider(sampler=ALWAYS_OFF)
    otel.instrument(tracer_provider=provider)
    try:
        publish("t", 1)
        flags = int(stored()[0]["traceparent"].rpartition("-")[2], 16)
        assert not flags & api.TraceFlags.SAMPLED
        assert Sub(handler()).settle() == 1
    finally:
        otel.uninstrument()


def test_without_an_sdk_nothing_is_written(db):
    otel.instrument(tracer_provider=api.NoOpTracerProvider())
    try:
        publish("t", 1)
        assert stored() == [{"content_type": "application/json"}]
        assert Sub(handler()).settle() == 1
    finally:
        otel.uninstrument()
