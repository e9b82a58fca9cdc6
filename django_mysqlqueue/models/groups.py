"""Consumer groups and their subscribers: registration, delivery state, leases, offsets, slots and heartbeats."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_mysqlqueue.db.fields import BytewiseCharField, BytewiseTextField, NowMilliseconds, json_object
from django_mysqlqueue.db.tables import GROUPS, HEARTBEATS, LEASES, OFFSETS, SLOTS, STATE
from django_mysqlqueue.models.base import QueueModel
from django_mysqlqueue.names.rules import KEY_LENGTH, NAME_LENGTH, TOPIC_COLUMN_LENGTH


class ConsumerGroup(QueueModel):
    """A consumer group on a topic. It is registered before its first subscriber starts, because GC must wait for it."""

    class Mode(models.TextChoices):
        """The modes of delivery."""

        ORDERED = "ordered", _("ordered")
        SHARED = "shared", _("shared")

    class AfterSeek(models.TextChoices):
        """Whether a seek, drop or move is in progress, and the state of the group after it."""

        NOTHING = "", _("no seek, drop or move in progress")
        RESUME = "resume", _("the group resumes")
        STAY = "stay", _("the group stays paused")
        DROPPED = "dropped", _("the group is dropped")
        MOVES = "moves", _("the group waits for its namesake in the database that the topic leaves")

    id = models.BigAutoField(primary_key=True)
    consumer_group = BytewiseCharField(_("consumer group"), max_length=NAME_LENGTH)
    topic = BytewiseCharField(_("topic"), max_length=TOPIC_COLUMN_LENGTH)
    mode = BytewiseCharField(_("mode"), max_length=10, choices=Mode.choices)
    start_offset = models.BigIntegerField(_("start offset"), db_default=0)
    paused = models.BooleanField(_("paused"), db_default=False)
    after_seek = BytewiseCharField(
        _("after the seek"),
        max_length=10,
        db_default="",
        blank=True,
        choices=AfterSeek,
        help_text=_("a seek, drop or move has not finished; if it was interrupted, run it again"),
    )
    operation = models.BigIntegerField(
        _("operation"), db_default=0, help_text=_("id of the seek or drop in progress; 0: none")
    )
    revision = models.BigIntegerField(
        _("revision"), db_default=0, help_text=_("grows when subscribers must read the group's state again")
    )
    overrides = json_object(
        _("overrides"), _("options that operators have overridden: by name, the value, since when and by whom")
    )
    limits = json_object(
        _("limits"), _("limits on the rate and on the messages in flight, as migrate has registered them")
    )
    filter = json_object(_("filter"), _("which messages the group gets, as migrate has registered it; {}: all"))
    allowed_users = json_object(_("allowed users"), _("database users that may use the group; {}: all"))
    registered_at = models.BigIntegerField(_("registered at"), db_default=NowMilliseconds())
    sought_at = models.BigIntegerField(
        _("sought at"), db_default=0, help_text=_("when its last seek began or ended; 0: never")
    )

    class Meta:
        db_table = GROUPS
        verbose_name = _("consumer group")
        verbose_name_plural = _("consumer groups")
        constraints = [
            models.UniqueConstraint(fields=["consumer_group", "topic"], name="queue_consumer_groups_name"),
        ]

    def __str__(self) -> str:
        return f"{self.consumer_group} on {self.topic}"


class Dashboard(ConsumerGroup):
    """A proxy model for the admin's pages and their permissions. It has no table of its own."""

    class Meta:
        proxy = True
        verbose_name = _("queue")
        verbose_name_plural = _("dashboard")
        default_permissions = ()


class Topic(models.Model):
    """A topic as an object that permissions can be granted on. It has no table: a topic exists by its messages."""

    name = BytewiseCharField(_("name"), max_length=TOPIC_COLUMN_LENGTH, primary_key=True)

    class Meta:
        managed = False
        verbose_name = _("topic")
        default_permissions = ()
        permissions = [
            ("view_dashboard", "Can view the dashboard, without payloads and metadata"),
            ("operate_dashboard", "Can operate the queue: pause, seek, retry, redrive, discard, reschedule"),
            ("see_payloads", "Can see payloads and metadata of messages"),
            ("publish_messages", "Can publish test messages"),
        ]

    def __str__(self) -> str:
        return self.name


