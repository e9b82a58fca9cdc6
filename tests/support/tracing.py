"""Spans that were exported."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from django_mysqlqueue.models import OutboxMessage

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


def stored():
    return [row.metadata for row in OutboxMessage.objects.order_by("outbox_id")]


def same(one, other):
    return (one.trace_id, one.span_id) == (other.trace_id, other.span_id)


def traceparent(span):
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}"
