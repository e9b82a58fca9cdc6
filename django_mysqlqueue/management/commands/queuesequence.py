"""``manage.py queuesequence``: moves what is due from the outbox into the log."""

from __future__ import annotations

from typing import Any

from django_mysqlqueue.management.base import QueueCommand
from django_mysqlqueue.service import sequencing


class Command(QueueCommand):
    help = "Moves what is due from the outbox into the log. Subscribers do so by themselves."

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        moved = 0
        while True:
            done = sequencing.sequence(using)
            moved += done.moved
            if done.busy:
                self.stdout.write("Somebody else is sequencing.")
            if done.busy or not done.more:
                break
        self.stdout.write(f"Moved {moved} messages.")
