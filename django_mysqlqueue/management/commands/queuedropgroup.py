"""``manage.py queuedropgroup``: forgets a consumer group."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.management.operations import COUNTED, OperationCommand, Plan, add_group, counted, group_of, who
from django_mysqlqueue.operations import dropping, seeking
from django_mysqlqueue.service import heartbeats, retention
from django_mysqlqueue.sql.session import Session


class Command(OperationCommand):
    help = (
        "Delete a consumer group on a topic and all its state: GC no longer keeps messages for it. "
        "If the command is interrupted, the group stays paused: run it again."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_group(parser)

    def plan(self, using: str, options: dict[str, Any]) -> Plan:
        ref = group_of(using, options).ref
        session = Session(using)
        preview = seeking.preview(using, ref, seeking.place_of(using, "latest"))
        kept = retention.held_back_by(session, ref, most=COUNTED)
        live = heartbeats.live(session, [ref], int(get_settings().lease_duration * 1000))[ref]
        summary = [
            f"The group {ref.group!r} of {ref.topic!r} has {counted(preview.skipped, 'unsettled message')}"
            + ("." if preview.exact else f", or more: counting stopped after {seeking.READ:,} messages of the log."),
            f"GC keeps {counted(kept, 'message')} for it alone: when they are old enough, it may delete them.",
        ]
        warnings = (
            [f"Live subscribers: {', '.join(live)}. They stop claiming; a restart registers the group again."]
            if live
            else []
        )

        def drop(progress: object) -> int:
            return int(dropping.drop(using, ref, by=who()))

        facts = {
            "group": ref.group,
            "topic": ref.topic,
            "unsettled": preview.skipped,
            "kept_for_it_alone": kept,
            "live_subscribers": list(live),
        }
        return Plan("drop", summary, 1, drop, facts, warnings, nothing="the group is gone already.")

    def ask(self, plan: Plan, options: dict[str, Any]) -> None:
        try:
            answer = input("Type the group's name to drop it: ")
        except EOFError:
            raise CommandError("Nobody is there to ask: pass --noinput to drop it.") from None
        if answer != options["group"]:
            raise CommandError("Not dropped.")

    def done(self, plan: Plan, changed: int) -> str:
        return f"dropped the group {plan.facts['group']!r} of {plan.facts['topic']!r}."
