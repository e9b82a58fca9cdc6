"""The tables. ``docs/tables.md`` describes every column for users of plain SQL.

Times are in epoch milliseconds by the database's clock. The tables have no foreign keys: the log is append-only, and
the keys of the state tables name their group, topic and partition.
"""

from __future__ import annotations

from typing import ClassVar, Self, TypeVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_mysqlqueue.db import tables
from django_mysqlqueue.db.columns import OUTBOX_TEXTS, LogKey, MessageColumns, OutboxKey, QuarantineKey, outbox_checks
from django_mysqlqueue.db.fields import (
    BytewiseCharField,
    BytewiseTextField,
    FreshId,
    NowMilliseconds,
    json_object,
)
from django_mysqlqueue.db.sizes import (
    JOB_PATH_LENGTH,
    LATENCY_COLUMNS,
    LATEST_DELIVERY,
    PROGRESS_LENGTH,
    REFUSAL_LENGTH,
    RETRY_REASON_LENGTH,
)
from django_mysqlqueue.names.ids import LOG_ID_LENGTH, SCHEDULE_NAME_LENGTH, STAGE_LENGTH
from django_mysqlqueue.names.rules import KEY_LENGTH, NAME_LENGTH, TOPIC_COLUMN_LENGTH
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.outcomes import Outcome

_M = TypeVar("_M", bound=models.Model)


class QueueManager(models.Manager[_M]):
    """A manager that reads the database that the setting ``DATABASE`` names, unless ``using`` names another one.

    Routers do not know the setting, and a router for reads may name a replica.
    """

    def get_queryset(self) -> models.QuerySet[_M]:
        """Return a queryset on the queue's database."""
        rows = super().get_queryset()
        return rows if self._db is not None else rows.using(get_settings().database)


class QueueModel(models.Model):
    """A model of the queue."""

    objects: ClassVar[QueueManager[Self]] = QueueManager()

    class Meta:
        abstract = True


# -- the log and the outbox, and what the sequencer and GC note about them -------


class QueueMessage(LogKey, MessageColumns, QueueModel):
    """A message of the log, which is append-only, in commit order, and written only by the sequencer."""

    created_at = models.BigIntegerField(_("created at"), help_text=_("when the publisher wrote it"))
    published_at = models.BigIntegerField(_("published at"), help_text=_("when it entered the log"))

    class Meta:
        db_table = tables.LOG
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


class OutboxMessage(OutboxKey, MessageColumns, QueueModel):
    """A message of the outbox: publishers' transactions insert it, and the sequencer moves it into the log."""

    deliver_at = models.BigIntegerField(_("deliver at"), db_default=0, help_text=_("0: at once"))
    created_at = models.BigIntegerField(_("created at"), db_default=NowMilliseconds())

    class Meta:
        db_table = tables.OUTBOX
        verbose_name = _("outbox message")
        verbose_name_plural = _("outbox messages")
        # The id is in this index to find scheduled messages by id. An index of its own would be one more entry for
        # every message, even those without a delay: bulk publishing would be a tenth slower.
        indexes = [models.Index(fields=["deliver_at", "-priority", "outbox_id", "message_id"], name="queue_outbox_due")]
        constraints = outbox_checks()

    def __str__(self) -> str:
        return f"{self.topic} {self.message_id}"


class QuarantinedMessage(QuarantineKey, MessageColumns, QueueModel):
    """A message of the outbox that the log has refused, until an operator requeues or deletes it."""

    deliver_at = models.BigIntegerField(_("deliver at"))
    created_at = models.BigIntegerField(_("created at"))
    reason = BytewiseTextField(_("reason"), help_text=_("the error of the database"))
    quarantined_at = models.BigIntegerField(_("quarantined at"), db_default=NowMilliseconds())

    class Meta:
        db_table = tables.QUARANTINE
        verbose_name = _("quarantined message")
        verbose_name_plural = _("quarantined messages")
        indexes = [models.Index(fields=["topic", "quarantine_id"], name="queue_quarantine_topic")]

    def __str__(self) -> str:
        return f"{self.topic} {self.message_id}"


