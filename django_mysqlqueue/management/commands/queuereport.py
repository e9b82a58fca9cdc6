"""``manage.py queuereport``: report on the whole history of the queue as one HTML page with charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.core.management.base import CommandError

from django_mysqlqueue.management.base import database_of
from django_mysqlqueue.management.operations import check_topics
from django_mysqlqueue.management.spark import SparkCommand
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.options.conf import get_settings


class Command(SparkCommand):
    """Write a report."""

    help = (
        "Write a report on the whole history of the queue: an HTML page with charts, and its tables as Parquet and CSV "
        "files."
    )
    name = "report"

    def databases(self, options: Mapping[str, Any]) -> Sequence[str]:
        """Return the alias of the database that the report is about."""
        alias, topics = options.get("database"), options.get("topic") or [None]
        found = dict.fromkeys(database_of(alias, topic) for topic in topics)
        if len(found) > 1:
            raise CommandError(
                f"A report is about one database, but these topics are in {', '.join(map(repr, found))}: make a "
                "report for each."
            )
        return [*found]

    def check_names(self, using: str, options: dict[str, Any]) -> None:
        check_topics(using, options["topic"] or ())

    def of_project(self, using: str) -> dict[str, Any]:
        settings = get_settings()
        read = set(ConsumerGroup.objects.using(using).values_list("topic", flat=True))
        return {"retention": lambda topic: settings.retention_of(topic, has_groups=topic in read)}
