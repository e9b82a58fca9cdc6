"""Read-only lists of the tables that the admin can register (those with a single-column key).

The admin imports this module; without ``django.contrib.admin`` nobody does.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from django_mysqlqueue.models import ConsumerGroup, OutboxMessage, QueueMessage, Sequencer
from django_mysqlqueue.service.messages import decode_metadata
from django_mysqlqueue.service.publishing import queue_alias

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin

SHOWN_BYTES = 2000
ROWS = 8


def moment(milliseconds: int) -> str:
    """Epoch milliseconds in the project's time zone, to the millisecond; 0 is none."""
    if not milliseconds:
        return ""
    value = datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC)
    return timezone.localtime(value).isoformat(" ", "milliseconds")


def text_box(text: str) -> str:
    """Long text that wraps, shown as text whatever it holds."""
    return format_html('<textarea class="vLargeTextField" rows="{}" readonly>{}</textarea>', ROWS, text)


class ReadOnlyAdmin(_ModelAdmin):
    """Looks and does not touch: a row changed by hand would break what the protocol relies on."""

    show_full_result_count = False
    list_per_page = 50
    actions = None

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        # The queue's database, whatever the router says of reads: a replica lags behind.
        return super().get_queryset(request).using(queue_alias())

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class MessageAdmin(ReadOnlyAdmin):
    """What the outbox's and the log's lists share."""

    @admin.display(description=_("payload"))
    def body(self, row: Any) -> str:
        text = bytes(row.payload[:SHOWN_BYTES]).decode(errors="backslashreplace")
        return text_box(text if row.size <= SHOWN_BYTES else f"{text} … ({row.size} bytes)")

    @admin.display(description=_("bytes"))
    def octets(self, row: Any) -> int:
        return int(row.size)

    @admin.display(description=_("metadata"))
    def headers(self, row: Any) -> str:
        return ", ".join(f"{name}={value}" for name, value in decode_metadata(row.metadata).items())

    @admin.display(description=_("created"), ordering="created_at")
    def created(self, row: Any) -> str:
        return moment(row.created_at)


@admin.register(QueueMessage)
class QueueMessageAdmin(MessageAdmin):
    list_display = ("offset", "topic", "partition_key", "message_id", "octets", "published", "failed_group")
    search_fields = ("=topic", "=message_id", "=partition_key")
    search_help_text = _("A whole topic, id or partition key")
    ordering = ("-offset",)
    fields = (
        "offset",
        "topic",
        "partition_key",
        "message_id",
        "body",
        "headers",
        "created",
        "published",
        "target_group",
        "original_id",
        "original_topic",
        "original_offset",
        "failed_group",
        "failed",
        "failure_count",
        "error",
    )

    @admin.display(description=_("published"), ordering="offset")
    def published(self, row: QueueMessage) -> str:
        return moment(row.published_at)

    @admin.display(description=_("last error"))
    def error(self, row: QueueMessage) -> str:
        return text_box(row.last_error) if row.last_error else ""

    @admin.display(description=_("failed"))
    def failed(self, row: QueueMessage) -> str:
        return moment(row.failed_at)


@admin.register(OutboxMessage)
class OutboxMessageAdmin(MessageAdmin):
    list_display = ("outbox_id", "topic", "partition_key", "message_id", "octets", "created", "due")
    ordering = ("deliver_at", "outbox_id")
    fields = ("outbox_id", "topic", "partition_key", "message_id", "body", "headers", "created", "due", "target_group")

    @admin.display(description=_("deliver at"), ordering="deliver_at")
    def due(self, row: OutboxMessage) -> str:
        return moment(row.deliver_at) or str(_("at once"))


@admin.register(ConsumerGroup)
class ConsumerGroupAdmin(ReadOnlyAdmin):
    list_display = ("consumer_group", "topic", "mode", "start_offset", "paused", "registered")
    list_filter = ("mode", "paused")
    ordering = ("topic", "consumer_group")
    fields = list_display

    @admin.display(description=_("registered"), ordering="registered_at")
    def registered(self, row: ConsumerGroup) -> str:
        return moment(row.registered_at)


@admin.register(Sequencer)
class SequencerAdmin(ReadOnlyAdmin):
    list_display = ("last_offset", "sequenced")
    fields = list_display

    @admin.display(description=_("sequenced"), ordering="sequenced_at")
    def sequenced(self, row: Sequencer) -> str:
        return moment(row.sequenced_at)
