"""The columns that the outbox and the log share, as abstract models."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Length
from django.utils.translation import gettext_lazy as _

from django_mysqlqueue.fields import BytewiseCharField, BytewiseTextField, FreshId, LanePriority
from django_mysqlqueue.naming import KEY_LENGTH, NAME_LENGTH, TOPIC_COLUMN_LENGTH


class LogKey(models.Model):
    """The log's primary key, declared before the generated columns, as the outbox's is.

    On MySQL, Django assigns the id of an inserted row to the first field that the database computes.
    """

    offset = models.BigAutoField(_("offset"), primary_key=True)

    class Meta:
        abstract = True


class OutboxKey(models.Model):
    """The outbox's primary key."""

    outbox_id = models.BigAutoField(_("outbox id"), primary_key=True)

    class Meta:
        abstract = True


class MessageColumns(models.Model):
    """The columns that the outbox and the log share.

    They have the same constraints, because an outbox row that the log refuses would block all later rows.
    """

    topic = BytewiseCharField(_("topic"), max_length=TOPIC_COLUMN_LENGTH)
    partition_key = BytewiseCharField(_("partition key"), max_length=KEY_LENGTH, db_default="")
    message_id = BytewiseCharField(_("id"), db_column="id", max_length=KEY_LENGTH, db_default=FreshId())
    payload = models.BinaryField(_("payload"))
    size = models.GeneratedField(
        expression=Length("payload"),
        output_field=models.PositiveIntegerField(),
        db_persist=True,
        verbose_name=_("payload size in bytes"),
    )
    metadata = models.JSONField(_("metadata"), db_default=models.Value({}, models.JSONField()))
    publisher_key = BytewiseCharField(  # type: ignore[misc]  # It may be NULL.
        _("publisher's key"),
        max_length=KEY_LENGTH,
        null=True,
        blank=True,
        help_text=_("the key that the publisher gave, if it was hashed to the partition"),
    )
    priority = models.GeneratedField(
        expression=LanePriority("partition_key"),
        output_field=models.SmallIntegerField(),
        db_persist=True,
        verbose_name=_("priority"),
    )
    expires_at = models.BigIntegerField(
        _("expires at"), null=True, blank=True, help_text=_("when its handling may no longer start; NULL: never")
    )
    coalesce_key = BytewiseCharField(  # type: ignore[misc]  # It may be NULL.
        _("coalesce key"),
        max_length=KEY_LENGTH,
        null=True,
        blank=True,
        help_text=_("of the messages with the same one, groups handle only the latest; NULL: none"),
    )
    target_group = BytewiseCharField(_("target group"), max_length=NAME_LENGTH, db_default="", blank=True)
    original_id = BytewiseCharField(_("original id"), max_length=KEY_LENGTH, db_default="", blank=True)
    original_topic = BytewiseCharField(_("original topic"), max_length=TOPIC_COLUMN_LENGTH, db_default="", blank=True)
    original_offset = models.BigIntegerField(_("original offset"), db_default=0)
    failed_group = BytewiseCharField(_("failed group"), max_length=NAME_LENGTH, db_default="", blank=True)
    failed_at = models.BigIntegerField(_("failed at"), db_default=0)
    failure_count = models.PositiveIntegerField(_("failure count"), db_default=0)
    last_error = BytewiseTextField(_("last error"), db_default=models.Value(""), blank=True)

    class Meta:
        abstract = True


COPIED_COLUMNS = (
    "topic",
    "partition_key",
    "id",
    "payload",
    "metadata",
    "publisher_key",
    "expires_at",
    "coalesce_key",
    "target_group",
    "original_id",
    "original_topic",
    "original_offset",
    "failed_group",
    "failed_at",
    "failure_count",
    "last_error",
)
"""The columns that the sequencer copies from the outbox into the log. (``size`` and ``priority`` are computed.)"""
