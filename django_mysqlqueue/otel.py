"""OpenTelemetry spans for publishing and handling, following the semantic conventions for messaging.

This module requires the extra ``otel``. Nothing is traced before ``instrument()`` is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from django.db import connections
from opentelemetry import propagate
from opentelemetry import trace as api
from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, Tracer, TracerProvider

from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.runtime.handling import observers
from django_mysqlqueue.runtime.log import error_line
from django_mysqlqueue.service import publish_hooks
from django_mysqlqueue.service.messages import Message
from django_mysqlqueue.subscriptions.delivery import Delivery
from django_mysqlqueue.version import __version__

__all__ = ["instrument", "uninstrument"]

SYSTEM = "mysqlqueue"
SCHEMA = "https://opentelemetry.io/schemas/1.44.0"
"""The version of the semantic conventions."""
FAILED = (Outcome.FAILED, Outcome.DEAD_LETTERED)


def instrument(*, tracer_provider: TracerProvider | None = None, continue_trace: bool = False) -> None:
    """Start tracing this process. Call it once per process, for example in ``AppConfig.ready``.

    A call of ``publish`` is traced as a span ``send <topic>`` of the kind PRODUCER, and a call of ``publish_many`` as
    one span for all of its messages. The configured propagator writes the span's context into each message's metadata
    (``traceparent``, ``tracestate``, ``baggage``). A message that has a context already keeps it.

    Each call of a handler gets a span ``process <topic>`` of the kind CONSUMER, which starts a new trace and links to
    the contexts of its messages. Its status is an error if the handler raises, nacks or rejects. The span of a job is
    named after its task.

    Args:
        tracer_provider: the provider to use (default: the global one, even if it is set later).
        continue_trace: if True, the span of a handler's call is a child of the message's context, so that publishing
            and handling are one trace. A batch has several contexts: its span only links to them.
    """
    tracer = api.get_tracer("django_mysqlqueue", __version__, tracer_provider, SCHEMA)
    publish_hooks.trace = _Publishing(tracer)
    observers.trace = _Handling(tracer, continue_trace)


def uninstrument() -> None:
    """Stop tracing this process."""
    publish_hooks.trace = observers.trace = None


# -- publishing -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Publishing:
    tracer: Tracer

    @contextlib.contextmanager
    def __call__(self, topic: str, using: str, message: Message | None) -> Iterator[_Send]:
        # A consumer links to the message's own context if it has one. Then this span is not the message's producer.
        own = None if message is None else _context_of(message.metadata)
        with self.tracer.start_as_current_span(
            f"send {topic}",
            kind=SpanKind.PRODUCER if own is None else SpanKind.CLIENT,
            attributes=_attributes("send", topic, using),
            links=None if own is None else [Link(own)],
        ) as span:
            try:
                yield _Send(span, is_batch=message is None)
            except BaseException as error:
                span.set_attribute("error.type", _type_name(error))
                raise


class _Send:
    """The span of one publish."""

    def __init__(self, span: Span, *, is_batch: bool) -> None:
        self._span = span
        self._is_batch = is_batch
        self._headers: dict[str, str] = {}
        propagate.inject(self._headers)

    def stamped(self, message: Message) -> Message:
        metadata = message.metadata
        if not self._headers or not isinstance(metadata, Mapping | None) or _context_of(metadata) is not None:
            return message
        return replace(message, metadata={**self._headers, **(metadata or {})})

    def sent(self, count: int, message_id: str = "") -> None:
        if self._is_batch:
            self._span.set_attribute("messaging.batch.message_count", count)
        else:
            self._span.set_attribute("messaging.message.id", message_id)


# -- handling -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Handling:
    tracer: Tracer
    continue_trace: bool

    @contextlib.contextmanager
    def __call__(self, deliveries: Sequence[Delivery]) -> Iterator[_Call]:
        first = deliveries[0]
        attributes = _attributes("process", first.topic, first._using)
        attributes["messaging.consumer.group.name"] = first.group
        attributes["messaging.client.id"] = first._claimed.by
        if first._handler.batch:
            attributes["messaging.batch.message_count"] = len(deliveries)
        else:
            attributes["messaging.message.id"] = first.id
            attributes["messaging.mysqlqueue.offset"] = first.offset
            attributes["messaging.mysqlqueue.attempt"] = first.attempt
        name = f"process {first.topic}"
        if (job := first._claimed.job) is not None:
            name = attributes["messaging.mysqlqueue.task"] = job.task
        links = _links(deliveries)
        parent: Context | None = None
        if self.continue_trace and links and not first._handler.batch:
            ambient = api.get_current_span().get_span_context()
            if ambient.is_valid:
                links.append(Link(ambient))
            parent = propagate.extract(_carrier(first.metadata))
        with (
            _attached(parent),  # With its baggage.
            self.tracer.start_as_current_span(name, kind=SpanKind.CONSUMER, attributes=attributes, links=links) as span,
        ):
            yield _Call(span, is_batch=first._handler.batch)


@dataclass(frozen=True, slots=True)
class _Call:
    span: Span
    is_batch: bool

    def ended(self, outcomes: Sequence[Outcome], reasons: Sequence[str], error: BaseException | None) -> None:
        if not self.is_batch:
            self.span.set_attribute("messaging.mysqlqueue.outcome", outcomes[0].value)
        if error is not None:
            self.span.record_exception(error)
            self.span.set_attribute("error.type", _type_name(error))
            self.span.set_status(Status(StatusCode.ERROR, error_line(error)))
            return
        failed = [pair for pair in zip(outcomes, reasons, strict=True) if pair[0] in FAILED]
        if failed:
            outcome, reason = failed[0]
            self.span.set_attribute("error.type", outcome.value)
            self.span.set_status(Status(StatusCode.ERROR, reason.strip().rsplit("\n", 1)[-1]))


def _links(deliveries: Sequence[Delivery]) -> list[Link]:
    """Return a link for each context, with the message's id if only one message has it.

    Messages that were published together share a context.
    """
    found: dict[tuple[int, int], tuple[SpanContext, list[str]]] = {}
    for delivery in deliveries:
        context = _context_of(delivery.metadata)
        if context is not None:
            found.setdefault((context.trace_id, context.span_id), (context, []))[1].append(delivery.id)
    return [
        Link(context, {"messaging.message.id": ids[0]} if len(ids) == 1 else None) for context, ids in found.values()
    ]


# -- both -----------------------------------------------------------------------


@contextlib.contextmanager
def _attached(context: Context | None) -> Iterator[None]:
    if context is None:
        yield
        return
    token = attach(context)
    try:
        yield
    finally:
        detach(token)


def _attributes(operation: str, topic: str, using: str) -> dict[str, str | int]:
    database = connections[using].settings_dict
    attributes: dict[str, str | int] = {
        "messaging.system": SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
    }
    if database.get("HOST"):
        attributes["server.address"] = str(database["HOST"])
        if str(database.get("PORT", "")).isdigit():
            attributes["server.port"] = int(database["PORT"])
    return attributes


def _carrier(metadata: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in metadata.items() if isinstance(name, str) and isinstance(value, str)}


def _context_of(metadata: Mapping[str, Any] | None) -> SpanContext | None:
    """Return the context in a message's metadata, if there is a valid one."""
    if not isinstance(metadata, Mapping) or not metadata:
        return None
    context = api.get_current_span(propagate.extract(_carrier(metadata), Context())).get_span_context()
    return context if context.is_valid else None


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