for _name, (_least, _most) in OUTBOX_TEXTS.items():
    for _model in (OutboxMessage, QuarantinedMessage):
        _model._meta.get_field(_name).max_length = _most + 1  # type: ignore[union-attr]


class Sequencer(QueueModel):
    """The one-row mutex that makes offsets visible in order."""

    id = models.PositiveSmallIntegerField(primary_key=True)
    last_offset = models.BigIntegerField(_("last offset"), db_default=0)
    sequenced_at = models.BigIntegerField(_("sequenced at"), db_default=0)
    debounced = models.BigIntegerField(
        _("debounced"), db_default=0, help_text=_("messages that a later one has replaced before they entered the log")
    )

    log_id = BytewiseCharField(
        _("log id"),
        max_length=LOG_ID_LENGTH,
        db_default=FreshId(),
        help_text=_("identifies this log, also under another alias of its database"),
    )
    epoch = models.PositiveIntegerField(
        _("epoch"), db_default=0, help_text=_("how often an operator has accepted the log after it was restored")
    )
    marked_at = models.BigIntegerField(_("marked at"), db_default=NowMilliseconds())
    routes = json_object(_("routes"), _("by topic that moves, the databases from which and to which its messages go"))

    class Meta:
        db_table = tables.SEQUENCER
        verbose_name = _("sequencer")
        verbose_name_plural = _("sequencer")

    def __str__(self) -> str:
        return f"sequencer at {self.last_offset}"


class LogMark(QueueModel):
    """A random number at an offset of the log, so that a reader notices a log that was restored and has grown since."""

    marked_offset = models.BigIntegerField(_("marked offset"), primary_key=True)
    mark = models.BigIntegerField(_("mark"))
    marked_at = models.BigIntegerField(_("marked at"), db_default=NowMilliseconds())

    class Meta:
        db_table = tables.MARKS
        verbose_name = _("mark of the log")
        verbose_name_plural = _("marks of the log")

    def __str__(self) -> str:
        return f"{self.mark} at {self.marked_offset}"


class CoalesceKey(QueueModel):
    """The latest message with a coalesce key in the log; and for a group, which ones it has claimed and will get."""

    pk = models.CompositePrimaryKey("consumer_group", "topic", "partition_key", "coalesce_key")
    consumer_group = BytewiseCharField(
        _("consumer group"), max_length=NAME_LENGTH, blank=True, help_text=_("'' in the row for the log")
    )
    topic = BytewiseCharField(_("topic"), max_length=TOPIC_COLUMN_LENGTH)
    partition_key = BytewiseCharField(_("partition key"), max_length=KEY_LENGTH)
    coalesce_key = BytewiseCharField(_("coalesce key"), max_length=KEY_LENGTH)
    message_offset = models.BigIntegerField(_("message offset"))
    superseding_offset = models.BigIntegerField(
        _("superseding offset"),
        db_default=0,
        help_text=_("the message for which the group has given up earlier ones, so that it passes any filter; 0: none"),
    )

    class Meta:
        db_table = tables.COALESCE_KEYS
        verbose_name = _("coalesce key")
        verbose_name_plural = _("coalesce keys")


class DebouncedMessage(QueueModel):
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

    class Meta:
        db_table = tables.DEBOUNCED
        verbose_name = _("debounced message")
        verbose_name_plural = _("debounced messages")
        indexes = [
            models.Index(fields=["topic", "partition_key", "coalesce_key", "outbox_id"], name="queue_debounced_key"),
        ]

    def __str__(self) -> str:
        return f"{self.topic} {self.coalesce_key}"


