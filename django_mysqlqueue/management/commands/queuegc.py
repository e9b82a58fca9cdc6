"""``manage.py queuegc``: run garbage collection once."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue.humanize import counted
from django_mysqlqueue.management.base import QueueCommand, add_format, progress_bar
from django_mysqlqueue.runtime.log import moment, orphans_deleted
from django_mysqlqueue.service import heartbeats, retention


class Command(QueueCommand):
    """Run garbage collection once, for all topics."""

    every_database = True
    help = (
        "Delete messages that every group has settled and whose retention has expired, and rows that are no longer "
        "needed. Subscribers do this automatically."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--dry-run", action="store_true", help="show how many messages would be deleted, then exit")
        add_format(parser)

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        dry_run = options["dry_run"]
        tell = None if dry_run else orphans_deleted
        with progress_bar("gc", None, options) as bar:
            collected = retention.collect(using, dry_run=dry_run, tell=tell, progress=bar.update)
        beats = 0 if dry_run else heartbeats.forget_old(using)
        if options["format"] == "json":
            facts = {
                "dry_run": dry_run,
                "messages": collected.messages,
                "partition_positions": collected.offsets_rows,
                "heartbeats": beats,
                "topics_without_group": [one._asdict() for one in collected.orphans],
            }
            self.write_json({"database": using, **facts})
            return
        if dry_run:
            self.stdout.write(f"Would delete {counted(collected.messages, 'message')}.")
        else:
            self.stdout.write(
                f"Deleted {counted(collected.messages, 'message')}, "
                f"{counted(collected.offsets_rows, 'partition position')} and {counted(beats, 'old heartbeat')}."
            )
        for one in collected.orphans:
            text = (
                f"{counted(one.messages, 'message')} of topic {one.topic!r}, which has no consumer group, "
                f"logged from {moment(one.oldest_at)} to {moment(one.newest_at)}."
            )
            self.stdout.write(self.style.WARNING(text))
