"""``manage.py queuepause``: a group takes nothing more until it is resumed."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue.management.operations import OperationCommand, Plan, add_group, group_of, who
from django_mysqlqueue.service import groups


class Command(OperationCommand):
    help = (
        "Pauses a consumer group: its subscribers finish what they have claimed, keep their leases, and take no more."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_group(parser)
        parser.add_argument("--reason", default="", help="for the record")

    def plan(self, using: str, options: dict[str, Any]) -> Plan:
        group = group_of(using, options)
        summary = [f"The group {group.ref} will be paused: what it holds is finished, nothing more is claimed."]
        if group.paused:
            summary = [f"The group {group.ref} is paused already."]

        def pause(progress: object) -> int:
            return int(groups.pause(using, group.ref, by=who(), reason=options["reason"]))

        nothing = f"the group {group.ref} is paused already."
        return Plan("pause", summary, int(not group.paused), pause, nothing=nothing)

    def done(self, plan: Plan, changed: int) -> str:
        return "it is paused."