class CollectedTopic(QueueModel):
    """The highest offset that GC has deleted from a topic, so that a reader by offset notices missing messages."""

    topic = BytewiseCharField(_("topic"), max_length=TOPIC_COLUMN_LENGTH, primary_key=True)
    collected_offset = models.BigIntegerField(_("highest offset collected"))
    published_at = models.BigIntegerField(_("published at"), help_text=_("when the last of them entered the log"))
    collected_at = models.BigIntegerField(_("collected at"), db_default=NowMilliseconds())

    class Meta:
        db_table = tables.COLLECTED
        verbose_name = _("collected topic")
        verbose_name_plural = _("collected topics")

    def __str__(self) -> str:
        return f"{self.topic} up to {self.collected_offset}"


class RelayWatermark(QueueModel):
    """How far this log's messages for another database have arrived there. GC keeps later ones."""

    target = BytewiseCharField(_("target"), max_length=TOPIC_COLUMN_LENGTH, primary_key=True, help_text=_("its alias"))
    relayed_offset = models.BigIntegerField(
        _("last relayed offset"), db_default=0, help_text=_("offset of the last message that has arrived")
    )
    read_offset = models.BigIntegerField(
        _("watermark"), db_default=0, help_text=_("all messages up to this offset have arrived")
    )
    read_at = models.BigIntegerField(_("read at"), db_default=NowMilliseconds())
    refused_offset = models.BigIntegerField(
        _("refused offset"), db_default=0, help_text=_("offset of the last message that the target has refused")
    )
    refusal = BytewiseCharField(
        _("refusal"), max_length=REFUSAL_LENGTH, db_default="", blank=True, help_text=_("the target's error")
    )

    class Meta:
        db_table = tables.RELAY_WATERMARKS
        verbose_name = _("relay watermark")
        verbose_name_plural = _("relay watermarks")

    def __str__(self) -> str:
        return f"{self.target} up to {self.read_offset}"


class RelayPosition(QueueModel):
    """The last message that this database has received from another database's log."""

    pk = models.CompositePrimaryKey("source_log", "target")
    source_log = BytewiseCharField(_("source log"), max_length=LOG_ID_LENGTH)
    target = BytewiseCharField(_("target"), max_length=TOPIC_COLUMN_LENGTH, help_text=_("the alias of this database"))
    source = BytewiseCharField(_("source"), max_length=TOPIC_COLUMN_LENGTH, help_text=_("the alias of the source"))
    relayed_offset = models.BigIntegerField(_("position"), db_default=0)
    relayed_id = BytewiseCharField(_("id"), max_length=KEY_LENGTH, db_default="", blank=True)
    relayed_at = models.BigIntegerField(_("relayed at"), db_default=NowMilliseconds())

    class Meta:
        db_table = tables.RELAY_POSITIONS
        verbose_name = _("relay position")
        verbose_name_plural = _("relay positions")

    def __str__(self) -> str:
        return f"{self.source} up to {self.relayed_offset}"


# -- consumer groups and their subscribers ---------------------------------------


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
        db_table = tables.GROUPS
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
            ("edit_schedules", "Can create, edit and delete recurring schedules"),
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
        db_table = tables.STATE
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
        db_table = tables.LEASES
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
        db_table = tables.OFFSETS
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
        db_table = tables.SLOTS
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
        db_table = tables.HEARTBEATS
        verbose_name = _("subscriber heartbeat")
        verbose_name_plural = _("subscriber heartbeats")


# -- jobs and recurring schedules ------------------------------------------------


