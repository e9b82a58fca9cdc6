"""``manage.py queuegc``: run garbage collection once."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue.management.base import QueueCommand, add_format, progress_bar
from django_mysqlqueue.runtime.log import moment, orphans_deleted
from django_mysqlqueue.service import pruning
from django_mysqlqueue.service.retention import Orphans, by_topic
from django_mysqlqueue.text.humanize import counted


class Command(QueueCommand):
    """Run garbage collection once, for all topics."""

    every_database = True
    help = (
        "Delete messages that every group has settled and whose retention has expired, and rows that are no longer "
        "needed. End jobs whose messages were skipped or deleted. Subscribers do this automatically."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--dry-run", action="store_true", help="show how many rows would be deleted, then exit")
        add_format(parser)

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        dry_run = options["dry_run"]
        rows = dict.fromkeys((*pruning.KINDS, pruning.ENDED_JOBS), 0)
        found: list[Orphans] = []
        with progress_bar("gc", None, options) as bar:
            for step in pruning.prune(using, dry_run=dry_run):
                rows[step.kind] += step.rows
                found += step.orphans
                for one in () if dry_run else step.orphans:
                    orphans_deleted(one)
                bar.update(step.rows)
        orphans = by_topic(found)
        if options["format"] == "json":
            facts = {"dry_run": dry_run, **rows, "topics_without_group": [one._asdict() for one in orphans]}
            self.write_json({"database": using, **facts})
            return
        counts = [counted(rows[kind], noun) for kind, noun in pruning.KINDS.items() if rows[kind] or kind == "messages"]
        texts = [*counts[:-2], " and ".join(counts[-2:])]
        self.stdout.write(f"{'Would delete' if dry_run else 'Deleted'} {', '.join(texts)}.")
        if ended := rows[pruning.ENDED_JOBS]:
            text = f"{counted(ended, 'job')} whose messages were skipped or deleted."
            self.stdout.write(f"{'Would end' if dry_run else 'Ended'} {text}")
        for one in orphans:
            text = (
                f"{counted(one.messages, 'message')} of topic {one.topic!r}, which has no consumer group, "
                f"logged from {moment(one.oldest_at)} to {moment(one.newest_at)}."
            )
            self.stdout.write(self.style.WARNING(text))
