"""The privileges on the server that each role of database users needs: the least with which its work succeeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from django.apps import apps
from django.db.models import Model

from django_mysqlqueue import models
from django_mysqlqueue.procedures import CLIENT_PROCEDURES
from django_mysqlqueue.service.job_rows import NewResult

MIGRATIONS = "django_migrations"
"""Commands compare the applied migrations with those of the code."""
VERBS = {"S": "SELECT", "I": "INSERT", "U": "UPDATE", "D": "DELETE"}


@dataclass(frozen=True, slots=True)
class Grant:
    """A privilege on a table, on some of its columns, or on a procedure."""

    privilege: str
    """``SELECT``, ``INSERT``, ``UPDATE``, ``DELETE`` or ``EXECUTE``."""
    name: str
    """The name of the table or procedure."""
    columns: tuple[str, ...] = ()
    """The columns; empty: the whole table."""


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of database user."""

    work: str
    """What it may do, for people."""
    grants: tuple[Grant, ...]


def _table(model: type[Model], verbs: str, **columns: tuple[str, ...]) -> Iterator[Grant]:
    """Yield the privileges on a table: ``SI`` for SELECT and INSERT, and ``UPDATE=(…)`` for columns."""
    for verb in verbs:
        yield Grant(VERBS[verb], model._meta.db_table)
    for privilege, names in columns.items():
        yield Grant(privilege, model._meta.db_table, names)


def _tables(verbs: Mapping[type[Model], str]) -> Iterator[Grant]:
    for model, needed in verbs.items():
        yield from _table(model, needed)


EVERYTHING = tuple(
    model
    for model in apps.get_app_config("django_mysqlqueue").get_models()
    if model._meta.managed and not model._meta.proxy
)
"""The models of the queue's tables."""
READ = (*_tables(dict.fromkeys(EVERYTHING, "S")), Grant("SELECT", MIGRATIONS))
PUBLISHED = (
    *("topic", "partition_key", "id", "payload", "metadata"),
    *("publisher_key", "deliver_at", "expires_at", "coalesce_key"),
)
"""The columns of the outbox that ``publish`` writes: none of those that dead letters and redriven messages have."""

ROLES: dict[str, Role] = {
    "publisher": Role(
        "publish messages, but neither read them nor write the columns of dead letters",
        (
            *_table(models.OutboxMessage, "", INSERT=PUBLISHED),
            *_table(models.JobResult, "", INSERT=NewResult._fields),
            *_table(models.JobStage, "I"),
        ),
    ),
    "scheduler": Role(
        "publish messages, debounce them, and cancel and reschedule those that are scheduled",
        (
            *_table(models.OutboxMessage, "SD", INSERT=PUBLISHED, UPDATE=("deliver_at",)),
            *_table(models.DebouncedMessage, "SIUD"),
            *_table(models.JobResult, "SU", INSERT=(*NewResult._fields, "unique_since")),
            *_table(models.JobStage, "SIU"),
        ),
    ),
    "subscriber": Role(
        "run subscribers and GC; handlers need privileges on their own tables as well",
        (
            *_tables(
                {
                    models.OutboxMessage: "SIUD",
                    models.QueueMessage: "SIUD",
                    models.Sequencer: "SIU",
                    models.LogMark: "SIUD",
                    models.ConsumerGroup: "SIU",
                    models.DeliveryState: "SIUD",
                    models.PartitionLease: "SIUD",
                    models.ConsumerOffset: "SIUD",
                    models.Slots: "SIUD",
                    models.CoalesceKey: "SIUD",
                    models.DebouncedMessage: "SIUD",
                    models.QuarantinedMessage: "SI",
                    models.SubscriberHeartbeat: "SIUD",
                    models.DeliveryEvent: "SID",
                    models.Operation: "SD",
                    models.Rollup: "SIUD",
                    models.CollectedTopic: "SIU",
                    models.RelayPosition: "SIU",
                    models.RelayWatermark: "SIU",
                    models.Reader: "S",
                    models.JobResult: "SIUD",
                    models.JobStage: "SIUD",
                    models.Schedule: "SIU",
                }
            ),
            Grant("SELECT", MIGRATIONS),
        ),
    ),
    "sql-consumer": Role(
        "consume messages with the stored procedures, and nothing else",
        tuple(Grant("EXECUTE", name) for name in CLIENT_PROCEDURES),
    ),
    "reader": Role("read everything, payloads too: the dashboard, queuestatus, queuetail, metrics, Spark", READ),
    "operator": Role(
        "read everything, and run the operations: pause, seek, drop, retry, redrive, discard, erase, reschedule",
        (
            *READ,
            *_tables(
                {
                    models.OutboxMessage: "IUD",
                    models.QueueMessage: "D",
                    models.Sequencer: "U",
                    models.ConsumerGroup: "IUD",
                    models.DeliveryState: "UD",
                    models.PartitionLease: "UD",
                    models.ConsumerOffset: "UD",
                    models.Slots: "D",
                    models.CoalesceKey: "D",
                    models.DebouncedMessage: "D",
                    models.QuarantinedMessage: "D",
                    models.Reader: "D",
                    models.JobResult: "IU",
                    models.JobStage: "U",
                    models.Schedule: "IUD",
                    models.SubscriberHeartbeat: "D",
                    models.DeliveryEvent: "ID",
                    models.Operation: "IU",
                }
            ),
        ),
    ),
    "archiver": Role(
        "archive the log with Spark",
        (
            *_tables({models.QueueMessage: "S", models.LogMark: "S", models.CollectedTopic: "S"}),
            *_table(models.Sequencer, "S", UPDATE=("epoch",)),
            *_table(models.Reader, "SID"),
            Grant("SELECT", MIGRATIONS),
        ),
    ),
}


def statements(role: str, *, database: str, user: str, host: str) -> list[str]:
    """Return the GRANT statements of a role, one for each table, for MariaDB and MySQL.

    ``role``: a key of ``ROLES``. ``host``: the host part of the account; ``%``: any.
    """
    by_name: dict[str, list[str]] = {}
    for grant in ROLES[role].grants:
        columns = f" ({', '.join(f'`{column}`' for column in grant.columns)})" if grant.columns else ""
        by_name.setdefault(grant.name, []).append(f"{grant.privilege}{columns}")
    account = f"{_string(user)}@{_string(host)}"
    return [
        f"GRANT {', '.join(privileges)} ON {'PROCEDURE ' if privileges == ['EXECUTE'] else ''}"
        f"{_identifier(database)}.{_identifier(name)} TO {account}"
        for name, privileges in by_name.items()
    ]


def _identifier(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def _string(text: str) -> str:
    # Valid with and without NO_BACKSLASH_ESCAPES: names of accounts have no backslashes.
    return "'" + text.replace("'", "''") + "'"
