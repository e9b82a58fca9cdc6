"""One message and its whole life."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue import naming
from django_mysqlqueue.admin.formatting import (
    SHOWN_CHARACTERS,
    last_line,
    metadata_text,
    moment,
    payload_text,
    redacted,
)
from django_mysqlqueue.admin.pages.base import BadQuery, Page
from django_mysqlqueue.admin.permissions import may_see_payloads
from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.humanize import duration
from django_mysqlqueue.inspection import (
    GroupState,
    MessageContent,
    MessageHistory,
    RecordedDelivery,
    log_entries,
    message_history,
)
from django_mysqlqueue.inspection.subscribers import read_subscribers
from django_mysqlqueue.models import DeliveryEvent
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session

Outcome = DeliveryEvent.Outcome
BY_OPERATORS = (Outcome.REDRIVEN, Outcome.REPLACED, Outcome.DISCARDED)
ENDS = {
    Outcome.ACKED.value: (gettext_lazy("acked"), "mq-ok"),
    Outcome.DEAD_LETTERED.value: (gettext_lazy("dead-lettered"), "mq-bad"),
    Outcome.DELETED.value: (gettext_lazy("deleted"), "mq-bad"),
}
"""How a delivery is settled: the word for it and its class."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that happened, or how it stands now."""

    text: str
    at: str = ""
    css: str = ""
    error: str = ""
    traceback: str = ""
    anchor: str = ""
    """Of the traceback, so that it stays open when the page refreshes itself."""
    link: str = ""
    link_text: str = ""


@dataclass(frozen=True, slots=True)
class Life:
    """What became of the message for one group."""

    ref: GroupRef
    tag: str
    css: str
    steps: list[Step]
    note: str = ""
    """What cannot be known."""
    may_retry: bool = False
    """It waits for another attempt: an operator may make it due."""
    may_give_up: bool = False
    """An operator may dead-letter it: nobody who is alive holds it."""


