"""The tables. ``docs/tables.md`` describes every column for users of plain SQL.

Times are in epoch milliseconds by the database's clock. The tables have no foreign keys: the log is append-only, and
the keys of the state tables name their group, topic and partition.
"""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_mysqlqueue.columns import LogKey, MessageColumns, OutboxKey
from django_mysqlqueue.fields import BytewiseCharField, BytewiseTextField, NowMilliseconds, json_object
from django_mysqlqueue.limits import KEY_LENGTH, LATENCY_BOUNDS_MS, LATEST_DELIVERY, NAME_LENGTH, TOPIC_COLUMN_LENGTH
from django_mysqlqueue.managers import QueueManager
from django_mysqlqueue.outcomes import Outcome


class QueueMessage(LogKey, MessageColumns):
    """A message of the log, which is append-only, in commit order, and written only by the sequencer."""

    created_at = models.BigIntegerField(_("created at"), help_text=_("when the publisher wrote it"))
    published_at = models.BigIntegerField(_("published at"), help_text=_("when it entered the log"))

    objects = QueueManager["QueueMessage"]()

    class Meta:
        db_table = "queue_messages"
        verbose_name = _("message")
        verbose_name_plural = _("messages")
        constraints = [
            models.UniqueConstraint(fields=["topic", "partition_key", "message_id"], name="queue_messages_id"),
        ]
        indexes = [
            models.Index(fields=["topic", "partition_key", "offset"], name="queue_messages_partition"),
        ]

    def __str__(self) -> str:
        return f"{self.topic}[{self.offset}] {self.message_id}"


class OutboxMessage(OutboxKey, MessageColumns):
    """A message of the outbox: publishers' transactions insert it, and the sequencer moves it into the log."""

    deliver_at = models.BigIntegerField(_("deliver at"), db_default=0, help_text=_("0: at once"))
    created_at = models.BigIntegerField(_("created at"), db_default=NowMilliseconds())

    objects = QueueManager["OutboxMessage"]()

    class Meta:
        db_table = "queue_outbox"
        verbose_name = _("outbox message")
        verbose_name_plural = _("outbox messages")
        # The id is in this index to find scheduled messages by id. An index of its own would be one more entry for
        # every message, even those without a delay: bulk publishing would be a tenth slower.
        indexes = [models.Index(fields=["deliver_at", "outbox_id", "message_id"], name="queue_outbox_due")]

    def __str__(self) -> str:
        return f"{self.topic} {self.message_id}"


class Sequencer(models.Model):
    """The one-row mutex that makes offsets visible in order."""

    id = models.PositiveSmallIntegerField(primary_key=True)
    last_offset = models.BigIntegerField(_("last offset"), db_default=0)
    sequenced_at = models.BigIntegerField(_("sequenced at"), db_default=0)
    coalesced_offset = models.BigIntegerField(
        _("coalesced offset"), db_default=0, help_text=_("the coalesce keys of the log are known up to this offset")
    )
    debounced = models.BigIntegerField(
        _("debounced"), db_default=0, help_text=_("messages that a later one has replaced before they entered the log")
    )

    objects = QueueManager["Sequencer"]()

    class Meta:
        db_table = "queue_sequencer"
        verbose_name = _("sequencer")
        verbose_name_plural = _("sequencer")

    def __str__(self) -> str:
        return f"sequencer at {self.last_offset}"


class ConsumerGroup(models.Model):
    """A consumer group on a topic. It is registered before its first subscriber starts, because GC must wait for it."""

    class Mode(models.TextChoices):
        """The modes of delivery."""

        ORDERED = "ordered", _("ordered")
        SHARED = "shared", _("shared")

    class AfterSeek(models.TextChoices):
        """Whether a seek or drop is in progress, and the state of the group after it."""

        NOTHING = "", _("no seek or drop in progress")
        RESUME = "resume", _("the group resumes")
        STAY = "stay", _("the group stays paused")
        DROPPED = "dropped", _("the group is dropped")

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
        help_text=_("a seek or drop has not finished; if it was interrupted, run it again"),
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

    objects = QueueManager["ConsumerGroup"]()

    class Meta:
        db_table = "queue_consumer_groups"
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
        ]

    def __str__(self) -> str:
        return self.name


