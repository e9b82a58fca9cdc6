"""The log and the outbox, and what the sequencer and GC note about them."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_mysqlqueue.db.columns import OUTBOX_TEXTS, LogKey, MessageColumns, OutboxKey, QuarantineKey, outbox_checks
from django_mysqlqueue.db.fields import BytewiseCharField, BytewiseTextField, NowMilliseconds, json_object
from django_mysqlqueue.db.sizes import LATEST_DELIVERY, REFUSAL_LENGTH
from django_mysqlqueue.db.tables import (
    COALESCE_KEYS,
    COLLECTED,
    DEBOUNCED,
    LOG,
    OUTBOX,
    QUARANTINE,
    RELAY_POSITIONS,
    RELAY_WATERMARKS,
    SEQUENCER,
)
from django_mysqlqueue.models.base import QueueModel
from django_mysqlqueue.names.ids import LOG_ID_LENGTH
from django_mysqlqueue.names.rules import KEY_LENGTH, NAME_LENGTH, TOPIC_COLUMN_LENGTH


class QueueMessage(LogKey, MessageColumns, QueueModel):
    """A message of the log, which is append-only, in commit order, and written only by the sequencer."""

    created_at = models.BigIntegerField(_("created at"), help_text=_("when the publisher wrote it"))
    published_at = models.BigIntegerField(_("published at"), help_text=_("when it entered the log"))

    class Meta:
        db_table = LOG
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
        db_table = OUTBOX
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
        db_table = QUARANTINE
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
        db_default="",
        blank=True,
        help_text=_("identifies this log, also under another alias of its database"),
    )
    routes = json_object(_("routes"), _("by topic that moves, the databases from which and to which its messages go"))

    class Meta:
        db_table = SEQUENCER
        verbose_name = _("sequencer")
        verbose_name_plural = _("sequencer")

    def __str__(self) -> str:
        return f"sequencer at {self.last_offset}"


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
        db_table = COALESCE_KEYS
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
        db_table = DEBOUNCED
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
        db_table = COLLECTED
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
        db_table = RELAY_WATERMARKS
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
        db_table = RELAY_POSITIONS
        verbose_name = _("relay position")
        verbose_name_plural = _("relay positions")

    def __str__(self) -> str:
        return f"{self.source} up to {self.relayed_offset}"
