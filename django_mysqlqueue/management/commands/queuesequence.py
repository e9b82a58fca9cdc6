"""``manage.py queuesequence``: move due messages from the outbox into the log."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue.management.base import QueueCommand, add_format, progress_bar
from django_mysqlqueue.service import sequencing
from django_mysqlqueue.text.humanize import counted


class Command(QueueCommand):
    """Move due messages into the log."""

    every_database = True
    help = "Move due messages from the outbox into the log. Subscribers do this automatically."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_format(parser)

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        moved = replaced = quarantined = 0
        with progress_bar("sequence", None, options) as bar:
            while True:
                done = sequencing.sequence(using)
                moved += done.moved - done.quarantined
                quarantined += done.quarantined
                replaced += done.replaced
                bar.update(done.moved)
                if done.busy or not done.more:
                    break
        if options["format"] == "json":
            counts = {"moved": moved, "replaced": replaced, "quarantined": quarantined}
            self.write_json({"database": using, **counts, "busy": done.busy})
            return
        if done.busy:
            self.stdout.write("Another process is moving messages.")
        self.stdout.write(f"Moved {counted(moved, 'message')}.")
        if replaced:
            self.stdout.write(f"{counted(replaced, 'debounced message')} replaced by later ones.")
        if quarantined:
            verb = "was" if quarantined == 1 else "were"
            text = f"{counted(quarantined, 'message')} {verb} refused by the log: see “manage.py queuequarantine”."
            self.stdout.write(self.style.ERROR(text))
