"""Rows made directly, for tests of what reads them."""

import factory

from django_mysqlqueue import models


class QueueMessageFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = models.QueueMessage

    topic = "t"
    partition_key = "k"
    message_id = factory.Sequence(lambda number: f"id-{number}")
    payload = b"{}"
    created_at = 1_700_000_000_000
    published_at = 1_700_000_000_000


class OutboxMessageFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = models.OutboxMessage

    topic = "t"
    partition_key = "k"
    message_id = factory.Sequence(lambda number: f"id-{number}")
    payload = b"{}"


class QuarantinedMessageFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = models.QuarantinedMessage

    topic = "t"
    partition_key = "k"
    message_id = factory.Sequence(lambda number: f"id-{number}")
    payload = b"{}"
    deliver_at = 0
    created_at = 1_700_000_000_000
    reason = "an error"


class ConsumerGroupFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = models.ConsumerGroup

    consumer_group = "g"
    topic = "t"
    mode = models.ConsumerGroup.Mode.ORDERED


class PartitionLeaseFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = models.PartitionLease

    consumer_group = "g"
    topic = "t"
    partition_key = factory.Sequence(lambda number: f"k{number:03}")


class DeliveryStateFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = models.DeliveryState

    consumer_group = "g"
    topic = "t"
    partition_key = "k"
    message_offset = factory.Sequence(lambda number: number + 1)
