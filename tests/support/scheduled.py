"""What waits in the outbox."""

from __future__ import annotations

from django_mysqlqueue.models import OutboxMessage, QueueMessage
from tests.support.harness import USING
from tests.support.internals import Session


def due(*ids):
    """Their time has come."""
    OutboxMessage.objects.filter(message_id__in=ids).update(deliver_at=Session(USING).now() - 1000)


def in_log():
    return list(QueueMessage.objects.order_by("offset").values_list("message_id", flat=True))


def waiting():
    return sorted(OutboxMessage.objects.values_list("message_id", flat=True))
