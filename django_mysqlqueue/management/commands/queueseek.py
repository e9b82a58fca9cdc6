"""``manage.py queueseek``: a group goes on from another place of the log."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue.management.operations import (
    COUNTED,
    OperationCommand,
    Plan,
    Progress,
    add_group,
    counted,
    group_of,
    moment,
    who,
)
from django_mysqlqueue.operations import seeking


class Command(OperationCommand):
    help = (
        "Move a consumer group's position in a topic: back to replay messages, forward to skip them. Subscribers can "
        "keep running. The command shows how many messages it would replay and skip, then asks for confirmation. "
        "Deliveries in flight are revoked: their handlers run to the end, but their acks are ignored and atomic "
        "handlers roll back. An outcome that commits before its delivery is revoked is kept: the handler's writes and "
        "the dead letter stay, even if the seek replays the message. "
        "If the command is interrupted, the group stays paused: run it again."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_group(parser)
        parser.add_argument(
            "place", nargs="?", help="earliest, latest, or the offset to continue from; required unless --time is given"
        )
        parser.add_argument(
            "--time", metavar="WHEN", help="continue from the first message logged at or after WHEN (ISO 8601)"
        )

    def plan(self, using: str, options: dict[str, Any]) -> Plan:
        group = group_of(using, options)
        target, when = options["place"], options["time"]
        if (target is None) == (when is None):
            raise CommandError("Say where to: earliest, latest, an offset, or --time.")
        if when is not None:
            place, said = seeking.place_of(using, time_ms=moment(when)), f"time {when}"
        else:
            place = seeking.place_of(using, int(target) if target.isdecimal() else target)
            said = target
        preview = seeking.preview(using, group.ref, place)
        summary = [
            f"The group {group.ref} will go on at offset {place.offset + 1} ({said}).",
            f"  handled again:  {counted(preview.replayed, 'message')}",
            f"  skipped:        {counted(preview.skipped, 'message')}",
            "Deliveries in flight are revoked. A message that is dead-lettered before that stays in the DLQ.",
        ]
        warnings = [f"{counted(preview.skipped, 'message')} will never be handled."] if preview.skipped else []
        if not preview.exact:
            warnings.append(f"Counting stopped after {seeking.READ:,} messages of the log: there may be more of both.")

        def seek(progress: Progress) -> int:
            return seeking.seek(using, group.ref, place, by=who(), detail=said, progress=progress)

        facts = {
            "offset": place.offset + 1,
            "replayed": preview.replayed,
            "skipped": preview.skipped,
            "counted_up_to": COUNTED,
            "exact": preview.exact,
        }
        total = max(1, preview.replayed + preview.skipped)
        # What it returns are deliveries that it has revoked: a seek of an idle group revokes none.
        return Plan("seek", summary, total, seek, facts, warnings, nothing=None)

    def done(self, plan: Plan, changed: int) -> str:
        return f"the next message is the first from offset {plan.facts['offset']} on."
