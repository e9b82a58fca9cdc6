"""``manage.py queuegroupmode``: changes a group's mode while nobody works for it."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.exceptions import OperationRefused, SubscriberError
from django_mysqlqueue.management.base import QueueCommand
from django_mysqlqueue.management.operations import add_group, group_of
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.service import groups


class Command(QueueCommand):
    help = "Changes a consumer group's mode. Its subscribers must be stopped."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_group(parser)
        parser.add_argument("mode", choices=ConsumerGroup.Mode.values)

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        group = group_of(using, options)
        ref = group.ref
        if group.mode == options["mode"]:
            raise CommandError(f"Nothing was changed: the group {ref} is {group.mode} already.")
        lease_ms = int(get_settings().lease_duration * 1000)
        try:
            groups.set_mode(using, ref, options["mode"], lease_ms=lease_ms)
        except (SubscriberError, OperationRefused) as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"The group {ref.group!r} of {ref.topic!r} is {options['mode']} now.")
