"""``manage.py queuereplay``: publish archived messages again."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError

from django_mysqlqueue.management.base import database_of
from django_mysqlqueue.management.spark import SparkCommand


class Command(SparkCommand):
    """Publish archived messages again."""

    help = "Publish archived messages again: to another topic, or for one consumer group."
    name = "replay"

    def check_names(self, using: str, options: dict[str, Any]) -> None:
        target = options["to"]
        # Copies are written to the database of the archive, where subscribers do not look for a topic of another one.
        if target and options["database"] is None and (other := database_of(None, target)) != using:
            raise CommandError(
                f"--to {target}: this topic is in database {other!r}, but the archive of topic {options['topic']} is "
                f"that of {using!r}, and copies are published there. Choose a topic in {using!r}."
            )
