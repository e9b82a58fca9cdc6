"""``manage.py queuereplay``: publish archived messages again."""

from __future__ import annotations

from django_mysqlqueue.management.spark import SparkCommand


class Command(SparkCommand):
    """Publish archived messages again."""

    help = "Publish archived messages again: to another topic, or for one consumer group."
    name = "replay"