class MessagePage(Page):
    name = "message"
    title = gettext_lazy("Message")
    template = "message.html"
    in_menu = False

    def heading(self) -> str:
        offset = self.text("offset")
        return str(self.title) if offset is None else _("Message %(offset)s") % {"offset": offset[:20]}

    def context(self) -> dict[str, Any]:
        offset = self.number("offset", minimum=1)
        if offset is None:
            return {"offset": "", "named": False}
        session = Session(self.using)
        history = message_history.read_history(session, offset, most=SHOWN_CHARACTERS, bounds=self.bounds)
        if history is None:
            raise BadQuery(
                _(
                    "There is no message at offset %(offset)s, and nothing is recorded of one: it was cleaned up, "
                    "discarded or never there. What is not in the log yet is under Scheduled."
                )
                % {"offset": offset}
            )
        found, events = history.content, history.deliveries
        self._topic = found.entry.topic if found else events[0].ref.topic
        self._made = message_history.made_of(session, events)
        self._now = session.now()
        return {
            "offset": offset,
            "named_offset": str(offset),  # a number gets separators, which an input takes for no number
            "named": True,
            "found": found,
            "topic": self._topic,
            "key": found.entry.key if found else events[0].key,
            "links": self._links(session, found) if found else [],
            "lives": list(self._lives(session, offset, history)),
            "operations": [self._operation(event) for event in events if event.outcome in BY_OPERATORS],
            "more_events": history.more_deliveries,
            "shown_events": self.bounds.recorded,
            "first_steps": self._first_steps(found),
            **(self._said(found) if found else {}),
        }

    # -- what it says ---------------------------------------------------------

    def _said(self, found: MessageContent) -> dict[str, Any]:
        entry = found.entry
        said: dict[str, Any] = {
            "size": f"{entry.size:,}",
            "failed_at": moment(found.failed_at),
            "age": duration((self._now - entry.published_at) / 1000),
            "error": self._redacted(found.last_error, "error"),
        }
        if may_see_payloads(self.request):
            said["payload"] = self._redacted(payload_text(found.payload, entry.size), "payload")
            said["metadata"] = self._redacted(metadata_text(found.metadata), "metadata")
        return said

    def _redacted(self, text: str, kind: str) -> str:
        return redacted(text, topic=self._topic, kind=kind) if text else ""

    def _links(self, session: Session, found: MessageContent) -> list[Step]:
        """Which other messages it comes from."""
        entry = found.entry
        links = []
        origin = {"topic": entry.original_topic, "offset": entry.original_offset, "group": entry.failed_group}
        original = self._to("message", offset=entry.original_offset)
        if entry.failed_group:
            text = _("It is a dead letter: %(group)s gave up on message %(offset)s of %(topic)s.") % origin
            links.append(Step(text, link=original, link_text=_("Look at the original")))
            letter = self._letter(entry.offset)
            links.append(Step(_("It can be redriven or discarded."), link=letter, link_text=_("Dead letters")))
        elif entry.original_id:
            text = _("It was redriven: the original is message %(offset)s of %(topic)s.") % origin
            links.append(Step(text, link=original, link_text=_("Look at the original")))
        if found.replaces:
            text = _("An operator sent it in the place of the message %(id)s.") % {"id": found.replaces}
            topic = naming.first_topic(entry.topic)
            places = log_entries.at_ids(session, [(topic, entry.key, found.replaces)])
            links += [
                Step(text, link=self._to("message", offset=place), link_text=_("Look at the original"))
                for place in places.values()
            ]
            if not places:
                links.append(Step(f"{text} {_('That one is not in the log any more.')}"))
        if entry.target_group:
            links.append(Step(_("It is for the group %(group)s alone.") % {"group": entry.target_group}))
        return links

    def _to(self, name: str, **parameters: object) -> str:
        return self.dashboard.url(name, **parameters)

    def _letter(self, offset: int) -> str:
        return self._to("deadletter", offset=offset)

    # -- its life -------------------------------------------------------------

    def _first_steps(self, found: MessageContent | None) -> list[Step]:
        if found is None:
            return [Step(_("The message itself is not in the log any more: this is what was recorded of it."))]
        return [
            Step(_("Written by its publisher."), moment(found.entry.created_at)),
            Step(_("Took its place in the log."), moment(found.entry.published_at)),
        ]

    def _lives(self, session: Session, offset: int, history: MessageHistory) -> Iterable[Life]:
        found = history.content
        of_group: dict[GroupRef, list[RecordedDelivery]] = {}
        for event in history.deliveries:
            if event.outcome not in BY_OPERATORS:
                of_group.setdefault(event.ref, []).append(event)
        live = self._live(session) if history.groups else {}
        for state in history.groups:
            mine = of_group.pop(state.ref, [])
            yield self._life(session, offset, found, state, mine, live.get(state.ref, set()))
        for ref, mine in of_group.items():
            steps = [step for event in mine for step in self._steps(session, offset, found, event)]
            ended = _end_of(mine)
            tag, css = (gettext_lazy("no end on record"), "") if ended is None else ENDS[ended.outcome]
            yield Life(ref, str(tag), css, steps)

    def _live(self, session: Session) -> dict[GroupRef, set[str]]:
        subscribers = read_subscribers(session, lease_ms=self.lease_ms)
        return {ref: {row.name for row in rows if row.live} for ref, rows in subscribers.items()}

    def _life(
        self,
        session: Session,
        offset: int,
        found: MessageContent | None,
        state: GroupState,
        events: list[RecordedDelivery],
        live: set[str],
    ) -> Life:
        steps = [step for event in events for step in self._steps(session, offset, found, event)]
        ended = _end_of(events)
        tag, css, now = self._standing(state, ended, live)
        if now and events and events[-1].outcome == Outcome.FAILED:
            now = replace(now, error="", traceback="")  # it has just been said
        if now:
            steps.append(now)
        if state.standing in ("in_flight", "waits", "unclaimed"):
            if state.unfinished:
                text = (
                    _("A drop of the group has not finished. If it was interrupted, run it again.")
                    if state.unfinished == "drop"
                    else _("A seek of the group has not finished. If it was interrupted, run it again.")
                )
                steps.append(Step(text, css="mq-life-bad"))
            elif state.paused:
                steps.append(Step(_("The group is paused: nothing is claimed until it is resumed.")))
        may_retry = False
        if state.standing == "waits" and state.until > self._now and found is not None:
            may_retry = True
        held = state.standing == "in_flight" and state.held_by in live
        may_give_up = state.standing in ("waits", "in_flight") and not held and not naming.is_dlq(state.ref.topic)
        return Life(state.ref, tag, css, steps, self._unknown(state, ended), may_retry, may_give_up)

    def _steps(
        self, session: Session, offset: int, found: MessageContent | None, event: RecordedDelivery
    ) -> Iterable[Step]:
        """A recorded delivery: handed out, and how it ended."""
        by = event.by or _("a subscriber")
        values = {"attempt": event.attempt, "by": by, "took": duration(event.handled_ms / 1000)}
        if event.delivered_at:
            text = (
                _("Handed to %(by)s.")
                if event.outcome in (Outcome.LOST, Outcome.DELETED)
                else _("Attempt %(attempt)s: handed to %(by)s.")
            )
            yield Step(text % values, moment(event.delivered_at))
        at, error = moment(event.settled_at), self._redacted(event.error, "error")
        anchor = f"mq-event-{event.event_id}"
        traceback = error if error.strip() != last_line(error) else ""
        match event.outcome:
            case Outcome.ACKED:
                yield Step(_("Acked after %(took)s.") % values, at, "mq-life-good")
            case Outcome.FAILED:
                text = _("Attempt %(attempt)s failed after %(took)s.") % values
                yield Step(text, at, "mq-life-bad", last_line(error), traceback, anchor)
            case Outcome.SNOOZED:
                yield Step(_("Put off by its handler after %(took)s; that counts as no attempt.") % values, at)
            case Outcome.DELETED:
                text = _("Deleted from the log before it was handled; %(by)s settled it without a call.")
                yield Step(text % values, at, "mq-life-bad")
            case Outcome.LOST:
                yield Step(_("%(by)s vanished with it: it comes again.") % values, at, "mq-life-bad")
            case Outcome.DEAD_LETTERED:
                text = _("Given up after attempt %(attempt)s: a dead letter was made of it.")
                if not event.delivered_at:  # not the end of an attempt: an operator's doing
                    text = _("%(by)s dead-lettered it. Attempts that had failed: %(attempt)s.")
                text %= values
                letter = self._made.get(event.event_id)
                link = "" if letter is None else self._letter(letter)
                yield Step(
                    text, at, "mq-life-bad", last_line(error), traceback, anchor, link, _("Look at the dead letter")
                )
                if letter is None:
                    yield from self._after_letter(session, offset, found, event)
            case other:
                yield Step(f"{other}: {by}", at, error=last_line(error), traceback=traceback, anchor=anchor)

    def _after_letter(
        self, session: Session, offset: int, found: MessageContent | None, event: RecordedDelivery
    ) -> Iterable[Step]:
        """Where it went on, when its dead letter has gone."""
        onwards = message_history.successors(session, event.ref, event.key, offset, found, bounds=self.bounds)
        for one in onwards:
            text = _("%(by)s edited and redrove it: it went on as message %(offset)s.")
            if one.outcome == Outcome.REDRIVEN:
                text = _("%(by)s redrove it: it went on as message %(offset)s.")
            values = {"by": one.by or _("Somebody"), "offset": one.offset}
            link = self._to("message", offset=one.offset)
            yield Step(text % values, moment(one.at), link=link, link_text=_("Look at it"))
        if not onwards:
            text = _(
                "The dead letter is not in the log: it is on its way there, or on its way back, or was discarded or "
                "cleaned up."
            )
            yield Step(text)

    def _operation(self, event: RecordedDelivery) -> Step:
        """What an operator did with this dead letter."""
        at, by = moment(event.settled_at), event.by or _("Somebody")
        if event.outcome == Outcome.DISCARDED:
            text = _("%(by)s discarded it: %(reason)s") % {"by": by, "reason": event.error}
            return Step(text, at, "mq-life-bad")
        text = _("%(by)s edited and redrove it to %(group)s.")
        if event.outcome == Outcome.REDRIVEN:
            text = _("%(by)s redrove it to %(group)s.")
        text %= {"by": by, "group": event.ref.group}
        new = self._made.get(event.event_id)
        if new is None:
            return Step(f"{text} {_('The new message is not in the log: not yet, or not any more.')}", at)
        return Step(text, at, link=self._to("message", offset=new), link_text=_("Look at the new message"))

    # -- how it stands now ----------------------------------------------------

    def _standing(
        self, state: GroupState, ended: RecordedDelivery | None, live: set[str]
    ) -> tuple[str, str, Step | None]:
        """A word for it, its class, and a sentence where the records do not say it all."""
        values = {"by": state.held_by, "attempt": state.failed + 1, "since": moment(state.since)}
        if ended is not None and state.standing in ("settled", "skipped"):
            tag, css = ENDS[ended.outcome]
            return str(tag), css, None
        match state.standing:
            case "elsewhere":
                return _("not for this group"), "", Step(_("It is for another group alone."))
            case "skipped":
                text = _("The group goes on behind offset %(offset)s: it was settled before a seek, or is passed over.")
                return _("before its start"), "", Step(text % {"offset": state.start_offset})
            case "passed":
                return _("passed over"), "", Step(_("The group has passed it by without a delivery."))
            case "settled":
                return _("settled"), "mq-ok", Step(_("It is settled: acked, or a dead letter was made of it."))
            case "in_flight":
                text = _("Attempt %(attempt)s: with %(by)s since %(since)s.") % values
                if state.held_by not in live:
                    text += " " + _("It gives no sign of life.") + self._nobody(live)
                if state.until > self._now and state.mode == "shared":
                    left = duration((state.until - self._now) / 1000)
                    text += " " + _("Others may have it in %(time)s.") % {"time": left}
                return _("in flight"), "", Step(text)
            case "waits":
                return _("waits"), "", self._waiting(state, live)
            case _:
                text = _("Not claimed yet; unsettled messages before it in its partition: %(number)s.")
                return _("not claimed yet"), "", Step(text % {"number": state.before} + self._nobody(live))

    def _waiting(self, state: GroupState, live: set[str]) -> Step:
        if state.until > self._now:
            left = {"time": duration((state.until - self._now) / 1000), "at": moment(state.until)}
            text = _("It waits for %(time)s more, until %(at)s.") % left
        else:
            text = _("It is due.")
        text += " " + _("Attempts that failed: %(failed)s.") % {"failed": state.failed}
        error = self._redacted(state.last_error, "error")
        traceback = error if error.strip() != last_line(error) else ""
        return Step(text + self._nobody(live), "", "", last_line(error), traceback, f"mq-last-{state.ref.group}")

    @staticmethod
    def _nobody(live: set[str]) -> str:
        return "" if live else " " + _("No subscriber of the group is alive.")

    @staticmethod
    def _unknown(state: GroupState, ended: RecordedDelivery | None) -> str:
        """What the records cannot say, and why."""
        settings = get_settings()
        level = settings.recorded_of(state.ref.group)
        if level == "none":
            return _(
                "Deliveries of this group are not recorded (RECORD_DELIVERIES): who had it, and how often, is lost."
            )
        if level == "failures":
            text = _(
                "Only failures of this group are recorded (RECORD_DELIVERIES): when and by whom it was acked is lost."
            )
            return text if state.standing == "settled" and ended is None else ""
        if state.standing == "settled" and ended is None:
            text = _("Its end is not on record: it is older than %(age)s, or what was to record it was killed.")
            return text % {"age": duration(settings.history_retention)}
        return ""


def _end_of(events: list[RecordedDelivery]) -> RecordedDelivery | None:
    """The record of how it was settled, the last time."""
    return next((event for event in reversed(events) if event.outcome in ENDS), None)
