"""The queue's tables, and the sequencer's row with the id of the log."""

from typing import Any

from django.db import migrations, models, router
from django.db.models.functions import Length, Substr
from django.db.models.lookups import Exact, GreaterThan, In, LessThanOrEqual

from django_mysqlqueue.db.fields import (
    BytewiseCharField,
    BytewiseTextField,
    FreshId,
    JsonType,
    LanePriority,
    NowMilliseconds,
)


def identify(apps: Any, schema_editor: Any) -> None:
    """Insert the sequencer's row. The database gives the log an id."""
    alias = schema_editor.connection.alias
    sequencer = apps.get_model("django_mysqlqueue", "Sequencer")
    if router.allow_migrate_model(alias, sequencer):
        sequencer.objects.using(alias).create(pk=1)


def message_columns(longer: int = 0) -> list[tuple[str, Any]]:
    """Return the columns that the sequencer copies from the outbox into the log."""
    return [
        ("topic", BytewiseCharField("topic", max_length=120 + longer)),
        ("partition_key", BytewiseCharField("partition key", max_length=190 + longer, db_default="")),
        ("message_id", BytewiseCharField("id", max_length=190 + longer, db_column="id", db_default=FreshId())),
        ("payload", models.BinaryField("payload")),
        (
            "size",
            models.GeneratedField(
                db_persist=True,
                expression=Length("payload"),
                output_field=models.PositiveIntegerField(),
                verbose_name="payload size in bytes",
            ),
        ),
        ("metadata", models.JSONField("metadata", db_default=models.Value({}, models.JSONField()))),
        (
            "publisher_key",
            BytewiseCharField(  # type: ignore[misc]
                "publisher's key",
                max_length=190 + longer,
                null=True,
                blank=True,
                help_text="the key that the publisher gave, if it was hashed to the partition",
            ),
        ),
        (
            "priority",
            models.GeneratedField(
                db_persist=True,
                expression=LanePriority("partition_key"),
                output_field=models.SmallIntegerField(),
                verbose_name="priority",
            ),
        ),
        (
            "expires_at",
            models.BigIntegerField(
                "expires at", null=True, blank=True, help_text="when its handling may no longer start; NULL: never"
            ),
        ),
        (
            "coalesce_key",
            BytewiseCharField(  # type: ignore[misc]
                "coalesce key",
                max_length=190 + longer,
                null=True,
                blank=True,
                help_text="of the messages with the same one, groups handle only the latest; NULL: none",
            ),
        ),
        ("target_group", BytewiseCharField("target group", max_length=100 + longer, db_default="", blank=True)),
        ("original_id", BytewiseCharField("original id", max_length=190, db_default="", blank=True)),
        ("original_topic", BytewiseCharField("original topic", max_length=120, db_default="", blank=True)),
        ("original_offset", models.BigIntegerField("original offset", db_default=0)),
        ("failed_group", BytewiseCharField("failed group", max_length=100, db_default="", blank=True)),
        ("failed_at", models.BigIntegerField("failed at", db_default=0)),
        ("failure_count", models.PositiveIntegerField("failure count", db_default=0)),
        ("last_error", BytewiseTextField("last error", db_default=models.Value(""), blank=True)),
    ]


YEAR_9999 = 253_402_300_799_000
OUTBOX_RULES = {
    "topic_of_1_to_120_characters": models.Q(LessThanOrEqual(Length("topic"), 120), GreaterThan(models.F("topic"), "")),
    "partition_key_of_0_to_190_characters": models.Q(LessThanOrEqual(Length("partition_key"), 190)),
    "id_of_1_to_190_characters": models.Q(
        LessThanOrEqual(Length("message_id"), 190), GreaterThan(models.F("message_id"), "")
    ),
    "publisher_key_of_0_to_190_characters": models.Q(LessThanOrEqual(Length("publisher_key"), 190)),
    "coalesce_key_of_1_to_190_characters": models.Q(
        LessThanOrEqual(Length("coalesce_key"), 190), GreaterThan(models.F("coalesce_key"), "")
    ),
    "target_group_of_0_to_100_characters": models.Q(LessThanOrEqual(Length("target_group"), 100)),
    "partition_key_no_malformed_lane": ~models.Q(In(Substr("partition_key", 1, 5), ["__p:+", "__p:-"]))
    | models.Q(priority__range=(-100, -1))
    | models.Q(priority__range=(1, 100)),
    "metadata_is_an_object": models.Q(Exact(JsonType("metadata"), models.Value("OBJECT"))),
    "deliver_at_from_0_to_year_9999": models.Q(deliver_at__range=(0, YEAR_9999)),
    "created_at_from_0_to_year_9999": models.Q(created_at__range=(0, YEAR_9999)),
    "failed_at_from_0_to_year_9999": models.Q(failed_at__range=(0, YEAR_9999)),
    "expires_at_from_1_to_year_9999": models.Q(expires_at__range=(1, YEAR_9999)),
}
LATENCIES = (
    *(f"latency_{milliseconds}ms" for milliseconds in (5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000)),
    *(f"latency_{minutes * 60_000}ms" for minutes in (1, 2, 5, 10, 30, 60, 120, 360, 720, 1440)),
    "latency_over",
)


