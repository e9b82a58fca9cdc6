"""``manage.py queuereplay``: archived messages back into the queue."""

from __future__ import annotations

from django_mysqlqueue.management.spark import SparkCommand


class Command(SparkCommand):
    help = "Puts archived messages back into the queue: into another topic, or for one group."
    name = "replay"
