"""The pages of errors and dead letters, and of a single dead letter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin import contents, copying
from django_mysqlqueue.admin.context import BadQuery
from django_mysqlqueue.admin.csv_export import ROWS_AT_ONCE, Export
from django_mysqlqueue.admin.error_table import STATES, KindFilter, error_table
from django_mysqlqueue.admin.formatting import last_line, moment
from django_mysqlqueue.admin.pages.base import PAGE_ROWS, Page
from django_mysqlqueue.admin.permissions import may_search_errors, search_refused
from django_mysqlqueue.inspection import DeadLetterSummary, RecordedDelivery, dead_letters, error_kinds, message_history
from django_mysqlqueue.inspection.dead_letters import DeadLetter, DeadLetterMatches
from django_mysqlqueue.models import DeliveryEvent
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.topics import dlq_topic, first_topic
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.dead_letters import DeadLetterFilter
from django_mysqlqueue.service.groups import registered_refs
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, pieces

RELATED_LOOKED_UP = 20
"""Maximum number of related messages to look up."""

Outcome = DeliveryEvent.Outcome
GOOD = {Outcome.ACKED, Outcome.REDRIVEN, Outcome.REPLACED}
BAD = {Outcome.FAILED, Outcome.LOST, Outcome.DEAD_LETTERED, Outcome.DISCARDED}


class DeadLettersPage(Page):
    """The errors, grouped by kind, and the list of a DLQ topic's dead letters."""

    name = "deadletters"
    title = gettext_lazy("Dead letters")
    filters = ("topic", "group", "key", "task", "class", "state", "error", "since", "until", "kind")
    position = "before"
    shows_several_topics = True
    exports = True

    def context(self) -> dict[str, Any]:
        session = self.session
        refs = [ref for ref in registered_refs(self.using) if self.may_view(ref.topic)]
        topics = [one for one in dead_letters.dlq_topics(session, bounds=self.bounds) if self.may_view(one[0])]
        topic, group = self.text("topic"), self.text("group")
        given = None if topic is None else first_topic(topic)
        wanted = KindFilter(self.choice("state", STATES), self.text("class"), self.text("kind"))
        listing = error_kinds.find_errors(
            session,
            topic=given,
            group=group,
            topics=self.topics_to_view(),
            key=self._key(),
            by_key=wanted.text is not None,
            shown=self.errors.line,
            bounds=self.bounds,
        )
        kinds = error_table(listing, wanted, self.text("task"))
        dlq = self._dlq(topics, refs) if wanted.error_class is None and wanted.state in (None, "dead_letters") else ""
        numbers = {first_topic(name): number for name, number in topics}
        names = {first_topic(ref.topic) for ref in refs} | numbers.keys() | ({given} if given else set())
        return {
            "kinds": kinds,
            "operable_kinds": self.operable(row.kind.ref.topic for row in kinds.rows),
            "errors_read": f"{self.bounds.errors:,}",
            "groups_read": f"{self.bounds.groups:,}",
            "states": STATES.items(),
            "given_topic": given or "",
            "topics": [(name, f"{name} ({numbers[name]})" if name in numbers else name) for name in sorted(names)],
            "groups": sorted(
                {one.group for one in refs} | {row.kind.ref.group for row in kinds.rows} | ({group} if group else set())
            ),
            **(self._letters(dlq, refs) if dlq else {"topic": ""}),
        }

    def _dlq(self, topics: Sequence[tuple[str, Count]], refs: Sequence[GroupRef]) -> str:
        """Return the DLQ topic to list: that of the query string, else the one with most dead letters of the group."""
        if (topic := self.text("topic")) is not None:
            return dlq_topic(topic)
        of_group = {dlq_topic(ref.topic) for ref in refs if ref.group == self.text("group")}
        found = [one for one in topics if one[0] in of_group] or topics
        return max(found, key=lambda one: one[1].value)[0] if found else ""

    def _letters(self, topic: str, refs: Sequence[GroupRef]) -> dict[str, Any]:
        """Return the dead letters of a DLQ topic."""
        session = self.session
        chosen = self._selection(topic)
        before = self.number("before")
        found = self._look(chosen)
        rest = [offset for offset in found.offsets if before is None or offset < before]
        return {
            "topic": topic,
            "narrowed": any(self.text(name) for name in self.filters if name != "topic"),
            "is_of_jobs": job_queues.is_queue(first_topic(topic)),
            "may_search_errors": may_search_errors(self.request, topic),
            "since": chosen.since,
            "until": chosen.until,
            "found": found,
            "upto": found.offsets[0] if found.offsets else None,
            "looked": f"{self.bounds.dead_letters:,}",
            "rows": [(one, self._error(one)) for one in dead_letters.at(session, rest[:PAGE_ROWS])],
            "next_place": rest[PAGE_ROWS - 1] if len(rest) > PAGE_ROWS else None,
            "readers": [ref for ref in refs if ref.topic == topic],
        }

    def _key(self) -> str | None:
        """Return the key that is searched for: the key of a job is its task."""
        return self.text("key") or self.text("task")

    def _selection(self, topic: str) -> DeadLetterFilter:
        self.about = topic
        error = self.text("error")
        if error is not None and not may_search_errors(self.request, topic):
            # Without the filter, the page would show, and offer to redrive or discard, more than was asked for.
            raise BadQuery(search_refused(), 403)
        since, until = self.period()
        return DeadLetterFilter(topic, group=self.text("group"), error=error, since=since, until=until, key=self._key())

    def _look(self, wanted: DeadLetterFilter) -> DeadLetterMatches:
        """Return the dead letters of a selection, with the error that the query string names if it names one."""
        found = dead_letters.look(self.session, wanted, bounds=self.bounds)
        kind = self.text("kind")
        if kind is None:
            return found
        return error_kinds.of_kind(self.session, found, kind, shown=self.errors.line, bounds=self.bounds)

    def export(self) -> Export:
        topic = self.text("topic")
        if topic is None:
            raise BadQuery(_("The parameter %(name)s is required.") % {"name": "topic"})
        header = (
            *(_("dead letter"), _("failed at"), _("group"), _("attempts"), _("last line of the error"), _("topic")),
            *(_("offset"), _("message id"), _("partition"), _("bytes"), _("task")),
        )
        return Export("dead-letters", header, self._pages(self._selection(dlq_topic(topic))))

    def _pages(self, wanted: DeadLetterFilter) -> Iterator[list[tuple[Any, ...]]]:
        with self.reading():
            matches = self._look(wanted)
        for offsets in pieces(matches.offsets, ROWS_AT_ONCE):
            with self.reading():
                found = dead_letters.at(self.session, offsets)
            yield [self._cells(one) for one in found]
        if not matches.whole:
            yield [(_("Not complete: not all dead letters of the topic were searched."),)]

    def _cells(self, one: DeadLetterSummary) -> tuple[Any, ...]:
        origin = (one.ref.topic, one.original_offset, one.original_id, one.key, one.size, one.task)
        return one.offset, moment(one.failed_at), one.ref.group, one.attempts, self._error(one), *origin

    def _error(self, one: DeadLetterSummary) -> str:
        return self.errors.line(last_line(one.error), one.ref.topic, dead_letters.is_cut(one.error))