class Migration(migrations.Migration):
    initial = True

    operations = [
        migrations.CreateModel(
            name="QueueMessage",
            fields=[
                ("offset", models.BigAutoField("offset", primary_key=True, serialize=False)),
                *message_columns(),
                ("created_at", models.BigIntegerField("created at", help_text="when the publisher wrote it")),
                ("published_at", models.BigIntegerField("published at", help_text="when it entered the log")),
            ],
            options={
                "verbose_name": "message",
                "verbose_name_plural": "messages",
                "db_table": "queue_messages",
                "indexes": [models.Index(fields=["topic", "partition_key", "offset"], name="queue_messages_partition")],
                "constraints": [
                    models.UniqueConstraint(fields=("topic", "partition_key", "message_id"), name="queue_messages_id")
                ],
            },
        ),
        migrations.CreateModel(
            name="OutboxMessage",
            fields=[
                ("outbox_id", models.BigAutoField("outbox id", primary_key=True, serialize=False)),
                *message_columns(longer=1),
                ("deliver_at", models.BigIntegerField("deliver at", db_default=0, help_text="0: at once")),
                ("created_at", models.BigIntegerField("created at", db_default=NowMilliseconds())),
            ],
            options={
                "verbose_name": "outbox message",
                "verbose_name_plural": "outbox messages",
                "db_table": "queue_outbox",
                "indexes": [
                    models.Index(fields=["deliver_at", "-priority", "outbox_id", "message_id"], name="queue_outbox_due")
                ],
                "constraints": [
                    models.CheckConstraint(name=f"queue_outbox_{name}", condition=rule)
                    for name, rule in OUTBOX_RULES.items()
                ],
            },
        ),
        migrations.CreateModel(
            name="QuarantinedMessage",
            fields=[
                ("quarantine_id", models.BigAutoField("quarantine id", primary_key=True, serialize=False)),
                *message_columns(longer=1),
                ("deliver_at", models.BigIntegerField("deliver at")),
                ("created_at", models.BigIntegerField("created at")),
                ("reason", BytewiseTextField("reason", help_text="the error of the database")),
                ("quarantined_at", models.BigIntegerField("quarantined at", db_default=NowMilliseconds())),
            ],
            options={
                "verbose_name": "quarantined message",
                "verbose_name_plural": "quarantined messages",
                "db_table": "queue_quarantine",
                "indexes": [models.Index(fields=["topic", "quarantine_id"], name="queue_quarantine_topic")],
            },
        ),
        migrations.CreateModel(
            name="Sequencer",
            fields=[
                ("id", models.PositiveSmallIntegerField(primary_key=True, serialize=False)),
                ("last_offset", models.BigIntegerField("last offset", db_default=0)),
                ("sequenced_at", models.BigIntegerField("sequenced at", db_default=0)),
                (
                    "debounced",
                    models.BigIntegerField(
                        "debounced",
                        db_default=0,
                        help_text="messages that a later one has replaced before they entered the log",
                    ),
                ),
                (
                    "log_id",
                    BytewiseCharField(
                        "log id",
                        max_length=36,
                        db_default=FreshId(),
                        help_text="identifies this log, also under another alias of its database",
                    ),
                ),
                (
                    "epoch",
                    models.PositiveIntegerField(
                        "epoch",
                        db_default=0,
                        help_text="how often an operator has accepted the log after it was restored",
                    ),
                ),
                ("marked_at", models.BigIntegerField("marked at", db_default=NowMilliseconds())),
                (
                    "routes",
                    models.JSONField(
                        "routes",
                        db_default=models.Value({}, models.JSONField()),
                        blank=True,
                        help_text="by topic that moves, the databases from which and to which its messages go",
                    ),
                ),
            ],
            options={
                "verbose_name": "sequencer",
                "verbose_name_plural": "sequencer",
                "db_table": "queue_sequencer",
            },
        ),
        migrations.CreateModel(
            name="LogMark",
            fields=[
                ("marked_offset", models.BigIntegerField("marked offset", primary_key=True, serialize=False)),
                ("mark", models.BigIntegerField("mark")),
                ("marked_at", models.BigIntegerField("marked at", db_default=NowMilliseconds())),
            ],
            options={
                "verbose_name": "mark of the log",
                "verbose_name_plural": "marks of the log",
                "db_table": "queue_log_marks",
            },
        ),
        migrations.CreateModel(
            name="ConsumerGroup",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("consumer_group", BytewiseCharField("consumer group", max_length=100)),
                ("topic", BytewiseCharField("topic", max_length=120)),
                (
                    "mode",
                    BytewiseCharField("mode", max_length=10, choices=[("ordered", "ordered"), ("shared", "shared")]),
                ),
                ("start_offset", models.BigIntegerField("start offset", db_default=0)),
                ("paused", models.BooleanField("paused", db_default=False)),
                (
                    "after_seek",
                    BytewiseCharField(
                        "after the seek",
                        max_length=10,
                        db_default="",
                        blank=True,
                        choices=[
                            ("", "no seek, drop or move in progress"),
                            ("resume", "the group resumes"),
                            ("stay", "the group stays paused"),
                            ("dropped", "the group is dropped"),
                            ("moves", "the group waits for its namesake in the database that the topic leaves"),
                        ],
                        help_text="a seek, drop or move has not finished; if it was interrupted, run it again",
                    ),
                ),
                (
                    "operation",
                    models.BigIntegerField(
                        "operation", db_default=0, help_text="id of the seek or drop in progress; 0: none"
                    ),
                ),
                (
                    "revision",
                    models.BigIntegerField(
                        "revision", db_default=0, help_text="grows when subscribers must read the group's state again"
                    ),
                ),
                (
                    "overrides",
                    models.JSONField(
                        "overrides",
                        db_default=models.Value({}, models.JSONField()),
                        blank=True,
                        help_text="options that operators have overridden: by name, the value, since when and by whom",
                    ),
                ),
                (
                    "limits",
                    models.JSONField(
                        "limits",
                        db_default=models.Value({}, models.JSONField()),
                        blank=True,
                        help_text="limits on the rate and on the messages in flight, as migrate has registered them",
                    ),
                ),
                (
                    "filter",
                    models.JSONField(
                        "filter",
                        db_default=models.Value({}, models.JSONField()),
                        blank=True,
                        help_text="which messages the group gets, as migrate has registered it; {}: all",
                    ),
                ),
                (
                    "allowed_users",
                    models.JSONField(
                        "allowed users",
                        db_default=models.Value({}, models.JSONField()),
                        blank=True,
                        help_text="database users that may use the group; {}: all",
                    ),
                ),
                ("registered_at", models.BigIntegerField("registered at", db_default=NowMilliseconds())),
                (
                    "sought_at",
                    models.BigIntegerField(
                        "sought at", db_default=0, help_text="when its last seek began or ended; 0: never"
                    ),
                ),
            ],
            options={
                "verbose_name": "consumer group",
                "verbose_name_plural": "consumer groups",
                "db_table": "queue_consumer_groups",
                "constraints": [
                    models.UniqueConstraint(fields=("consumer_group", "topic"), name="queue_consumer_groups_name")
                ],
            },
        ),
        migrations.CreateModel(
            name="Dashboard",
            fields=[],
            options={
                "verbose_name": "queue",
                "verbose_name_plural": "dashboard",
                "proxy": True,
                "default_permissions": (),
            },
            bases=("django_mysqlqueue.consumergroup",),
        ),
        migrations.CreateModel(
            name="Topic",
            fields=[
                ("name", BytewiseCharField("name", max_length=120, primary_key=True, serialize=False)),
            ],
            options={
                "verbose_name": "topic",
                "permissions": [
                    ("view_dashboard", "Can view the dashboard, without payloads and metadata"),
                    ("operate_dashboard", "Can operate the queue: pause, seek, retry, redrive, discard, reschedule"),
                    ("see_payloads", "Can see payloads and metadata of messages"),
                    ("publish_messages", "Can publish test messages"),
                    ("edit_schedules", "Can create, edit and delete recurring schedules"),
                ],
                "managed": False,
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="DeliveryState",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "consumer_group", "topic", "partition_key", "message_offset", serialize=False
                    ),
                ),
                ("consumer_group", BytewiseCharField("consumer group", max_length=100)),
                ("topic", BytewiseCharField("topic", max_length=120)),
                ("partition_key", BytewiseCharField("partition key", max_length=190)),
                ("message_offset", models.BigIntegerField("message offset")),
                ("acked", models.BooleanField("settled", db_default=False, help_text="acked or dead-lettered")),
                ("invisible_until", models.BigIntegerField("invisible until", db_default=0)),
                ("retry_count", models.PositiveIntegerField("retry count", db_default=0)),
                ("delivery_token", models.BigIntegerField("delivery token", db_default=0)),
                (
                    "suspect",
                    models.BooleanField(
                        "suspect",
                        db_default=False,
                        help_text="claimed as a suspected poison message; never without a token",
                    ),
                ),
                ("delivered_by", BytewiseCharField("delivered by", max_length=190, db_default="", blank=True)),
                ("delivered_at", models.BigIntegerField("delivered at", db_default=0)),
                ("last_error", BytewiseTextField("last error", db_default=models.Value(""), blank=True)),
            ],
            options={
                "verbose_name": "delivery state",
                "verbose_name_plural": "delivery states",
                "db_table": "queue_delivery_state",
                "indexes": [
                    models.Index(
                        fields=["consumer_group", "topic", "acked", "invisible_until"], name="queue_delivery_state_due"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="PartitionLease",
            fields=[
                ("pk", models.CompositePrimaryKey("consumer_group", "topic", "partition_key", serialize=False)),
                ("consumer_group", BytewiseCharField("consumer group", max_length=100)),
                ("topic", BytewiseCharField("topic", max_length=120)),
                ("partition_key", BytewiseCharField("partition key", max_length=190)),
                ("leased_by", BytewiseCharField("leased by", max_length=190, db_default="", blank=True)),
                ("leased_at", models.BigIntegerField("leased at", db_default=0)),
            ],
            options={
                "verbose_name": "partition lease",
                "verbose_name_plural": "partition leases",
                "db_table": "queue_partition_leases",
                "indexes": [models.Index(fields=["leased_by"], name="queue_leases_owner")],
            },
        ),
        migrations.CreateModel(
            name="ConsumerOffset",
            fields=[
                ("pk", models.CompositePrimaryKey("consumer_group", "topic", "partition_key", serialize=False)),
                ("consumer_group", BytewiseCharField("consumer group", max_length=100)),
                ("topic", BytewiseCharField("topic", max_length=120)),
                ("partition_key", BytewiseCharField("partition key", max_length=190)),
                ("offset_acked", models.BigIntegerField("watermark", db_default=0)),
                ("offset_claimed", models.BigIntegerField("cursor", db_default=0)),
                ("updated_at", models.BigIntegerField("updated at", db_default=0)),
            ],
            options={
                "verbose_name": "consumer offset",
                "verbose_name_plural": "consumer offsets",
                "db_table": "queue_offsets",
                "indexes": [
                    models.Index(fields=["topic", "partition_key", "offset_acked"], name="queue_offsets_floor")
                ],
            },
        ),
        migrations.CreateModel(
            name="Slots",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "consumer_group", "topic", "limit_key", "subscriber_name", serialize=False
                    ),
                ),
                ("consumer_group", BytewiseCharField("consumer group", max_length=100)),
                ("topic", BytewiseCharField("topic", max_length=120)),
                (
                    "limit_key",
                    BytewiseCharField(
                        "limited key",
                        max_length=191,
                        help_text="':' and the key; '#' and a hash of a long one; '' for the limits of the group",
                    ),
                ),
                (
                    "subscriber_name",
                    BytewiseCharField(
                        "subscriber", max_length=190, help_text="'' in the row that has the rate of the key"
                    ),
                ),
                (
                    "full_at",
                    models.BigIntegerField(
                        "full at",
                        db_default=0,
                        help_text="when a full burst may start again, in epoch microseconds; "
                        "rows of subscribers: when written",
                    ),
                ),
                (
                    "held",
                    models.BigIntegerField(
                        "held", db_default=0, help_text="messages that the subscriber has in flight"
                    ),
                ),
            ],
            options={
                "verbose_name": "slots",
                "verbose_name_plural": "slots",
                "db_table": "queue_slots",
                "indexes": [models.Index(fields=["full_at"], name="queue_slots_full_at")],
            },
        ),
        migrations.CreateModel(
            name="CoalesceKey",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "consumer_group", "topic", "partition_key", "coalesce_key", serialize=False
                    ),
                ),
                (
                    "consumer_group",
                    BytewiseCharField(
                        "consumer group", max_length=100, blank=True, help_text="'' in the row for the log"
                    ),
                ),
                ("topic", BytewiseCharField("topic", max_length=120)),
                ("partition_key", BytewiseCharField("partition key", max_length=190)),
                ("coalesce_key", BytewiseCharField("coalesce key", max_length=190)),
                ("message_offset", models.BigIntegerField("message offset")),
                (
                    "superseding_offset",
                    models.BigIntegerField(
                        "superseding offset",
                        db_default=0,
                        help_text="the message for which the group has given up earlier ones, "
                        "so that it passes any filter; 0: none",
                    ),
                ),
            ],
            options={
                "verbose_name": "coalesce key",
                "verbose_name_plural": "coalesce keys",
                "db_table": "queue_coalesce_keys",
            },
        ),
        migrations.CreateModel(
            name="DebouncedMessage",
            fields=[
                ("outbox_id", models.BigIntegerField("outbox id", primary_key=True, serialize=False)),
                ("topic", BytewiseCharField("topic", max_length=120)),
                ("partition_key", BytewiseCharField("partition key", max_length=190)),
                ("message_id", BytewiseCharField("id", max_length=190, db_column="id")),
                ("coalesce_key", BytewiseCharField("coalesce key", max_length=190)),
                (
                    "deliver_by",
                    models.BigIntegerField(
                        "deliver by",
                        db_default=253402300799000,
                        help_text="when the message, or the one that replaces it, enters the log at the latest",
                    ),
                ),
            ],
            options={
                "verbose_name": "debounced message",
                "verbose_name_plural": "debounced messages",
                "db_table": "queue_debounced",
                "indexes": [
                    models.Index(
                        fields=["topic", "partition_key", "coalesce_key", "outbox_id"], name="queue_debounced_key"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="SubscriberHeartbeat",
            fields=[
                ("pk", models.CompositePrimaryKey("consumer_group", "topic", "subscriber_name", serialize=False)),
                ("consumer_group", BytewiseCharField("consumer group", max_length=100)),
                ("topic", BytewiseCharField("topic", max_length=120)),
                ("subscriber_name", BytewiseCharField("subscriber", max_length=190)),
                ("heartbeat_at", models.BigIntegerField("heartbeat at")),
                ("deregistered_at", models.BigIntegerField("deregistered at", db_default=0)),
                ("info", models.JSONField("info", db_default=models.Value({}, models.JSONField()))),
            ],
            options={
                "verbose_name": "subscriber heartbeat",
                "verbose_name_plural": "subscriber heartbeats",
                "db_table": "queue_subscriber_heartbeats",
            },
        ),
        migrations.CreateModel(
            name="DeliveryEvent",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("consumer_group", BytewiseCharField("consumer group", max_length=100)),
                ("topic", BytewiseCharField("topic", max_length=120)),
                ("partition_key", BytewiseCharField("partition key", max_length=190)),
                ("message_offset", models.BigIntegerField("message offset")),
                ("attempt", models.PositiveIntegerField("attempt", db_default=0)),
                (
                    "outcome",
                    BytewiseCharField(
                        "outcome",
                        max_length=20,
                        choices=[
                            ("acked", "acked"),
                            ("failed", "failed"),
                            ("snoozed", "snoozed"),
                            ("lost", "lost"),
                            ("dead_lettered", "dead-lettered"),
                            ("redriven", "redriven"),
                            ("replaced", "edited and redriven"),
                            ("discarded", "discarded"),
                            ("deleted", "deleted before it was handled"),
                            ("expired", "expired before it was handled"),
                            ("superseded", "superseded before it was handled"),
                        ],
                    ),
                ),
                ("delivered_at", models.BigIntegerField("delivered at", db_default=0)),
                ("settled_at", models.BigIntegerField("settled at", db_default=NowMilliseconds())),
                ("handled_ms", models.BigIntegerField("milliseconds in the handler", db_default=0)),
                ("settled_by", BytewiseCharField("by", max_length=190, db_default="", blank=True)),
                ("error", BytewiseTextField("error", db_default=models.Value(""), blank=True)),
                (
                    "related_id",
                    BytewiseCharField(
                        "related id",
                        max_length=190,
                        db_default="",
                        blank=True,
                        help_text="id of the new dead letter, or of the message that replaced it",
                    ),
                ),
            ],
            options={
                "verbose_name": "delivery event",
                "verbose_name_plural": "delivery events",
                "db_table": "queue_delivery_events",
                "indexes": [
                    models.Index(fields=["message_offset"], name="queue_delivery_events_message"),
                    models.Index(fields=["consumer_group", "topic"], name="queue_delivery_events_group"),
                ],
            },
        ),
        migrations.CreateModel(
            name="Operation",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("action", BytewiseCharField("action", max_length=20)),
                ("consumer_group", BytewiseCharField("consumer group", max_length=100, db_default="", blank=True)),
                ("topic", BytewiseCharField("topic", max_length=120, db_default="", blank=True)),
                ("actor", BytewiseCharField("by", max_length=190, db_default="", blank=True)),
                ("detail", BytewiseTextField("detail", db_default=models.Value(""), blank=True)),
                ("reason", BytewiseTextField("reason", db_default=models.Value(""), blank=True)),
                ("changed", models.BigIntegerField("changed", db_default=0)),
                (
                    "total",
                    models.BigIntegerField("total", db_default=0, help_text="maximum number to change; 0: not known"),
                ),
                ("started_at", models.BigIntegerField("started at", db_default=NowMilliseconds())),
                (
                    "progress_at",
                    models.BigIntegerField("last progress at", db_default=0, help_text="0: none since its start"),
                ),
                ("ended_at", models.BigIntegerField("ended at", db_default=0, help_text="0: running, or interrupted")),
            ],
            options={
                "verbose_name": "operation",
                "verbose_name_plural": "operations",
                "db_table": "queue_operations",
            },
        ),
        migrations.CreateModel(
            name="Rollup",
            fields=[
                ("pk", models.CompositePrimaryKey("grain", "bucket_at", "consumer_group", "topic", serialize=False)),
                ("grain", models.PositiveIntegerField("seconds")),
                ("bucket_at", models.BigIntegerField("begins at")),
                ("consumer_group", BytewiseCharField("consumer group", max_length=100)),
                ("topic", BytewiseCharField("topic", max_length=120)),
                ("acked", models.BigIntegerField("acked", db_default=0)),
                ("failed", models.BigIntegerField("failed", db_default=0)),
                ("dead_lettered", models.BigIntegerField("dead-lettered", db_default=0)),
                ("filtered", models.BigIntegerField("filtered", db_default=0)),
                ("expired", models.BigIntegerField("expired", db_default=0)),
                ("superseded", models.BigIntegerField("superseded", db_default=0)),
                (
                    "sampled_at",
                    models.BigIntegerField(
                        "sampled at",
                        db_default=0,
                        help_text="when a subscriber began to count the backlog; 0: none has",
                    ),
                ),
                (
                    "backlog",
                    models.BigIntegerField(
                        "backlog", null=True, help_text="of an hour: its highest sample; NULL: there is no sample"
                    ),
                ),
                ("backlog_exact", models.BooleanField("backlog is exact", db_default=True)),
                (
                    "oldest_ms",
                    models.BigIntegerField(
                        "age of the oldest unsettled message", db_default=0, help_text="of an hour: its highest sample"
                    ),
                ),
                ("entered", models.BigIntegerField("entered the log", db_default=0)),
                (
                    "entered_minutes",
                    models.PositiveIntegerField(
                        "minutes", db_default=0, help_text="number of minutes in which these messages were counted"
                    ),
                ),
                *((name, models.BigIntegerField(db_default=0)) for name in LATENCIES),
            ],
            options={
                "verbose_name": "rollup",
                "verbose_name_plural": "rollups",
                "db_table": "queue_rollups",
            },
        ),
        migrations.CreateModel(
            name="CollectedTopic",
            fields=[
                ("topic", BytewiseCharField("topic", max_length=120, primary_key=True, serialize=False)),
                ("collected_offset", models.BigIntegerField("highest offset collected")),
                (
                    "published_at",
                    models.BigIntegerField("published at", help_text="when the last of them entered the log"),
                ),
                ("collected_at", models.BigIntegerField("collected at", db_default=NowMilliseconds())),
            ],
            options={
                "verbose_name": "collected topic",
                "verbose_name_plural": "collected topics",
                "db_table": "queue_collected",
            },
        ),
        migrations.CreateModel(
            name="RelayPosition",
            fields=[
                ("pk", models.CompositePrimaryKey("source_log", "target", serialize=False)),
                ("source_log", BytewiseCharField("source log", max_length=36)),
                ("target", BytewiseCharField("target", max_length=120, help_text="the alias of this database")),
                ("source", BytewiseCharField("source", max_length=120, help_text="the alias of the source")),
                ("relayed_offset", models.BigIntegerField("position", db_default=0)),
                ("relayed_id", BytewiseCharField("id", max_length=190, db_default="", blank=True)),
                ("relayed_at", models.BigIntegerField("relayed at", db_default=NowMilliseconds())),
            ],
            options={
                "verbose_name": "relay position",
                "verbose_name_plural": "relay positions",
                "db_table": "queue_relay_positions",
            },
        ),
        migrations.CreateModel(
            name="RelayWatermark",
            fields=[
                (
                    "target",
                    BytewiseCharField(
                        "target", max_length=120, primary_key=True, serialize=False, help_text="its alias"
                    ),
                ),
                (
                    "relayed_offset",
                    models.BigIntegerField(
                        "last relayed offset", db_default=0, help_text="offset of the last message that has arrived"
                    ),
                ),
                (
                    "read_offset",
                    models.BigIntegerField(
                        "watermark", db_default=0, help_text="all messages up to this offset have arrived"
                    ),
                ),
                ("read_at", models.BigIntegerField("read at", db_default=NowMilliseconds())),
                (
                    "refused_offset",
                    models.BigIntegerField(
                        "refused offset",
                        db_default=0,
                        help_text="offset of the last message that the target has refused",
                    ),
                ),
                (
                    "refusal",
                    BytewiseCharField(
                        "refusal", max_length=500, db_default="", blank=True, help_text="the target's error"
                    ),
                ),
            ],
            options={
                "verbose_name": "relay watermark",
                "verbose_name_plural": "relay watermarks",
                "db_table": "queue_relay_watermarks",
            },
        ),
        migrations.CreateModel(
            name="Reader",
            fields=[
                ("pk", models.CompositePrimaryKey("name", "topic", serialize=False)),
                ("name", BytewiseCharField("name", max_length=100)),
                (
                    "topic",
                    BytewiseCharField("topic", max_length=120, db_default="", blank=True, help_text="'': all topics"),
                ),
                ("read_offset", models.BigIntegerField("read offset", help_text="everything up to it has been read")),
                (
                    "owner",
                    BytewiseCharField(
                        "owner", max_length=100, db_default="", help_text="of the archive: the id of its Delta table"
                    ),
                ),
                ("marked_offset", models.BigIntegerField("marked offset", db_default=0)),
                (
                    "mark",
                    models.BigIntegerField(
                        "mark", db_default=0, help_text="of a stream: the newest mark of the log up to the read offset"
                    ),
                ),
                ("moved_at", models.BigIntegerField("moved at", db_default=NowMilliseconds())),
            ],
            options={"verbose_name": "reader", "verbose_name_plural": "readers", "db_table": "queue_readers"},
        ),
        migrations.CreateModel(
            name="JobResult",
            fields=[
                ("id", BytewiseCharField(max_length=190, primary_key=True, serialize=False)),
                ("backend", BytewiseCharField("backend", max_length=100, help_text="alias in TASKS")),
                ("queue_name", BytewiseCharField("queue", max_length=100)),
                ("task_path", BytewiseCharField("task", max_length=181)),
                ("arguments", BytewiseTextField("arguments", help_text="JSON with args and kwargs")),
                ("priority", models.SmallIntegerField("priority", db_default=0)),
                ("run_after", models.BigIntegerField("run after", db_default=0, help_text="0: at once")),
                (
                    "status",
                    BytewiseCharField(
                        "status",
                        max_length=10,
                        db_default="READY",
                        choices=[
                            ("READY", "ready"),
                            ("RUNNING", "running"),
                            ("FAILED", "failed"),
                            ("SUCCESSFUL", "successful"),
                        ],
                    ),
                ),
                ("enqueued_at", models.BigIntegerField("enqueued at", db_default=NowMilliseconds())),
                (
                    "started_at",
                    models.BigIntegerField("started at", db_default=0, help_text="of the first attempt; 0: never"),
                ),
                ("last_attempted_at", models.BigIntegerField("last attempted at", db_default=0, help_text="0: never")),
                ("finished_at", models.BigIntegerField("finished at", db_default=0, help_text="0: not yet")),
                (
                    "return_value",
                    BytewiseTextField(
                        "return value", db_default=models.Value(""), blank=True, help_text="JSON; empty: none"
                    ),
                ),
                (
                    "errors",
                    BytewiseTextField(
                        "errors",
                        db_default=models.Value(""),
                        blank=True,
                        help_text="of all attempts: a JSON object in each line",
                    ),
                ),
                (
                    "worker_ids",
                    BytewiseTextField(
                        "workers",
                        db_default=models.Value(""),
                        blank=True,
                        help_text="subscribers that had it: one in each line",
                    ),
                ),
                (
                    "progress",
                    BytewiseCharField(
                        "progress",
                        max_length=1500,
                        db_default=models.Value(""),
                        blank=True,
                        help_text="of the current or last attempt: JSON with done, total, message and at; empty: none",
                    ),
                ),
                (
                    "cancel_requested_at",
                    models.BigIntegerField("cancel requested at", db_default=0, help_text="of a running job; 0: never"),
                ),
                (
                    "unique_key",
                    models.CharField(
                        "unique key",
                        max_length=64,
                        null=True,
                        help_text="SHA-256 of what no other job may have; NULL: it holds none",
                    ),
                ),
                (
                    "kept_key",
                    BytewiseCharField(
                        "kept key",
                        max_length=64,
                        db_default=models.Value(""),
                        blank=True,
                        help_text="the unique key that it holds until it has ended; empty: none",
                    ),
                ),
                ("unique_since", models.BigIntegerField("unique since", db_default=0, help_text="0: not unique")),
                (
                    "unique_for",
                    models.BigIntegerField(
                        "unique for",
                        db_default=0,
                        help_text="milliseconds after which it no longer holds its key; 0: no limit",
                    ),
                ),
                (
                    "stage",
                    BytewiseCharField(
                        "stage", max_length=50, db_default=models.Value(""), blank=True, help_text="of a chain, if any"
                    ),
                ),
                (
                    "redriven_id",
                    BytewiseCharField(
                        "redriven id",
                        max_length=190,
                        db_default=models.Value(""),
                        blank=True,
                        help_text="of the message that the last redrive has published; empty: none",
                    ),
                ),
                (
                    "expires_in",
                    models.BigIntegerField(
                        "expires in", db_default=0, help_text="milliseconds that its message may wait; 0: no limit"
                    ),
                ),
                (
                    "retry_at",
                    models.BigIntegerField("retry at", db_default=0, help_text="of the next attempt; 0: never retried"),
                ),
                (
                    "retry_reason",
                    BytewiseCharField(
                        "retry reason",
                        max_length=200,
                        db_default=models.Value(""),
                        blank=True,
                        help_text="why it waits for that; empty: none was given",
                    ),
                ),
                (
                    "retry_since",
                    models.BigIntegerField(
                        "retry since",
                        db_default=0,
                        help_text="since when it asks for attempts without counting any; 0: it does not",
                    ),
                ),
            ],
            options={
                "verbose_name": "job result",
                "verbose_name_plural": "job results",
                "db_table": "queue_job_results",
                "indexes": [
                    models.Index(fields=["status", "finished_at"], name="queue_job_results_status"),
                    models.Index(fields=["task_path", "enqueued_at"], name="queue_job_results_task"),
                ],
                "constraints": [models.UniqueConstraint(fields=("unique_key",), name="queue_job_results_unique")],
            },
        ),
        migrations.CreateModel(
            name="JobStage",
            fields=[
                ("id", BytewiseCharField(max_length=50, primary_key=True, serialize=False)),
                (
                    "following",
                    BytewiseCharField(
                        "following stage",
                        max_length=50,
                        db_default=models.Value(""),
                        blank=True,
                        help_text="empty: none",
                    ),
                ),
                (
                    "remaining",
                    models.IntegerField("remaining", help_text="number of its jobs that are not SUCCESSFUL yet"),
                ),
                (
                    "kept",
                    models.IntegerField("kept", help_text="number of its jobs whose results were not deleted yet"),
                ),
                (
                    "size",
                    models.IntegerField(
                        "size", help_text="number of its jobs; their ids are that of the stage and a number"
                    ),
                ),
            ],
            options={
                "verbose_name": "stage of jobs",
                "verbose_name_plural": "stages of jobs",
                "db_table": "queue_job_stages",
            },
        ),
        migrations.CreateModel(
            name="Schedule",
            fields=[
                ("name", BytewiseCharField(max_length=150, primary_key=True, serialize=False)),
                ("definition", BytewiseTextField("definition", help_text="JSON with all that a tick needs")),
                (
                    "last_tick",
                    models.BigIntegerField(
                        "last tick",
                        db_default=NowMilliseconds(),
                        help_text="ticks up to this time were decided; never moves back",
                    ),
                ),
                (
                    "last_run",
                    models.BigIntegerField("last run", db_default=0, help_text="last tick that was published; 0: none"),
                ),
                (
                    "skipped",
                    models.BigIntegerField(
                        "skipped", db_default=0, help_text="ticks while an earlier job had not ended"
                    ),
                ),
                ("paused_at", models.BigIntegerField("paused at", db_default=0, help_text="0: not paused")),
                (
                    "registered_at",
                    models.BigIntegerField(
                        "registered at", db_default=NowMilliseconds(), help_text="when its definition last changed"
                    ),
                ),
                (
                    "seen_at",
                    models.BigIntegerField(
                        "seen at",
                        db_default=NowMilliseconds(),
                        help_text="when a process that runs it was last seen",
                    ),
                ),
                (
                    "editable",
                    models.BooleanField("editable", db_default=False, help_text="made by people, not by the code"),
                ),
            ],
            options={
                "verbose_name": "schedule",
                "verbose_name_plural": "schedules",
                "db_table": "queue_schedules",
                "indexes": [models.Index(fields=["editable", "name"], name="queue_schedules_editable")],
            },
        ),
        migrations.RunPython(identify, migrations.RunPython.noop),
    ]
