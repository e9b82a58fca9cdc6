"""The page of a message, with its history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin import copying
from django_mysqlqueue.admin.context import BadQuery
from django_mysqlqueue.admin.formatting import SHOWN_CHARACTERS, metadata_text, moment, payload_text, redacted
from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.admin.pages.reasons import RESTS, reason_step
from django_mysqlqueue.admin.pages.steps import Step, error_parts, job_steps, recurring_steps
from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.inspection import (
    GroupState,
    MessageContent,
    MessageHistory,
    RecordedDelivery,
    log_entries,
    message_history,
    reasons,
)
from django_mysqlqueue.inspection.reasons import WaitReason
from django_mysqlqueue.inspection.subscribers import SubscriberStatus, read_busy, read_subscribers
from django_mysqlqueue.models import DeliveryEvent
from django_mysqlqueue.names.keys import lane_of
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.topics import first_topic, is_dlq
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.subscriptions.effective import known_handlers
from django_mysqlqueue.subscriptions.handler import Handler
from django_mysqlqueue.text.humanize import duration

Outcome = DeliveryEvent.Outcome
BY_OPERATORS = (Outcome.REDRIVEN, Outcome.REPLACED, Outcome.DISCARDED)
ENDS = {
    Outcome.ACKED.value: (gettext_lazy("acked"), "mq-ok"),
    Outcome.DEAD_LETTERED.value: (gettext_lazy("dead-lettered"), "mq-bad"),
    Outcome.DELETED.value: (gettext_lazy("deleted"), "mq-bad"),
    Outcome.EXPIRED.value: (gettext_lazy("expired"), "mq-bad"),
    Outcome.SUPERSEDED.value: (gettext_lazy("superseded"), "mq-ok"),
}
"""Outcomes that settle a message for a group, each with its label and CSS class."""
WITHOUT_CALL = (Outcome.DELETED, Outcome.EXPIRED, Outcome.SUPERSEDED)
TOLD = {
    Outcome.ACKED.value: (gettext_lazy("Acked after %(took)s."), "mq-life-good"),
    Outcome.SNOOZED.value: (
        gettext_lazy("Snoozed by its handler after %(took)s. This does not count as an attempt."),
        "",
    ),
    Outcome.DELETED.value: (
        gettext_lazy("Deleted from the log before it was handled; %(by)s settled it without calling the handler."),
        "mq-life-bad",
    ),
    Outcome.EXPIRED.value: (
        gettext_lazy("It had expired: %(by)s settled it without calling the handler."),
        "mq-life-bad",
    ),
    Outcome.SUPERSEDED.value: (
        gettext_lazy("A later message with the same coalesce key superseded it; %(by)s did not call the handler."),
        "",
    ),
    Outcome.LOST.value: (
        gettext_lazy("%(by)s was lost while it held the message. The message is redelivered."),
        "mq-life-bad",
    ),
}
"""Outcomes whose steps have no more than a text, each with its CSS class."""
APPLIED_ONCE = gettext_lazy(
    "The group's filter does not match the message, but filters are applied only once, when a message is first claimed."
)
UNMATCHED = {
    "unclaimed": gettext_lazy(
        "The group's filter does not match the message. It will be passed without calling the handler."
    ),
    "in_flight": APPLIED_ONCE,
    "waits": APPLIED_ONCE,
    "settled": gettext_lazy(
        "The group's filter does not match the message. It was delivered before the filter was changed."
    ),
}
"""By state, what it means that the group's filter does not match a message that it has got, or has not claimed."""


@dataclass(frozen=True, slots=True)
class Life:
    """The message's history for one group."""

    ref: GroupRef
    tag: str
    css: str
    steps: list[Step]
    note: str = ""
    """Facts that are not recorded."""
    may_retry: bool = False
    """True if it waits for another attempt and an operator may retry it now."""
    may_give_up: bool = False
    """True if an operator may dead-letter it, because no live subscriber holds it."""


