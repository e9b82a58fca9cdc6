"""Traces: spans of publishing and handling, and what links them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext
from opentelemetry import baggage, context, propagate
from opentelemetry import trace as api
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from django_mysqlqueue import InvalidMessage, Message, TransactionMismatch, apublish, otel, publish, publish_many
from django_mysqlqueue import subscriber as declare
from django_mysqlqueue.models import DeliveryState, OutboxMessage, QueueMessage
from django_mysqlqueue.runtime.handling import observers
from django_mysqlqueue.service import publish_hooks
from django_mysqlqueue.signals import delivery_handled, delivery_started
from django_mysqlqueue.testing import deliver_all
from tests.support.harness import Sub, handler
from tests.support.paths import ROOT

SOMEBODY = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
"""The context of a trace elsewhere."""


class Tracing:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("tests")

    def spans(self, name=None):
        found = self.exporter.get_finished_spans()
        return [span for span in found if name in (None, span.name)]

    def only(self, name):
        (span,) = self.spans(name)
        return span


@pytest.fixture
def traced(db):
    made = Tracing()
    otel.instrument(tracer_provider=made.provider)
    yield made
    otel.uninstrument()


def stored():
    return [row.metadata for row in OutboxMessage.objects.order_by("outbox_id")]


def same(one, other):
    return (one.trace_id, one.span_id) == (other.trace_id, other.span_id)


def traceparent(span):
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}"


# -- publishing ---------------------------------------------------------------


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


# -- handling -----------------------------------------------------------------


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
    sub = Sub(handler(batch=True, batch_size=500), batch_size=500, prefetch=500)
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


# -- off ----------------------------------------------------------------------


def test_tracing_costs_no_statement(traced):
    def cost():
        with CaptureQueriesContext(connection) as captured:
            publish("t", 1, key="k")  # without one it is chance how many partitions there are
            publish_many("t", [Message(number, key="k") for number in range(10)])
        sub = Sub(handler())
        with CaptureQueriesContext(connection) as also:
            sub.step()
            sub.work()
            sub.flush()
        sub.leave()
        return len(captured), len(also)

    cost()
    on = cost()
    assert traced.spans()
    otel.uninstrument()
    count = len(traced.spans())
    assert cost() == on
    assert len(traced.spans()) == count
    assert publish_hooks.trace is None
    assert observers.trace is None


EVERYTHING = """
import importlib, pkgutil, sys

name, blocked = sys.argv[1], sys.argv[2] == "blocked"
if blocked:
    sys.modules[name] = None  # an import fails
import django
django.setup()
from django.core.management import load_command_class
from django_mysqlqueue import inspection, management, operations, runtime, service, testing
for package in (service, operations, inspection, runtime, management):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
for command in pkgutil.iter_modules([management.__path__[0] + "/commands"]):
    load_command_class("django_mysqlqueue", command.name)
assert blocked or name not in sys.modules, "imported unasked"
"""


@pytest.mark.any_engine
@pytest.mark.parametrize("how", ["blocked", "there"])
@pytest.mark.parametrize("name", ["opentelemetry", "prometheus_client", "health_check"])
def test_nothing_of_an_extra_is_imported_unasked(name, how, tmp_path):
    env = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "TEST_SQLITE_FILE": str(tmp_path / "x.sqlite3")}
    done = subprocess.run(
        [sys.executable, "-c", EVERYTHING, name, how], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.any_engine
def test_the_set_up_of_the_guide(tmp_path):
    """As the page has it, with the SDK's exporter to the console in place of the one that needs a collector."""
    (block,) = re.findall(r"```python\n([^`]*OTLPSpanExporter[^`]*)```", (ROOT / "docs/howto/observe.md").read_text())
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").touch()
    otlp = "from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter\n"
    assert otlp in block
    console = "from opentelemetry.sdk.trace.export import ConsoleSpanExporter as OTLPSpanExporter\n"
    (package / "apps.py").write_text(block.replace(otlp, console))
    code = """
import tests.settings
tests.settings.INSTALLED_APPS.append("shop")
import django
django.setup()
from django.core.management import call_command
from django_mysqlqueue import publish
call_command("migrate", verbosity=0)
publish("orders", 1)
"""
    env = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "TEST_SQLITE_FILE": str(tmp_path / "x.sqlite3"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
    }
    env.pop("DATABASE_URL", None)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"name": "send orders"' in done.stdout
