"""``manage.py queueresume``: a paused group goes on."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.management.operations import OperationCommand, Plan, add_group, group_of, who
from django_mysqlqueue.service import groups


class Command(OperationCommand):
    help = "Lets a paused consumer group go on."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_group(parser)

    def plan(self, using: str, options: dict[str, Any]) -> Plan:
        group = group_of(using, options)
        wait = f"{get_settings().lease_renewal_interval:g} s"
        summary = [f"The group {group.ref} will go on; its subscribers notice within {wait}."]
        if not group.paused:
            summary = [f"The group {group.ref} is not paused."]

        def resume(progress: object) -> int:
            return int(groups.resume(using, group.ref, by=who()))

        nothing = f"the group {group.ref} is not paused."
        return Plan("resume", summary, int(group.paused), resume, nothing=nothing)

    def done(self, plan: Plan, changed: int) -> str:
        return "it goes on."