class DeliveryState(models.Model):
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
    delivered_by = BytewiseCharField(_("delivered by"), max_length=KEY_LENGTH, db_default="", blank=True)
    delivered_at = models.BigIntegerField(_("delivered at"), db_default=0)
    last_error = BytewiseTextField(_("last error"), db_default=models.Value(""), blank=True)

    objects = QueueManager["DeliveryState"]()

    class Meta:
        db_table = "queue_delivery_state"
        verbose_name = _("delivery state")
        verbose_name_plural = _("delivery states")
        indexes = [
            models.Index(
                fields=["consumer_group", "topic", "acked", "invisible_until"], name="queue_delivery_state_due"
            ),
        ]


class PartitionLease(models.Model):
    """A subscriber's ownership of a partition, valid while its heartbeat is recent.

    ``leased_by`` is empty if the partition has work but no owner.
    """

    pk = models.CompositePrimaryKey("consumer_group", "topic", "partition_key")
    consumer_group = BytewiseCharField(_("consumer group"), max_length=NAME_LENGTH)
    topic = BytewiseCharField(_("topic"), max_length=TOPIC_COLUMN_LENGTH)
    partition_key = BytewiseCharField(_("partition key"), max_length=KEY_LENGTH)
    leased_by = BytewiseCharField(_("leased by"), max_length=KEY_LENGTH, db_default="", blank=True)
    leased_at = models.BigIntegerField(_("leased at"), db_default=0)

    objects = QueueManager["PartitionLease"]()

    class Meta:
        db_table = "queue_partition_leases"
        verbose_name = _("partition lease")
        verbose_name_plural = _("partition leases")
        indexes = [models.Index(fields=["leased_by"], name="queue_leases_owner")]


class ConsumerOffset(models.Model):
    """A group's watermark (``offset_acked``) and position (``offset_claimed``) in a partition."""

    pk = models.CompositePrimaryKey("consumer_group", "topic", "partition_key")
    consumer_group = BytewiseCharField(_("consumer group"), max_length=NAME_LENGTH)
    topic = BytewiseCharField(_("topic"), max_length=TOPIC_COLUMN_LENGTH)
    partition_key = BytewiseCharField(_("partition key"), max_length=KEY_LENGTH)
    offset_acked = models.BigIntegerField(_("watermark"), db_default=0)
    offset_claimed = models.BigIntegerField(_("cursor"), db_default=0)
    updated_at = models.BigIntegerField(_("updated at"), db_default=0)

    objects = QueueManager["ConsumerOffset"]()

    class Meta:
        db_table = "queue_offsets"
        verbose_name = _("consumer offset")
        verbose_name_plural = _("consumer offsets")
        indexes = [
            models.Index(fields=["topic", "partition_key", "offset_acked"], name="queue_offsets_floor"),
        ]


class Slots(models.Model):
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

    objects = QueueManager["Slots"]()

    class Meta:
        db_table = "queue_slots"
        verbose_name = _("slots")
        verbose_name_plural = _("slots")
        indexes = [models.Index(fields=["full_at"], name="queue_slots_full_at")]


class CoalesceKey(models.Model):
    """The latest message with a coalesce key: in the log, or of those that a shared group has claimed."""

    pk = models.CompositePrimaryKey("consumer_group", "topic", "partition_key", "coalesce_key")
    consumer_group = BytewiseCharField(
        _("consumer group"), max_length=NAME_LENGTH, blank=True, help_text=_("'' in the row for the log")
    )
    topic = BytewiseCharField(_("topic"), max_length=TOPIC_COLUMN_LENGTH)
    partition_key = BytewiseCharField(_("partition key"), max_length=KEY_LENGTH)
    coalesce_key = BytewiseCharField(_("coalesce key"), max_length=KEY_LENGTH)
    message_offset = models.BigIntegerField(_("message offset"))

    objects = QueueManager["CoalesceKey"]()

    class Meta:
        db_table = "queue_coalesce_keys"
        verbose_name = _("coalesce key")
        verbose_name_plural = _("coalesce keys")


