"""Read-only lists of the tables that the admin can register (those with a single-column key).

The admin imports this module; without ``django.contrib.admin`` nobody does.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from django_mysqlqueue.models import ConsumerGroup, OutboxMessage, QueueMessage, Sequencer
from django_mysqlqueue.service.messages import decode_metadata

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin

SHOWN_BYTES = 2000


def moment(milliseconds: int) -> datetime.datetime | None:
    """Epoch milliseconds as the admin shows times; 0 is none."""
    if not milliseconds:
        return None
    return timezone.localtime(datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC))


class ReadOnlyAdmin(_ModelAdmin):
    """Looks and does not touch: a row changed by hand would break what the protocol relies on."""

    show_full_result_count = False
    list_per_page = 50
    actions = None

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
        return text if row.size <= SHOWN_BYTES else f"{text} … ({row.size} bytes)"

    @admin.display(description=_("metadata"))
    def headers(self, row: Any) -> str:
        return ", ".join(f"{name}={value}" for name, value in decode_metadata(row.metadata).items())

    @admin.display(description=_("created"), ordering="created_at")
    def created(self, row: Any) -> datetime.datetime | None:
        return moment(row.created_at)


@admin.register(QueueMessage)
class QueueMessageAdmin(MessageAdmin):
    list_display = ("offset", "topic", "partition_key", "message_id", "size", "published", "failed_group")
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
        "last_error",
    )

    @admin.display(description=_("published"), ordering="offset")
    def published(self, row: QueueMessage) -> datetime.datetime | None:
        return moment(row.published_at)

    @admin.display(description=_("failed"))
    def failed(self, row: QueueMessage) -> datetime.datetime | None:
        return moment(row.failed_at)


@admin.register(OutboxMessage)
class OutboxMessageAdmin(MessageAdmin):
    list_display = ("outbox_id", "topic", "partition_key", "message_id", "size", "created", "due")
    ordering = ("deliver_at", "outbox_id")
    fields = ("outbox_id", "topic", "partition_key", "message_id", "body", "headers", "created", "due", "target_group")

    @admin.display(description=_("deliver at"), ordering="deliver_at")
    def due(self, row: OutboxMessage) -> datetime.datetime | str | None:
        return moment(row.deliver_at) or str(_("at once"))


@admin.register(ConsumerGroup)
class ConsumerGroupAdmin(ReadOnlyAdmin):
    list_display = ("consumer_group", "topic", "mode", "start_offset", "paused", "registered")
    list_filter = ("mode", "paused")
    ordering = ("topic", "consumer_group")
    fields = list_display

    @admin.display(description=_("registered"), ordering="registered_at")
    def registered(self, row: ConsumerGroup) -> datetime.datetime | None:
        return moment(row.registered_at)


@admin.register(Sequencer)
class SequencerAdmin(ReadOnlyAdmin):
    list_display = ("last_offset", "sequenced")
    fields = list_display

    @admin.display(description=_("sequenced"), ordering="sequenced_at")
    def sequenced(self, row: Sequencer) -> datetime.datetime | None:
        return moment(row.sequenced_at)
