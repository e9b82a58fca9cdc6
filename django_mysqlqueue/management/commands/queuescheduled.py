"""``manage.py queuescheduled``: lists scheduled messages, delivers some now, or at another time."""

from __future__ import annotations

import datetime
import json
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils import timezone

from django_mysqlqueue.management.operations import OperationCommand, Plan, counted, moment, who
from django_mysqlqueue.service import rescheduling


class Command(OperationCommand):
    help = "Lists the messages that wait for their time; with ids, delivers those now or moves them to another time."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("id", nargs="*", type=int, help="the outbox ids that the list shows")
        parser.add_argument("--topic", help="list this topic's only")
        parser.add_argument("--limit", type=int, default=50, metavar="N", help="list so many (default: 50)")
        parser.add_argument("--now", action="store_true", help="deliver those with the given ids now")
        parser.add_argument("--at", metavar="WHEN", help="deliver them then (ISO 8601)")

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        if options["id"]:
            super().run_on(using, options)
            return
        if options["now"] or options["at"]:
            raise CommandError("Say which: the ids that the list shows.")
        self._list(using, options)

    def _list(self, using: str, options: dict[str, Any]) -> None:
        if options["limit"] < 1:
            raise CommandError(f"--limit {options['limit']}: must be at least 1.")
        found = rescheduling.scheduled(using, topic=options["topic"], limit=options["limit"])
        if options["format"] == "json":
            rows = [
                {
                    "outbox_id": one.outbox_id,
                    "topic": one.topic,
                    "partition_key": one.key,
                    "id": one.message_id,
                    "deliver_at": one.deliver_at,
                }
                for one in found
            ]
            self.stdout.write(json.dumps({"database": using, "scheduled": rows}))
            return
        if not found:
            self.stdout.write("Nothing is scheduled.")
        for one in found:
            at = timezone.localtime(datetime.datetime.fromtimestamp(one.deliver_at / 1000, datetime.UTC))
            self.stdout.write(f"{one.outbox_id:>12}  {at.isoformat(' ', 'seconds')}  {one.topic}  {one.message_id}")

    def plan(self, using: str, options: dict[str, Any]) -> Plan:
        ids = options["id"]
        if options["now"] == (options["at"] is not None):
            raise CommandError("Say when: --now or --at.")
        if options["now"]:
            summary = [f"{counted(len(ids), 'message')} will be delivered now."]
            return Plan("deliver now", summary, len(ids), lambda _: rescheduling.deliver_now(using, ids, by=who()))
        at = moment(options["at"])
        summary = [f"{counted(len(ids), 'message')} will be delivered at {options['at']}."]
        return Plan("reschedule", summary, len(ids), lambda _: rescheduling.move(using, ids, at, by=who()))

    def done(self, plan: Plan, changed: int) -> str:
        gone = plan.total - changed
        return f"{changed} changed" + (f"; {gone} were not scheduled any more." if gone else ".")