class DebouncedMessage(models.Model):
    """A message of the outbox that a later one with its coalesce key replaces, until it enters the log."""

    outbox_id = models.BigIntegerField(_("outbox id"), primary_key=True)
    topic = BytewiseCharField(_("topic"), max_length=TOPIC_COLUMN_LENGTH)
    partition_key = BytewiseCharField(_("partition key"), max_length=KEY_LENGTH)
    message_id = BytewiseCharField(_("id"), db_column="id", max_length=KEY_LENGTH)
    coalesce_key = BytewiseCharField(_("coalesce key"), max_length=KEY_LENGTH)
    deliver_by = models.BigIntegerField(
        _("deliver by"),
        db_default=LATEST_DELIVERY,
        help_text=_("when the message, or the one that replaces it, enters the log at the latest"),
    )

    objects = QueueManager["DebouncedMessage"]()

    class Meta:
        db_table = "queue_debounced"
        verbose_name = _("debounced message")
        verbose_name_plural = _("debounced messages")
        indexes = [
            models.Index(fields=["topic", "partition_key", "coalesce_key", "outbox_id"], name="queue_debounced_key"),
        ]

    def __str__(self) -> str:
        return f"{self.topic} {self.coalesce_key}"


class SubscriberHeartbeat(models.Model):
    """A subscriber's heartbeat, one row for each of its groups."""

    pk = models.CompositePrimaryKey("consumer_group", "topic", "subscriber_name")
    consumer_group = BytewiseCharField(_("consumer group"), max_length=NAME_LENGTH)
    topic = BytewiseCharField(_("topic"), max_length=TOPIC_COLUMN_LENGTH)
    subscriber_name = BytewiseCharField(_("subscriber"), max_length=KEY_LENGTH)
    heartbeat_at = models.BigIntegerField(_("heartbeat at"))
    deregistered_at = models.BigIntegerField(_("deregistered at"), db_default=0)
    info = models.JSONField(_("info"), db_default=models.Value({}, models.JSONField()))

    objects = QueueManager["SubscriberHeartbeat"]()

    class Meta:
        db_table = "queue_subscriber_heartbeats"
        verbose_name = _("subscriber heartbeat")
        verbose_name_plural = _("subscriber heartbeats")


class DeliveryEvent(models.Model):
    """The outcome of a delivery, or an operator's action on a message. It remains when the state row is deleted."""

    class Outcome(models.TextChoices):
        """The outcomes of deliveries, and the actions of operators."""

        ACKED = Outcome.ACKED.value, _("acked")
        FAILED = Outcome.FAILED.value, _("failed")
        SNOOZED = Outcome.SNOOZED.value, _("snoozed")
        LOST = Outcome.LOST.value, _("lost")
        DEAD_LETTERED = Outcome.DEAD_LETTERED.value, _("dead-lettered")
        REDRIVEN = "redriven", _("redriven")
        REPLACED = "replaced", _("edited and redriven")
        DISCARDED = "discarded", _("discarded")
        DELETED = Outcome.DELETED.value, _("deleted before it was handled")
        EXPIRED = Outcome.EXPIRED.value, _("expired before it was handled")
        SUPERSEDED = Outcome.SUPERSEDED.value, _("superseded before it was handled")

    id = models.BigAutoField(primary_key=True)
    consumer_group = BytewiseCharField(_("consumer group"), max_length=NAME_LENGTH)
    topic = BytewiseCharField(_("topic"), max_length=TOPIC_COLUMN_LENGTH)
    partition_key = BytewiseCharField(_("partition key"), max_length=KEY_LENGTH)
    message_offset = models.BigIntegerField(_("message offset"))
    attempt = models.PositiveIntegerField(_("attempt"), db_default=0)
    outcome = BytewiseCharField(_("outcome"), max_length=20, choices=Outcome.choices)
    delivered_at = models.BigIntegerField(_("delivered at"), db_default=0)
    settled_at = models.BigIntegerField(_("settled at"), db_default=NowMilliseconds())
    handled_ms = models.BigIntegerField(_("milliseconds in the handler"), db_default=0)
    settled_by = BytewiseCharField(_("by"), max_length=KEY_LENGTH, db_default="", blank=True)
    error = BytewiseTextField(_("error"), db_default=models.Value(""), blank=True)
    related_id = BytewiseCharField(
        _("related id"),
        max_length=KEY_LENGTH,
        db_default="",
        blank=True,
        help_text=_("id of the new dead letter, or of the message that replaced it"),
    )

    objects = QueueManager["DeliveryEvent"]()

    class Meta:
        db_table = "queue_delivery_events"
        verbose_name = _("delivery event")
        verbose_name_plural = _("delivery events")
        indexes = [
            models.Index(fields=["message_offset"], name="queue_delivery_events_message"),
            models.Index(fields=["consumer_group", "topic"], name="queue_delivery_events_group"),
        ]

    def __str__(self) -> str:
        return f"{self.topic}[{self.message_offset}] {self.outcome} for {self.consumer_group}"