class MessagePage(Page):
    """The page of a message."""

    name = "message"
    title = gettext_lazy("Message")
    in_menu = False

    def heading(self) -> str:
        offset = self.text("offset")
        return str(self.title) if offset is None else _("Message %(offset)s") % {"offset": offset[:20]}

    def context(self) -> dict[str, Any]:
        offset = self.number("offset", minimum=1)
        if offset is None:
            return {"offset": "", "named": False}
        self._offset = offset
        session = self.session
        history = message_history.read_history(session, offset, most=SHOWN_CHARACTERS, bounds=self.bounds)
        if history is None:
            text = _(
                "There is no message at offset %(offset)s and no record of one: it was garbage-collected or "
                "discarded, or never existed. For messages that are not due yet, see Scheduled."
            )
            raise BadQuery(text % {"offset": offset}, 404)
        self._found = found = history.content
        events = history.deliveries
        self._topic = self.about = found.entry.topic if found else events[0].ref.topic
        key = found.entry.key if found else events[0].key
        self._made = message_history.made_of(session, events)
        self._latest = 0 if found is None else message_history.latest_with_key(session, found)
        return {
            "offset": offset,
            "named_offset": str(offset),  # templates format numbers with separators, which an input rejects
            "named": True,
            "found": found,
            "topic": self._topic,
            "key": key,
            "priority": lane_of(key).priority,
            "links": self._links(found) if found else [],
            "lives": list(self._lives(history)),
            "operations": [self._operation(event) for event in events if event.outcome in BY_OPERATORS],
            "more_events": history.more_deliveries,
            "shown_events": self.bounds.recorded,
            "first_steps": list(self._first_steps(found)),
            **(self._said(found) if found else {}),
        }

    # -- its content ----------------------------------------------------------

    def _said(self, found: MessageContent) -> dict[str, Any]:
        entry = found.entry
        said: dict[str, Any] = {
            "error": self.errors.whole(found.last_error, self._topic),
        }
        if self.may_see_payloads:
            payload, metadata = payload_text(found.payload, entry.size), metadata_text(found.metadata)
            said["payload"] = redacted(payload, topic=self._topic, kind="payload")
            said["metadata"] = redacted(metadata, topic=self._topic, kind="metadata")
            if entry.size <= SHOWN_CHARACTERS:
                shown = {"payload": (payload, said["payload"]), "metadata": (metadata, said["metadata"])}
                shown["last_error"] = (found.last_error, said["error"])
                said["copy_json"] = copying.message_json(found, shown)
        parts = ("queuetail", entry.topic, "--offset", str(entry.offset), "--limit", "1", "--format", "json")
        said["copy_command"] = copying.command(*parts, using=self.using)
        return said

    def _links(self, found: MessageContent) -> list[Step]:
        """Return links to the messages that it was made from."""
        entry = found.entry
        links = recurring_steps(self.dashboard, entry.original_id or entry.message_id)
        links += job_steps(self.session, self.dashboard, entry)
        origin = {"topic": entry.original_topic, "offset": entry.original_offset, "group": entry.failed_group}
        original = self.dashboard.url("message", offset=entry.original_offset)
        if entry.failed_group:
            text = _("This is a dead letter: %(group)s dead-lettered message %(offset)s of %(topic)s.") % origin
            links.append(Step(text, link=original, link_text=_("Open original")))
            copy = self.dashboard.url("deadletter", offset=entry.offset)
            links.append(Step(_("You can redrive or discard it."), link=copy, link_text=_("Open dead letter")))
        elif entry.original_id:
            text = _("This message was redriven. The original is message %(offset)s of %(topic)s.") % origin
            links.append(Step(text, link=original, link_text=_("Open original")))
        if found.replaces:
            text = _("An operator published this message to replace message %(id)s.") % {"id": found.replaces}
            topic = first_topic(entry.topic)
            places = log_entries.at_ids(self.session, [(topic, entry.key, found.replaces)])
            links += [
                Step(text, link=self.dashboard.url("message", offset=place), link_text=_("Open original"))
                for place in places.values()
            ]
            if not places:
                text = _("An operator published this message to replace message %(id)s, which is no longer in the log.")
                links.append(Step(text % {"id": found.replaces}))
        if entry.target_group:
            links.append(Step(_("Only the group %(group)s receives this message.") % {"group": entry.target_group}))
        return links

    # -- its history ----------------------------------------------------------

    def _first_steps(self, found: MessageContent | None) -> Iterable[Step]:
        """Yield how it came into the log, and what it was published with."""
        if found is None:
            yield Step(_("The message is no longer in the log. These are the records of it."))
            return
        entry = found.entry
        yield Step(_("Published."), moment(entry.created_at))
        yield Step(_("Entered the log."), moment(entry.published_at))
        if found.expires_at is not None:
            text = _("Expired: its handling does not start after this time.")
            if found.expires_at > self.now:
                text = _("Will expire: its handling does not start after this time.")
            yield Step(text, moment(found.expires_at))
        if not found.coalesce_key:
            return
        values = {"key": found.coalesce_key, "offset": self._latest}
        if self._latest > entry.offset:
            text = _(
                "Coalesce key %(key)s: the message at offset %(offset)s supersedes it for groups that have not "
                "started it."
            )
            link = self.dashboard.url("message", offset=self._latest)
            yield Step(text % values, link=link, link_text=_("Open message"))
            return
        link = ""
        if self.may_see_payloads:
            place = {"topic": entry.topic, "key": entry.key, "keyed": 1, "contains": found.coalesce_key}
            link = self.dashboard.url("messages", **place)
        text = _("Coalesce key %(key)s: it is the latest message with this key.") % values
        yield Step(text, link=link, link_text=_("Search messages with it"))

    def _lives(self, history: MessageHistory) -> Iterable[Life]:
        of_group: dict[GroupRef, list[RecordedDelivery]] = {}
        for event in history.deliveries:
            if event.outcome not in BY_OPERATORS:
                of_group.setdefault(event.ref, []).append(event)
        subscribers = read_subscribers(self.session, lease_ms=self.lease_ms) if history.groups else {}
        handlers = known_handlers()
        for state in history.groups:
            live = {row.name: row for row in subscribers.get(state.ref, ()) if row.live}
            yield self._life(state, of_group.pop(state.ref, []), live, handlers.get(state.ref))
        for ref, mine in of_group.items():
            steps = [step for event in mine for step in self._steps(event)]
            ended = _end_of(mine)
            tag, css = (gettext_lazy("outcome not recorded"), "") if ended is None else ENDS[ended.outcome]
            yield Life(ref, str(tag), css, steps)

    def _life(
        self,
        state: GroupState,
        events: list[RecordedDelivery],
        live: Mapping[str, SubscriberStatus],
        handler: Handler | None,
    ) -> Life:
        session, found = self.session, self._found
        steps = [step for event in events for step in self._steps(event)]
        ended = _end_of(events)
        unrecorded = state.standing in ("passed", "settled") and not (state.since or events)
        is_filtered = unrecorded and state.matches is False
        why = None
        if found is not None:
            why = reasons.why(
                session, found, state, live, self.now, latest=self._latest, handler=handler, bounds=self.bounds
            )
        tag, css, now = self._standing(state, ended, live, why)
        if is_filtered:
            tag, css, now = _("filtered"), "", None
        if now and events and events[-1].outcome == Outcome.FAILED:
            now = replace(now, error="", traceback="")  # the event before it has the same error
        if now:
            steps.append(now)
        busy = read_busy(session, state.ref, live.values(), bounds=self.bounds) if why and why.kind == "none" else None
        if step := reason_step(self.dashboard, why, state, self.now, busy):
            steps.append(step)
        if found is not None and state.filter is not None and state.standing != "elsewhere":
            steps.append(self._of_filter(found, state, unrecorded=unrecorded))
        may_retry = state.standing == "waits" and state.until > self.now and found is not None
        held = state.standing == "in_flight" and state.held_by in live
        may_give_up = state.standing in ("waits", "in_flight") and not held and not is_dlq(state.ref.topic)
        # That no delivery is recorded is what is expected then, unless deliveries are not recorded.
        everything = get_settings().recorded_of(state.ref.group) == "all"
        note = "" if is_filtered and everything else self._unknown(state, ended)
        return Life(state.ref, tag, css, steps, note, may_retry, may_give_up)

    def _steps(self, event: RecordedDelivery) -> Iterable[Step]:
        """Yield the claim and the outcome of a recorded delivery."""
        by = event.by or _("a subscriber")
        values = {"attempt": event.attempt, "by": by, "took": duration(event.handled_ms / 1000)}
        if event.delivered_at:
            text = _("Attempt %(attempt)s: claimed by %(by)s.")
            if event.outcome in (*WITHOUT_CALL, Outcome.LOST):
                text = _("Claimed by %(by)s.")
            yield Step(text % values, moment(event.delivered_at))
        at, error = moment(event.settled_at), self.errors.whole(event.error, self._topic)
        if event.outcome in TOLD:
            told, css = TOLD[event.outcome]
            yield Step(str(told) % values, at, css)
            return
        anchor = f"mq-event-{event.event_id}"
        line, traceback = error_parts(error)
        match event.outcome:
            case Outcome.FAILED:
                text = _("Attempt %(attempt)s failed after %(took)s.") % values
                yield Step(text, at, "mq-life-bad", line, traceback, anchor)
            case Outcome.DEAD_LETTERED:
                text = _("Dead-lettered after attempt %(attempt)s.")
                if not event.delivered_at:  # dead-lettered by an operator, not by a failed attempt
                    text = _("Dead-lettered by %(by)s. Failed attempts before: %(attempt)s.")
                text %= values
                copy = self._made.get(event.event_id)
                link = "" if copy is None else self.dashboard.url("deadletter", offset=copy)
                yield Step(text, at, "mq-life-bad", line, traceback, anchor, link, _("Open dead letter"))
                if copy is None:
                    yield from self._after_redrive(event)
            case other:
                yield Step(f"{other}: {by}", at, error=line, traceback=traceback, anchor=anchor)

    def _after_redrive(self, event: RecordedDelivery) -> Iterable[Step]:
        """Yield the messages that replaced it, after its dead letter has left the log."""
        replacements = message_history.successors(
            self.session, event.ref, event.key, self._offset, self._found, bounds=self.bounds
        )
        for one in replacements:
            text = _("%(by)s edited and redrove it as message %(offset)s.")
            if one.outcome == Outcome.REDRIVEN:
                text = _("%(by)s redrove it as message %(offset)s.")
            values = {"by": one.by or _("An operator"), "offset": one.offset}
            link = self.dashboard.url("message", offset=one.offset)
            yield Step(text % values, moment(one.at), link=link, link_text=_("Open message"))
        if not replacements:
            text = _(
                "The dead letter is not in the log: it has not entered the log yet, or was redriven, discarded or "
                "garbage-collected."
            )
            yield Step(text)

    def _operation(self, event: RecordedDelivery) -> Step:
        """Return the step of an operation on this dead letter."""
        at, by = moment(event.settled_at), event.by or _("An operator")
        if event.outcome == Outcome.DISCARDED:
            text = _("%(by)s discarded it: %(reason)s") % {"by": by, "reason": event.error}
            return Step(text, at, "mq-life-bad")
        text = _("%(by)s edited and redrove it for %(group)s.")
        if event.outcome == Outcome.REDRIVEN:
            text = _("%(by)s redrove it for %(group)s.")
        text %= {"by": by, "group": event.ref.group}
        new = self._made.get(event.event_id)
        if new is None:
            return Step(f"{text} {_('The new message is not in the log (not yet, or no longer).')}", at)
        return Step(text, at, link=self.dashboard.url("message", offset=new), link_text=_("Open new message"))

    # -- its current state ----------------------------------------------------

    def _standing(
        self,
        state: GroupState,
        ended: RecordedDelivery | None,
        live: Mapping[str, SubscriberStatus],
        why: WaitReason | None,
    ) -> tuple[str, str, Step | None]:
        """Return the state's label, its CSS class, and a step if the records do not say it all."""
        values = {"by": state.held_by, "attempt": state.failed + 1, "since": moment(state.since)}
        if ended is not None and state.standing in ("settled", "skipped"):
            tag, css = ENDS[ended.outcome]
            return str(tag), css, None
        match state.standing:
            case "elsewhere":
                return _("not for this group"), "", Step(_("Only another group receives this message."))
            case "skipped":
                text = _(
                    "The group starts after offset %(offset)s: the message was settled before a seek, or is skipped."
                )
                return _("before the start"), "", Step(text % {"offset": state.start_offset})
            case "passed":
                return _("skipped"), "", Step(_("The group's position is past the message, but it was not delivered."))
            case "settled":
                text = _("The message is settled: acked or dead-lettered.")
                found = self._found
                if found is not None and found.expires_at is not None and found.expires_at <= self.now:
                    text = _("The message is settled: acked or dead-lettered, or it expired before it was handled.")
                elif found is not None and found.coalesce_key:
                    text = _("The message is settled: acked, dead-lettered, or superseded before it was handled.")
                return _("settled"), "mq-ok", Step(text)
            case "in_flight":
                text = _("Attempt %(attempt)s: in flight at %(by)s since %(since)s.") % values
                if state.held_by not in live:
                    text += " " + _("This subscriber is lost.") + self._nobody(live)
                if state.until > self.now and state.mode == "shared":
                    left = duration((state.until - self.now) / 1000)
                    text += " " + _("Other subscribers can claim it in %(time)s.") % {"time": left}
                return _("in flight"), "", Step(text)
            case "waits":
                return _("waiting"), "", self._waiting(state, live, why)
            case _:
                text = _("Not claimed yet; unsettled messages before it in its partition: %(number)s.")
                return _("not claimed yet"), "", Step(text % {"number": state.before})

    def _waiting(self, state: GroupState, live: Mapping[str, SubscriberStatus], why: WaitReason | None) -> Step:
        text = _("Failed attempts: %(failed)s.") % {"failed": state.failed}
        if state.until <= self.now:
            text = _("The message is due.") + " " + text
        elif why is None or why.kind not in RESTS:
            left = {"time": duration((state.until - self.now) / 1000), "at": moment(state.until)}
            text = _("The next attempt is in %(time)s, at %(at)s.") % left + self._nobody(live) + " " + text
        line, traceback = error_parts(self.errors.whole(state.last_error, self._topic))
        return Step(text, error=line, traceback=traceback, anchor=f"mq-last-{state.ref.group}")

    # -- the filter of the group ----------------------------------------------

    def _of_filter(self, found: MessageContent, state: GroupState, *, unrecorded: bool) -> Step:
        """Return what the group's current filter says about the message."""
        if isinstance(state.filter, str):
            text = _("This release cannot parse the group's filter. Subscribers of this release claim no messages.")
            return Step(text, css="mq-life-bad", error=state.filter)
        assert state.filter is not None  # noqa: S101  # the caller has asked
        if state.matches is None:
            only = _("The message is for this group only: the group's filter does not apply to it.")
            others = _("It has superseded messages with its coalesce key: the group's filter does not apply to it.")
            return Step(only if found.entry.target_group else others, error=_filter_text(state.filter))
        why = self._why(found, state.filter)
        if state.matches:
            text = _("The group's filter matches the message.")
            if unrecorded:
                text += " " + _("It may have been passed because of an earlier filter.")
        elif unrecorded and state.standing == "passed":
            text = _("The group's filter does not match the message. It was passed without calling the handler.")
        elif unrecorded:
            # Nothing is stored about a message that is passed, and the row of one that is acked is deleted.
            text = _(
                "The group's filter does not match the message, and no delivery of it is recorded: it was passed "
                "without calling the handler, unless it was settled before the filter was changed."
            )
        else:
            text = str(UNMATCHED.get(state.standing) or _("The group's filter does not match the message."))
        return Step(text, error=why)

    def _why(self, found: MessageContent, policy: FilterPolicy) -> str:
        """Return why the filter matches or not, or the filter alone if it must not show values of the metadata."""
        if self.may_see_payloads:
            text = metadata_text(found.metadata)
            if redacted(text, topic=self._topic, kind="metadata") == text:
                return policy.explain(found.metadata)
        return _filter_text(policy)

    @staticmethod
    def _nobody(live: Mapping[str, SubscriberStatus]) -> str:
        return "" if live else " " + _("The group has no live subscribers.")

    @staticmethod
    def _unknown(state: GroupState, ended: RecordedDelivery | None) -> str:
        """Return what the records do not contain, and why."""
        settings = get_settings()
        level = settings.recorded_of(state.ref.group)
        if level == "none":
            return _(
                "Deliveries of this group are not recorded (RECORD_DELIVERIES): attempts and subscribers are unknown."
            )
        if state.standing != "settled" or ended is not None:
            return ""
        if level == "failures":
            return _(
                "Acks of this group are not recorded (RECORD_DELIVERIES). If the message was acked, the time and the "
                "subscriber are unknown."
            )
        text = _(
            "The outcome is not recorded: it is older than %(age)s, or the process was killed before it could "
            "record it."
        )
        return text % {"age": duration(settings.history_retention)}


def _filter_text(policy: FilterPolicy) -> str:
    return _("Filter: %(filter)s.") % {"filter": policy}


def _end_of(events: list[RecordedDelivery]) -> RecordedDelivery | None:
    """Return the last record of how it was settled, or None."""
    return next((event for event in reversed(events) if event.outcome in ENDS), None)
