"""``manage.py queuereport``: report on the queue's activity as one HTML page with charts."""

from __future__ import annotations

from typing import Any

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.management.operations import check_topics
from django_mysqlqueue.management.spark import SparkCommand
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.redaction import redacted


class Command(SparkCommand):
    """Write a report."""

    help = "Write a report on the queue's activity: an HTML page with charts, and its tables as Parquet and CSV files."
    name = "report"

    def check_names(self, using: str, options: dict[str, Any]) -> None:
        check_topics(using, options["topic"] or ())

    def of_project(self, using: str) -> dict[str, Any]:
        settings = get_settings()
        read = set(ConsumerGroup.objects.using(using).values_list("topic", flat=True))
        known: dict[str, Any] = {
            "retention": lambda topic: settings.retention_of(topic, has_groups=topic in read),
        }
        if settings.redact is not None:
            known["redact"] = lambda text, topic: redacted(text, topic=topic, kind="error")
        return known
