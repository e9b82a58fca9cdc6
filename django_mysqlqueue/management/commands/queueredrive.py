"""``manage.py queueredrive``: dead letters go back to the groups that failed them."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue import naming
from django_mysqlqueue.inspection.dead_letters import count_by_group
from django_mysqlqueue.management.operations import (
    COUNTED,
    OperationCommand,
    Plan,
    Progress,
    check_known,
    counted,
    did_you_mean,
    dlq_of,
    moment,
    who,
)
from django_mysqlqueue.operations import redriving
from django_mysqlqueue.service import dead_letters, groups
from django_mysqlqueue.service.dead_letters import DeadLetterFilter
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session


class LettersCommand(OperationCommand):
    """Takes a selection of dead letters."""

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("topic", help="the topic, or its DLQ topic")
        parser.add_argument("--group", help="only those that this group failed")
        parser.add_argument("--offset", type=int, action="append", help="only this one of the DLQ (may be repeated)")
        parser.add_argument("--error", metavar="TEXT", help="only those whose error has this text in it")
        parser.add_argument("--since", metavar="WHEN", help="only those that failed then (ISO 8601) or later")
        parser.add_argument("--until", metavar="WHEN", help="only those that failed then or earlier")
        parser.add_argument("--limit", type=int, metavar="N", help="at most so many")

    def letters(self, using: str, options: dict[str, Any]) -> DeadLetterFilter:
        """The selection that the arguments name.

        Raises:
            CommandError: they name a topic, a group or a dead letter that is not there.
            OperationRefused: a rate or a limit out of range.
        """
        redriving.check_bounds(rate=options.get("rate"), limit=options["limit"])
        topic = dlq_of(using, options["topic"])
        if options["group"] is not None:
            _check_group(using, topic, options["group"])
        if options["offset"]:
            named = DeadLetterFilter(topic, offsets=tuple(options["offset"]))
            pages = dead_letters.matching_offsets(Session(using), named, size=redriving.BATCH)
            text = f"There is no dead letter of {topic} at these offsets: {{}}."
            check_known(text, options["offset"], {offset for page in pages for offset in page})
        return DeadLetterFilter(
            topic,
            offsets=tuple(options["offset"]) if options["offset"] else None,
            group=options["group"],
            error=options["error"],
            since=None if options["since"] is None else moment(options["since"]),
            until=None if options["until"] is None else moment(options["until"]),
        )

    def total(self, using: str, letters: DeadLetterFilter, options: dict[str, Any]) -> int:
        found = redriving.count(using, letters, most=COUNTED)
        return found if options["limit"] is None else min(found, options["limit"])

    @staticmethod
    def nothing(letters: DeadLetterFilter) -> str:
        """Why nothing was changed."""
        return f"no dead letter of {letters.topic} matches."


def _check_group(using: str, dlq_topic: str, group: str) -> None:
    """A group of the topic, or one that has failed a message of it and is not registered any more."""
    topic = naming.first_topic(dlq_topic)
    if groups.find(using, GroupRef(group, topic)) or redriving.count(
        using, DeadLetterFilter(dlq_topic, group=group), most=1
    ):
        return
    known = {ref.group for ref in groups.registered_refs(using) if ref.topic == topic}
    known |= {ref.group for _, ref in count_by_group(Session(using), 0, [dlq_topic])}
    raise CommandError(
        f"There is no group {group!r} of {topic!r}, and {dlq_topic} has no dead letters of a former one. "
        f"Groups: {did_you_mean(group, sorted(known))}"
    )


class Command(LettersCommand):
    help = "Sends dead letters back to the consumer group that failed them, and to that one alone."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--rate", type=float, metavar="N", help="at most so many a second")

    def plan(self, using: str, options: dict[str, Any]) -> Plan:
        letters = self.letters(using, options)
        total = self.total(using, letters, options)
        summary = [f"{counted(total, 'dead letter')} of {letters.topic} will go back to the group that failed each."]

        def redrive(progress: Progress) -> int:
            return redriving.redrive(
                using, letters, by=who(), rate=options["rate"], limit=options["limit"], progress=progress
            )

        return Plan("redrive", summary, total, redrive, nothing=self.nothing(letters))

    def done(self, plan: Plan, changed: int) -> str:
        return f"{changed} sent back."