class JobResult(QueueModel):
    """A job: what was enqueued, and what has become of it. Its message carries its id."""

    class Status(models.TextChoices):
        """The statuses of ``django.tasks``."""

        READY = "READY", _("ready")
        RUNNING = "RUNNING", _("running")
        FAILED = "FAILED", _("failed")
        SUCCESSFUL = "SUCCESSFUL", _("successful")

    id = BytewiseCharField(primary_key=True, max_length=KEY_LENGTH)
    backend = BytewiseCharField(_("backend"), max_length=NAME_LENGTH, help_text=_("alias in TASKS"))
    queue_name = BytewiseCharField(_("queue"), max_length=NAME_LENGTH)
    task_path = BytewiseCharField(_("task"), max_length=JOB_PATH_LENGTH)
    arguments = BytewiseTextField(_("arguments"), help_text=_("JSON with args and kwargs"))
    priority = models.SmallIntegerField(_("priority"), db_default=0)
    run_after = models.BigIntegerField(_("run after"), db_default=0, help_text=_("0: at once"))
    status = BytewiseCharField(_("status"), max_length=10, choices=Status.choices, db_default="READY")
    enqueued_at = models.BigIntegerField(_("enqueued at"), db_default=NowMilliseconds())
    started_at = models.BigIntegerField(_("started at"), db_default=0, help_text=_("of the first attempt; 0: never"))
    last_attempted_at = models.BigIntegerField(_("last attempted at"), db_default=0, help_text=_("0: never"))
    finished_at = models.BigIntegerField(_("finished at"), db_default=0, help_text=_("0: not yet"))
    return_value = BytewiseTextField(
        _("return value"), db_default=models.Value(""), blank=True, help_text=_("JSON; empty: none")
    )
    errors = BytewiseTextField(
        _("errors"), db_default=models.Value(""), blank=True, help_text=_("of all attempts: a JSON object in each line")
    )
    worker_ids = BytewiseTextField(
        _("workers"), db_default=models.Value(""), blank=True, help_text=_("subscribers that had it: one in each line")
    )
    progress = BytewiseCharField(
        _("progress"),
        max_length=PROGRESS_LENGTH,
        db_default=models.Value(""),
        blank=True,
        help_text=_("of the current or last attempt: JSON with done, total, message and at; empty: none"),
    )
    cancel_requested_at = models.BigIntegerField(
        _("cancel requested at"), db_default=0, help_text=_("of a running job; 0: never")
    )
    unique_key = models.CharField(  # noqa: DJ001  # The unique index ignores NULLs.
        _("unique key"),
        max_length=64,
        null=True,
        help_text=_("SHA-256 of what no other job may have; NULL: it holds none"),
    )
    kept_key = BytewiseCharField(
        _("kept key"),
        max_length=64,
        db_default=models.Value(""),
        blank=True,
        help_text=_("the unique key that it holds until it has ended; empty: none"),
    )
    unique_since = models.BigIntegerField(_("unique since"), db_default=0, help_text=_("0: not unique"))
    unique_for = models.BigIntegerField(
        _("unique for"), db_default=0, help_text=_("milliseconds after which it no longer holds its key; 0: no limit")
    )
    stage = BytewiseCharField(
        _("stage"), max_length=STAGE_LENGTH, db_default=models.Value(""), blank=True, help_text=_("of a chain, if any")
    )
    redriven_id = BytewiseCharField(
        _("redriven id"),
        max_length=KEY_LENGTH,
        db_default=models.Value(""),
        blank=True,
        help_text=_("of the message that the last redrive has published; empty: none"),
    )
    expires_in = models.BigIntegerField(
        _("expires in"), db_default=0, help_text=_("milliseconds that its message may wait; 0: no limit")
    )
    retry_at = models.BigIntegerField(_("retry at"), db_default=0, help_text=_("of the next attempt; 0: never retried"))
    retry_reason = BytewiseCharField(
        _("retry reason"),
        max_length=RETRY_REASON_LENGTH,
        db_default=models.Value(""),
        blank=True,
        help_text=_("why it waits for that; empty: none was given"),
    )
    retry_since = models.BigIntegerField(
        _("retry since"),
        db_default=0,
        help_text=_("since when it asks for attempts without counting any; 0: it does not"),
    )

    class Meta:
        db_table = tables.RESULTS
        verbose_name = _("job result")
        verbose_name_plural = _("job results")
        indexes = [
            models.Index(fields=["status", "finished_at"], name="queue_job_results_status"),
            models.Index(fields=["task_path", "enqueued_at"], name="queue_job_results_task"),
        ]
        constraints = [models.UniqueConstraint(fields=["unique_key"], name="queue_job_results_unique")]

    def __str__(self) -> str:
        return f"{self.task_path} {self.id}"