class Operation(models.Model):
    """An operation in the audit log, with the number of messages that it has changed so far."""

    id = models.BigAutoField(primary_key=True)
    action = BytewiseCharField(_("action"), max_length=20)
    consumer_group = BytewiseCharField(_("consumer group"), max_length=NAME_LENGTH, db_default="", blank=True)
    topic = BytewiseCharField(_("topic"), max_length=TOPIC_COLUMN_LENGTH, db_default="", blank=True)
    actor = BytewiseCharField(_("by"), max_length=KEY_LENGTH, db_default="", blank=True)
    detail = BytewiseTextField(_("detail"), db_default=models.Value(""), blank=True)
    reason = BytewiseTextField(_("reason"), db_default=models.Value(""), blank=True)
    changed = models.BigIntegerField(_("changed"), db_default=0)
    started_at = models.BigIntegerField(_("started at"), db_default=NowMilliseconds())
    ended_at = models.BigIntegerField(_("ended at"), db_default=0, help_text=_("0: running, or interrupted"))

    objects = QueueManager["Operation"]()

    class Meta:
        db_table = "queue_operations"
        verbose_name = _("operation")
        verbose_name_plural = _("operations")

    def __str__(self) -> str:
        return f"{self.action} by {self.actor}"


class Rollup(models.Model):
    """The counts of a minute or an hour for one group. Subscribers add to them every few seconds.

    ``latency_n`` counts acked messages by the time from entering the log to the ack: bucket n counts
    times up to ``limits.LATENCY_BOUNDS_MS[n]``.
    """

    pk = models.CompositePrimaryKey("grain", "bucket_at", "consumer_group", "topic")
    grain = models.PositiveIntegerField(_("seconds"))
    bucket_at = models.BigIntegerField(_("begins at"))
    consumer_group = BytewiseCharField(_("consumer group"), max_length=NAME_LENGTH)
    topic = BytewiseCharField(_("topic"), max_length=TOPIC_COLUMN_LENGTH)
    acked = models.BigIntegerField(_("acked"), db_default=0)
    failed = models.BigIntegerField(_("failed"), db_default=0)
    dead_lettered = models.BigIntegerField(_("dead-lettered"), db_default=0)
    filtered = models.BigIntegerField(_("filtered"), db_default=0)
    expired = models.BigIntegerField(_("expired"), db_default=0)
    superseded = models.BigIntegerField(_("superseded"), db_default=0)

    objects = QueueManager["Rollup"]()

    class Meta:
        db_table = "queue_rollups"
        verbose_name = _("rollup")
        verbose_name_plural = _("rollups")


for _place in range(len(LATENCY_BOUNDS_MS) + 1):
    Rollup.add_to_class(f"latency_{_place}", models.BigIntegerField(db_default=0))


class CollectedTopic(models.Model):
    """The highest offset that GC has deleted from a topic, so that a reader by offset notices missing messages."""

    topic = BytewiseCharField(_("topic"), max_length=TOPIC_COLUMN_LENGTH, primary_key=True)
    collected_offset = models.BigIntegerField(_("highest offset collected"))
    published_at = models.BigIntegerField(_("published at"), help_text=_("when the last of them entered the log"))
    collected_at = models.BigIntegerField(_("collected at"), db_default=NowMilliseconds())

    objects = QueueManager["CollectedTopic"]()

    class Meta:
        db_table = "queue_collected"
        verbose_name = _("collected topic")
        verbose_name_plural = _("collected topics")

    def __str__(self) -> str:
        return f"{self.topic} up to {self.collected_offset}"


class ArchiveSegment(models.Model):
    """A range of the log that is in the archive. This row commits it: files that no row names are garbage."""

    lo = models.BigIntegerField(_("first offset"), primary_key=True)
    hi = models.BigIntegerField(_("last offset"))
    rows = models.BigIntegerField(_("messages"))
    checksum = models.BigIntegerField(_("checksum"), help_text=_("the sum of each message's CRC-32"))
    path = BytewiseCharField(_("path"), max_length=KEY_LENGTH, help_text=_("below the archive's root"))
    files = models.JSONField(_("files"))
    archived_at = models.BigIntegerField(_("archived at"), db_default=NowMilliseconds())

    objects = QueueManager["ArchiveSegment"]()

    class Meta:
        db_table = "queue_archive_segments"
        verbose_name = _("archive segment")
        verbose_name_plural = _("archive segments")

    def __str__(self) -> str:
        return f"{self.lo} to {self.hi}"
