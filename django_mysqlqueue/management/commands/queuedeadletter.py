"""``manage.py queuedeadletter``: give up on messages that a group is retrying."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue import naming
from django_mysqlqueue.management.operations import OperationCommand, Plan, Progress, add_group, counted, group_of, who
from django_mysqlqueue.operations import dead_lettering


class Command(OperationCommand):
    help = (
        "Dead-letter messages that a consumer group is retrying, without their remaining attempts. Subscribers can "
        "keep running. A message that a live subscriber holds is refused. If one message is refused, none is changed."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_group(parser)
        parser.add_argument("offset", nargs="+", type=int, help="offset of a message in the log")
        parser.add_argument(
            "--reason", default="", metavar="TEXT", help="why, for the dead letter and for the record of operations"
        )

    def plan(self, using: str, options: dict[str, Any]) -> Plan:
        ref = group_of(using, options).ref
        found = dead_lettering.find(using, ref, options["offset"])
        dlq = naming.dlq_topic(ref.topic)
        summary = [
            f"{counted(len(found), 'message')} of the group {ref} will be dead-lettered to {dlq}:",
            *(f"  message {one.offset}: {counted(one.failed, 'failed attempt')}" for one in found),
        ]

        def dead_letter(progress: Progress) -> int:
            done = dead_lettering.dead_letter_now(
                using, ref, [one.offset for one in found], by=who(), reason=options["reason"]
            )
            progress(done)
            return done

        return Plan("dead_letter", summary, len(found), dead_letter)

    def done(self, plan: Plan, changed: int) -> str:
        return f"{changed} dead-lettered."
