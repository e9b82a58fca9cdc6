"""``manage.py queuerelease``: takes leases away, or forgets a dead subscriber."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.management.operations import (
    OperationCommand,
    Plan,
    check_known,
    counted,
    did_you_mean,
    who,
)
from django_mysqlqueue.management.operations import group_of as registered_group
from django_mysqlqueue.service import heartbeats, leasing
from django_mysqlqueue.sql.session import Session


class Command(OperationCommand):
    help = "Releases leases of partitions (GROUP TOPIC KEY…), or forgets a dead subscriber (--subscriber)."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("group", nargs="?")
        parser.add_argument("topic", nargs="?")
        parser.add_argument("key", nargs="*", help="partition keys")
        parser.add_argument("--subscriber", metavar="NAME", help="forget this dead subscriber with all its leases")

    def plan(self, using: str, options: dict[str, Any]) -> Plan:
        name = options["subscriber"]
        if (name is None) == (options["group"] is None):
            raise CommandError("Say what: GROUP TOPIC KEY…, or --subscriber NAME.")
        if name is not None:
            known = heartbeats.names(Session(using))
            if name not in known:
                raise CommandError(f"There is no subscriber {name!r}. Subscribers: {did_you_mean(name, known)}")
            lease_ms = int(get_settings().lease_duration * 1000)

            def forget(progress: object) -> int:
                return heartbeats.remove(using, name, by=who(), lease_ms=lease_ms)

            return Plan("forget", [f"The subscriber {name!r} will be forgotten; its leases are free."], 1, forget)
        keys = options["key"]
        if not keys:
            raise CommandError("Say which partitions: GROUP TOPIC KEY…")
        group = registered_group(using, options)
        owners = leasing.owners(Session(using), group.ref, keys)
        check_known(f"The group {group.ref} has no lease of these partitions: {{}}.", keys, owners)
        held = sum(bool(owner) for owner in owners.values())

        def release(progress: object) -> int:
            return leasing.revoke(using, group.ref, keys, by=who())

        summary = [f"{counted(held, 'lease')} of the group {group.ref} will be taken from whoever holds them."]
        return Plan("release", summary, held, release, nothing="no subscriber holds these leases.")

    def done(self, plan: Plan, changed: int) -> str:
        return f"{changed} released." if plan.action == "release" else f"{changed} heartbeats deleted."
