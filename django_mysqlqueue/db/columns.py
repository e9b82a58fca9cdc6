"""The columns that the outbox and the log share, as abstract models, and what the outbox accepts."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Length, Substr
from django.db.models.lookups import Exact, GreaterThan, In, LessThanOrEqual
from django.utils.translation import gettext_lazy as _

from django_mysqlqueue.db.fields import BytewiseCharField, BytewiseTextField, FreshId, JsonType, LanePriority
from django_mysqlqueue.db.sizes import LATEST_DELIVERY
from django_mysqlqueue.names.keys import HIGHEST_PRIORITY, LANE_PREFIXES, LOWEST_PRIORITY
from django_mysqlqueue.names.rules import KEY_LENGTH, NAME_LENGTH, TOPIC_COLUMN_LENGTH


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


class QuarantineKey(models.Model):
    """The primary key of the quarantine."""

    quarantine_id = models.BigAutoField(_("quarantine id"), primary_key=True)

    class Meta:
        abstract = True


class MessageColumns(models.Model):
    """The columns that the outbox and the log share. ``outbox_checks`` makes sure that the log accepts them."""

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

OUTBOX_TEXTS = {
    "topic": (1, TOPIC_COLUMN_LENGTH),
    "partition_key": (0, KEY_LENGTH),
    "message_id": (1, KEY_LENGTH),
    "publisher_key": (0, KEY_LENGTH),
    "coalesce_key": (1, KEY_LENGTH),
    "target_group": (0, NAME_LENGTH),
}
"""Least and most characters of the texts of the outbox that plain SQL sets.

Their columns there are a character longer: a session that is not strict cuts a text to its column, and the rest of a
cut text would be a valid one.
"""


def outbox_checks() -> list[models.BaseConstraint]:
    """Return the rules of the outbox: the INSERT of a writer, such as plain SQL, that breaks one fails.

    All code that reads the outbox or the log relies on them. The error of the database has the name of the rule.
    """
    is_lane = In(Substr("partition_key", 1, len(LANE_PREFIXES[0])), list(LANE_PREFIXES))
    # LENGTH of SQLite ends at a NUL, so it cannot tell that a text is empty.
    rules: dict[str, models.Q] = {
        f"{name.removeprefix('message_')}_of_{least}_to_{most}_characters": models.Q(
            LessThanOrEqual(Length(name), most), *([GreaterThan(models.F(name), "")] if least else [])
        )
        for name, (least, most) in OUTBOX_TEXTS.items()
    }
    rules |= {
        "partition_key_no_malformed_lane": ~models.Q(is_lane)
        | models.Q(priority__range=(LOWEST_PRIORITY, -1))
        | models.Q(priority__range=(1, HIGHEST_PRIORITY)),
        "metadata_is_an_object": models.Q(Exact(JsonType("metadata"), models.Value("OBJECT"))),
        "deliver_at_from_0_to_year_9999": models.Q(deliver_at__range=(0, LATEST_DELIVERY)),
        "created_at_from_0_to_year_9999": models.Q(created_at__range=(0, LATEST_DELIVERY)),
        "failed_at_from_0_to_year_9999": models.Q(failed_at__range=(0, LATEST_DELIVERY)),
        "expires_at_from_1_to_year_9999": models.Q(expires_at__range=(1, LATEST_DELIVERY)),
    }
    return [models.CheckConstraint(name=f"queue_outbox_{name}", condition=rule) for name, rule in rules.items()]
