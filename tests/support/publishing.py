"""Ways to publish, and what they have stored."""

from __future__ import annotations

import contextlib

import pytest
from django.db import transaction

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import OutboxMessage
from tests.support.harness import USING, in_thread


def stored():
    """The payloads in the outbox in order, as their JSON text."""
    return [
        bytes(payload).decode() for payload in OutboxMessage.objects.order_by("pk").values_list("payload", flat=True)
    ]


def committed():
    """What another connection sees: nothing that is still in a transaction."""
    return in_thread(stored)


def one_or_many(test):
    return pytest.mark.parametrize(
        "send",
        [publish, publish_one_of_many],
        ids=["publish", "publish_many"],
    )(test)


def publish_one_of_many(topic, payload, *, using=None, on_mismatch="error", **fields):
    return publish_many(topic, [Message(payload, **fields)], using=using, on_mismatch=on_mismatch)


class Undo(Exception):
    """Rolls a test's transaction back."""


@contextlib.contextmanager
def rolled_back(using=USING, **options):
    """A transaction that ends in a rollback."""
    with contextlib.suppress(Undo), transaction.atomic(using=using, **options):
        yield
        raise Undo
