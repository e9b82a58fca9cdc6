"""``manage.py queuegc``: one full round of garbage collection."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue.management.base import QueueCommand
from django_mysqlqueue.runtime.log import moment, orphans_deleted
from django_mysqlqueue.service import heartbeats, retention


class Command(QueueCommand):
    help = "Deletes what every group has passed and the retention has outlived. Subscribers do so by themselves."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--dry-run", action="store_true", help="only count")

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        if options["dry_run"]:
            collected = retention.collect(using, dry_run=True)
            self.stdout.write(f"Would delete {collected.messages} messages.")
        else:
            collected = retention.collect(using, tell=orphans_deleted)
            beats = heartbeats.forget_old(using)
            self.stdout.write(
                f"Deleted {collected.messages} messages, {collected.offsets_rows} offsets rows, {beats} heartbeats."
            )
        for one in collected.orphans:
            text = (
                f"Of these, {one.messages} in the topic {one.topic!r}, which has no consumer group: "
                f"from {moment(one.oldest_at)} to {moment(one.newest_at)}."
            )
            self.stdout.write(self.style.WARNING(text))
