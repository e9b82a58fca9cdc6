"""What remains: outcomes of deliveries, operations, counts, and the segments of the archive."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_mysqlqueue.db.fields import BytewiseCharField, BytewiseTextField, NowMilliseconds
from django_mysqlqueue.db.sizes import LATENCY_COLUMNS
from django_mysqlqueue.db.tables import EVENTS, OPERATIONS, ROLLUPS, SEGMENTS
from django_mysqlqueue.models.base import QueueModel
from django_mysqlqueue.names.rules import KEY_LENGTH, NAME_LENGTH, TOPIC_COLUMN_LENGTH
from django_mysqlqueue.outcomes import Outcome


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
        db_table = EVENTS
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
        db_table = OPERATIONS
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
        db_table = ROLLUPS
        verbose_name = _("rollup")
        verbose_name_plural = _("rollups")


for _column in LATENCY_COLUMNS:
    Rollup.add_to_class(_column, models.BigIntegerField(db_default=0))


class ArchiveSegment(QueueModel):
    """A range of the log that is in the archive. This row commits it: files that no row names are garbage."""

    lo = models.BigIntegerField(_("first offset"), primary_key=True)
    hi = models.BigIntegerField(_("last offset"))
    rows = models.BigIntegerField(_("messages"))
    checksum = models.BigIntegerField(_("checksum"), help_text=_("the sum of each message's CRC-32"))
    path = BytewiseCharField(_("path"), max_length=KEY_LENGTH, help_text=_("below the archive's root"))
    files = models.JSONField(_("files"))
    archived_at = models.BigIntegerField(_("archived at"), db_default=NowMilliseconds())

    class Meta:
        db_table = SEGMENTS
        verbose_name = _("archive segment")
        verbose_name_plural = _("archive segments")

    def __str__(self) -> str:
        return f"{self.lo} to {self.hi}"