class DeliveryState(QueueModel):
    """A message's state for one group, from its claim until the watermark includes it."""

    pk = models.CompositePrimaryKey("consumer_group", "topic", "partition_key", "message_offset")
    consumer_group = BytewiseCharField(_("consumer group"), max_length=NAME_LENGTH)
    topic = BytewiseCharField(_("topic"), max_length=TOPIC_COLUMN_LENGTH)
    partition_key = BytewiseCharField(_("partition key"), max_length=KEY_LENGTH)
    message_offset = models.BigIntegerField(_("message offset"))
    acked = models.BooleanField(_("settled"), db_default=False, help_text=_("acked or dead-lettered"))
    invisible_until = models.BigIntegerField(_("invisible until"), db_default=0)
    retry_count = models.PositiveIntegerField(_("retry count"), db_default=0)
    delivery_token = models.BigIntegerField(_("delivery token"), db_default=0)
    suspect = models.BooleanField(
        _("suspect"), db_default=False, help_text=_("claimed as a suspected poison message; never without a token")
    )
    delivered_by = BytewiseCharField(_("delivered by"), max_length=KEY_LENGTH, db_default="", blank=True)
    delivered_at = models.BigIntegerField(_("delivered at"), db_default=0)
    last_error = BytewiseTextField(_("last error"), db_default=models.Value(""), blank=True)

    class Meta:
        db_table = STATE
        verbose_name = _("delivery state")
        verbose_name_plural = _("delivery states")
        indexes = [
            models.Index(
                fields=["consumer_group", "topic", "acked", "invisible_until"], name="queue_delivery_state_due"
            ),
        ]


class PartitionLease(QueueModel):
    """A subscriber's ownership of a partition, valid while its heartbeat is recent.

    ``leased_by`` is empty if the partition has work but no owner.
    """

    pk = models.CompositePrimaryKey("consumer_group", "topic", "partition_key")
    consumer_group = BytewiseCharField(_("consumer group"), max_length=NAME_LENGTH)
    topic = BytewiseCharField(_("topic"), max_length=TOPIC_COLUMN_LENGTH)
    partition_key = BytewiseCharField(_("partition key"), max_length=KEY_LENGTH)
    leased_by = BytewiseCharField(_("leased by"), max_length=KEY_LENGTH, db_default="", blank=True)
    leased_at = models.BigIntegerField(_("leased at"), db_default=0)

    class Meta:
        db_table = LEASES
        verbose_name = _("partition lease")
        verbose_name_plural = _("partition leases")
        indexes = [models.Index(fields=["leased_by"], name="queue_leases_owner")]


class ConsumerOffset(QueueModel):
    """A group's watermark (``offset_acked``) and position (``offset_claimed``) in a partition."""

    pk = models.CompositePrimaryKey("consumer_group", "topic", "partition_key")
    consumer_group = BytewiseCharField(_("consumer group"), max_length=NAME_LENGTH)
    topic = BytewiseCharField(_("topic"), max_length=TOPIC_COLUMN_LENGTH)
    partition_key = BytewiseCharField(_("partition key"), max_length=KEY_LENGTH)
    offset_acked = models.BigIntegerField(_("watermark"), db_default=0)
    offset_claimed = models.BigIntegerField(_("cursor"), db_default=0)
    updated_at = models.BigIntegerField(_("updated at"), db_default=0)

    class Meta:
        db_table = OFFSETS
        verbose_name = _("consumer offset")
        verbose_name_plural = _("consumer offsets")
        indexes = [
            models.Index(fields=["topic", "partition_key", "offset_acked"], name="queue_offsets_floor"),
        ]


class Slots(QueueModel):
    """The slots of a limited key of a group: when the next one is free, or how many of them a subscriber holds."""

    pk = models.CompositePrimaryKey("consumer_group", "topic", "limit_key", "subscriber_name")
    consumer_group = BytewiseCharField(_("consumer group"), max_length=NAME_LENGTH)
    topic = BytewiseCharField(_("topic"), max_length=TOPIC_COLUMN_LENGTH)
    limit_key = BytewiseCharField(
        _("limited key"),
        max_length=KEY_LENGTH + 1,
        help_text=_("':' and the key; '#' and a hash of a long one; '' for the limits of the group"),
    )
    subscriber_name = BytewiseCharField(
        _("subscriber"), max_length=KEY_LENGTH, help_text=_("'' in the row that has the rate of the key")
    )
    full_at = models.BigIntegerField(
        _("full at"),
        db_default=0,
        help_text=_("when a full burst may start again, in epoch microseconds; rows of subscribers: when written"),
    )
    held = models.BigIntegerField(_("held"), db_default=0, help_text=_("messages that the subscriber has in flight"))

    class Meta:
        db_table = SLOTS
        verbose_name = _("slots")
        verbose_name_plural = _("slots")
        indexes = [models.Index(fields=["full_at"], name="queue_slots_full_at")]


class SubscriberHeartbeat(QueueModel):
    """A subscriber's heartbeat, one row for each of its groups."""

    pk = models.CompositePrimaryKey("consumer_group", "topic", "subscriber_name")
    consumer_group = BytewiseCharField(_("consumer group"), max_length=NAME_LENGTH)
    topic = BytewiseCharField(_("topic"), max_length=TOPIC_COLUMN_LENGTH)
    subscriber_name = BytewiseCharField(_("subscriber"), max_length=KEY_LENGTH)
    heartbeat_at = models.BigIntegerField(_("heartbeat at"))
    deregistered_at = models.BigIntegerField(_("deregistered at"), db_default=0)
    info = models.JSONField(_("info"), db_default=models.Value({}, models.JSONField()))

    class Meta:
        db_table = HEARTBEATS
        verbose_name = _("subscriber heartbeat")
        verbose_name_plural = _("subscriber heartbeats")
