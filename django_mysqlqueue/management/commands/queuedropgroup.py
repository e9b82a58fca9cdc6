"""``manage.py queuedropgroup``: forgets a consumer group."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.management.base import QueueCommand
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.service import groups, heartbeats, stats
from django_mysqlqueue.service.groups import GroupRef
from django_mysqlqueue.service.transactions import Session


class Command(QueueCommand):
    help = "Forgets a consumer group of a topic with all its state: GC no longer keeps messages for it."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("group")
        parser.add_argument("topic")
        parser.add_argument("--noinput", "--no-input", action="store_false", dest="interactive", help="do not ask")

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        ref = GroupRef(options["group"], options["topic"])
        session = Session(using)
        if groups.find(using, ref) is None:
            known = ", ".join(
                f"{group} of {topic}"
                for group, topic in ConsumerGroup.objects.using(using).values_list("consumer_group", "topic")
            )
            raise CommandError(f"There is no group {ref.group!r} of {ref.topic!r}. Registered: {known or 'none'}.")
        lag, _ = stats.unsettled(session, ref)
        lease_ms = int(get_settings().lease_duration * 1000)
        live = heartbeats.live(session, [ref], lease_ms)[ref]
        self.stdout.write(
            f"The group {ref.group!r} of {ref.topic!r} has {lag} unsettled message{'' if lag == 1 else 's'}."
        )
        if live:
            self.stdout.write(
                self.style.WARNING(
                    f"Live subscribers: {', '.join(live)}. They stop claiming; a restart registers anew."
                )
            )
        if options["interactive"]:
            try:
                answer = input("Type the group's name to drop it: ")
            except EOFError:
                raise CommandError("Nobody is there to ask: pass --noinput to drop it.") from None
            if answer != ref.group:
                raise CommandError("Not dropped.")
        groups.drop(using, ref)
        self.stdout.write(f"Dropped the group {ref.group!r} of {ref.topic!r}.")