@dataclass(frozen=True, slots=True)
class EventRow:
    """A record about the dead letter or its original message."""

    delivery: RecordedDelivery
    outcome: str
    css: str
    error: str
    link: str
    """URL of the resulting message, or empty if that is not in the log."""


class DeadLetterPage(Page):
    """The page of a dead letter."""

    name = "deadletter"
    title = gettext_lazy("Dead letter")
    in_menu = False
    live = False

    def heading(self) -> str:
        return _("Dead letter %(offset)s") % {"offset": self.text("offset") or ""}

    def context(self) -> dict[str, Any]:
        offset = self.number("offset", minimum=1)
        if offset is None:
            raise BadQuery(_("The parameter %(name)s is required.") % {"name": "offset"})
        session = self.session
        found = dead_letters.one(session, offset)
        offsets = [offset] if found is None else [offset, found.listed.original_offset]
        events = [event for one in offsets for event in message_history.recorded(session, one, bounds=self.bounds)[0]]
        # Operations on the dead letter, and the group's deliveries of the original message.
        operators = (Outcome.REDRIVEN, Outcome.REPLACED, Outcome.DISCARDED)
        events = [
            event
            for event in sorted(events, key=lambda event: event.event_id)
            if (event.offset == offset and event.outcome in operators)
            or (found is not None and event.offset != offset and event.ref == found.listed.ref)
        ]
        facts = {} if found is None else self._facts(found)
        return {"offset": offset, "dead_letter": found, "events": self._events(session, events), **facts}

    def _facts(self, dead_letter: DeadLetter) -> dict[str, Any]:
        listed = dead_letter.listed
        topic = listed.ref.topic
        found: dict[str, Any] = {
            "listed": listed,
            "is_job": job_queues.is_queue(topic),
            "error": self.errors.whole(dead_letter.error, topic),
            "readers": [ref for ref in registered_refs(self.using) if ref.topic == dead_letter.topic],
            "copy_command": copying.command(
                "queueredrive", dead_letter.topic, "--offset", str(listed.offset), using=self.using
            ),
        }
        self.about = topic
        if self.may_see_payloads:
            found["payload"] = contents.payload(dead_letter.payload, listed.size, topic=topic)
            found["metadata"] = contents.metadata(dead_letter.metadata, topic=topic)
            found["cannot_edit"] = contents.editable(dead_letter).refusal
        return found

    def _events(self, session: Session, events: Sequence[RecordedDelivery]) -> list[EventRow]:
        found: list[EventRow] = []
        became = message_history.made_of(session, [event for event in events if event.related_id][:RELATED_LOOKED_UP])
        for event in events:
            link = ""
            if event.event_id in became:
                page = "deadletter" if event.outcome == Outcome.DEAD_LETTERED else "message"
                link = self.dashboard.url(page, offset=became[event.event_id])
            # Redact the whole line before cutting it: REDACT might not recognize a part of what it hides.
            topic = first_topic(event.ref.topic)
            error = self.errors.whole(last_line(event.error), topic)[-dead_letters.LINE :]
            css = "mq-life-good" if event.outcome in GOOD else "mq-life-bad" if event.outcome in BAD else ""
            outcome = str(dict(Outcome.choices).get(event.outcome, event.outcome))
            found.append(EventRow(event, outcome, css, error, link))
        return found