class JobStage(QueueModel):
    """A stage of a chain of jobs. Its row is the lock under which the jobs of the stage after it are published."""

    id = BytewiseCharField(primary_key=True, max_length=STAGE_LENGTH)
    following = BytewiseCharField(
        _("following stage"),
        max_length=STAGE_LENGTH,
        db_default=models.Value(""),
        blank=True,
        help_text=_("empty: none"),
    )
    remaining = models.IntegerField(_("remaining"), help_text=_("number of its jobs that are not SUCCESSFUL yet"))
    kept = models.IntegerField(_("kept"), help_text=_("number of its jobs whose results were not deleted yet"))
    size = models.IntegerField(
        _("size"), help_text=_("number of its jobs; their ids are that of the stage and a number")
    )

    class Meta:
        db_table = tables.STAGES
        verbose_name = _("stage of jobs")
        verbose_name_plural = _("stages of jobs")

    def __str__(self) -> str:
        return self.id


class Schedule(QueueModel):
    """A recurring schedule: what it publishes, and up to which time its ticks were decided."""

    name = BytewiseCharField(primary_key=True, max_length=SCHEDULE_NAME_LENGTH)
    definition = BytewiseTextField(_("definition"), help_text=_("JSON with all that a tick needs"))
    last_tick = models.BigIntegerField(
        _("last tick"),
        db_default=NowMilliseconds(),
        help_text=_("ticks up to this time were decided; never moves back"),
    )
    last_run = models.BigIntegerField(_("last run"), db_default=0, help_text=_("last tick that was published; 0: none"))
    skipped = models.BigIntegerField(
        _("skipped"), db_default=0, help_text=_("ticks while an earlier job had not ended")
    )
    paused_at = models.BigIntegerField(_("paused at"), db_default=0, help_text=_("0: not paused"))
    registered_at = models.BigIntegerField(
        _("registered at"), db_default=NowMilliseconds(), help_text=_("when its definition last changed")
    )
    seen_at = models.BigIntegerField(
        _("seen at"), db_default=NowMilliseconds(), help_text=_("when a process that runs it was last seen")
    )
    editable = models.BooleanField(_("editable"), db_default=False, help_text=_("made by people, not by the code"))

    class Meta:
        db_table = tables.SCHEDULES
        verbose_name = _("schedule")
        verbose_name_plural = _("schedules")
        indexes = [models.Index(fields=["editable", "name"], name="queue_schedules_editable")]

    def __str__(self) -> str:
        return self.name


# -- what remains ----------------------------------------------------------------


class DeliveryEvent(QueueModel):
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

    class Meta:
        db_table = tables.EVENTS
        verbose_name = _("delivery event")
        verbose_name_plural = _("delivery events")
        indexes = [
            models.Index(fields=["message_offset"], name="queue_delivery_events_message"),
            models.Index(fields=["consumer_group", "topic"], name="queue_delivery_events_group"),
        ]

    def __str__(self) -> str:
        return f"{self.topic}[{self.message_offset}] {self.outcome} for {self.consumer_group}"


class Operation(QueueModel):
    """An operation in the audit log, with the number of messages that it has changed so far."""

    id = models.BigAutoField(primary_key=True)
    action = BytewiseCharField(_("action"), max_length=20)
    consumer_group = BytewiseCharField(_("consumer group"), max_length=NAME_LENGTH, db_default="", blank=True)
    topic = BytewiseCharField(_("topic"), max_length=TOPIC_COLUMN_LENGTH, db_default="", blank=True)
    actor = BytewiseCharField(_("by"), max_length=KEY_LENGTH, db_default="", blank=True)
    detail = BytewiseTextField(_("detail"), db_default=models.Value(""), blank=True)
    reason = BytewiseTextField(_("reason"), db_default=models.Value(""), blank=True)
    changed = models.BigIntegerField(_("changed"), db_default=0)
    total = models.BigIntegerField(_("total"), db_default=0, help_text=_("maximum number to change; 0: not known"))
    started_at = models.BigIntegerField(_("started at"), db_default=NowMilliseconds())
    progress_at = models.BigIntegerField(_("last progress at"), db_default=0, help_text=_("0: none since its start"))
    ended_at = models.BigIntegerField(_("ended at"), db_default=0, help_text=_("0: running, or interrupted"))

    class Meta:
        db_table = tables.OPERATIONS
        verbose_name = _("operation")
        verbose_name_plural = _("operations")

    def __str__(self) -> str:
        return f"{self.action} by {self.actor}"


class Rollup(QueueModel):
    """The counts of a minute or an hour for one group. Subscribers add to them every few seconds.

    The columns ``latency_…`` count acked messages by the time from entering the log to the ack, see
    ``db.sizes.LATENCY_COLUMNS``.
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
    sampled_at = models.BigIntegerField(
        _("sampled at"), db_default=0, help_text=_("when a subscriber began to count the backlog; 0: none has")
    )
    backlog = models.BigIntegerField(
        _("backlog"), null=True, help_text=_("of an hour: its highest sample; NULL: there is no sample")
    )
    backlog_exact = models.BooleanField(_("backlog is exact"), db_default=True)
    oldest_ms = models.BigIntegerField(
        _("age of the oldest unsettled message"), db_default=0, help_text=_("of an hour: its highest sample")
    )
    entered = models.BigIntegerField(_("entered the log"), db_default=0)
    entered_minutes = models.PositiveIntegerField(
        _("minutes"), db_default=0, help_text=_("number of minutes in which these messages were counted")
    )

    class Meta:
        db_table = tables.ROLLUPS
        verbose_name = _("rollup")
        verbose_name_plural = _("rollups")


for _column in LATENCY_COLUMNS:
    Rollup.add_to_class(_column, models.BigIntegerField(db_default=0))


class Reader(QueueModel):
    """How far a reader outside of this database, such as the archive or a stream of Spark, has read a topic."""

    pk = models.CompositePrimaryKey("name", "topic")
    name = BytewiseCharField(_("name"), max_length=NAME_LENGTH)
    topic = BytewiseCharField(
        _("topic"), max_length=TOPIC_COLUMN_LENGTH, db_default="", blank=True, help_text=_("'': all topics")
    )
    read_offset = models.BigIntegerField(_("read offset"), help_text=_("everything up to it has been read"))
    owner = BytewiseCharField(
        _("owner"), max_length=NAME_LENGTH, db_default="", help_text=_("of the archive: the id of its Delta table")
    )
    marked_offset = models.BigIntegerField(_("marked offset"), db_default=0)
    mark = models.BigIntegerField(
        _("mark"), db_default=0, help_text=_("of a stream: the newest mark of the log up to the read offset")
    )
    moved_at = models.BigIntegerField(_("moved at"), db_default=NowMilliseconds())

    class Meta:
        db_table = tables.READERS
        verbose_name = _("reader")
        verbose_name_plural = _("readers")

    def __str__(self) -> str:
        return self.name


MODELS = (
    QueueMessage,
    OutboxMessage,
    Sequencer,
    LogMark,
    ConsumerGroup,
    DeliveryState,
    PartitionLease,
    ConsumerOffset,
    Slots,
    CoalesceKey,
    DebouncedMessage,
    QuarantinedMessage,
    SubscriberHeartbeat,
    DeliveryEvent,
    Operation,
    Rollup,
    CollectedTopic,
    RelayPosition,
    RelayWatermark,
    Reader,
    JobResult,
    JobStage,
    Schedule,
)
"""The models of the tables that the protocol uses."""
