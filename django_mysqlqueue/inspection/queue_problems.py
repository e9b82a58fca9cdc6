"""Problems of the queue as a whole: the outbox, relays, the database, topics and schedules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_mysqlqueue.db.tables import LOG
from django_mysqlqueue.inspection import scheduled
from django_mysqlqueue.inspection.bounds import PAGES, Bounds, StallTimes
from django_mysqlqueue.inspection.dead_letters import count_topic
from django_mysqlqueue.inspection.outbox import list_quarantined
from django_mysqlqueue.inspection.overview import QueueOverview
from django_mysqlqueue.inspection.problem import NONE, Problem, age, waiting
from django_mysqlqueue.inspection.schedules import RUNS, ScheduleStatus, list_schedules
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service import groups, log, log_places, open_transactions, partitions
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.databases import queue_alias, queue_aliases
from django_mysqlqueue.service.open_transactions import Holder
from django_mysqlqueue.service.readers import waited_for
from django_mysqlqueue.service.schedules import DECLARED_MS
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.text.humanize import duration, moment

QUARANTINED = 100
"""Maximum number of messages of a topic in the quarantine that are counted."""


def outbox(session: Session, overview: QueueOverview, times: StallTimes) -> Iterator[Problem]:
    """Yield problems of due messages that are not in the log yet. They are not part of any backlog."""
    due, since = overview.outbox.waiting, overview.outbox.waiting_since
    waits = age(overview.now, since)
    values = {"lag": waiting(due), "age": duration(waits)}
    all_wait = partial(Problem, since=since, oldest_at=since, messages=due)
    if not due:
        return
    if waits < times.outbox:
        # A group with work and no live subscribers is another problem.
        if not overview.live and not any(group.has_work for group in overview.groups):
            text = _("%(lag)s to be moved into the log, but no subscriber is running.")
            yield all_wait(2, "outbox", text % values)
    elif age(overview.now, overview.sequenced_at) < times.outbox:
        # Many messages were committed at once, or by a long transaction: no alarm.
        text = _(
            "The outbox is behind: %(lag)s to be moved into the log, the oldest for %(age)s. They are being moved."
        )
        yield all_wait(1 if waits >= times.stuck else 2, "outbox_behind", text % values)
    elif (silent := _silent_for(overview)) >= max(times.outbox, get_settings().lease_duration / 2):
        text = _(
            "The outbox is stalled: %(lag)s to be moved into the log, the oldest for %(age)s. No subscriber has sent a "
            "heartbeat for %(silent)s."
        )
        advice = _("Check whether the subscribers still run and reach the database. Restart those that hang.")
        yield all_wait(0, "outbox", text % {**values, "silent": duration(silent)}, advice=advice)
    else:
        text = _(
            "The outbox is stalled: %(lag)s to be moved into the log, the oldest for %(age)s. No subscriber is moving "
            "them."
        )
        advice = ""
        # Without subscribers, nobody misses the sequencer.
        if overview.live and (holder := open_transactions.sequencer_holder(session, least=times.outbox)):
            advice = _("End the program that has left its transaction open, or KILL connection %(id)s.")
            advice = f"{_held_text(holder)} {advice % {'id': holder.connection}}"
        yield all_wait(0, "outbox", text % values, advice=advice)


def _silent_for(overview: QueueOverview) -> float:
    """Return the seconds since the newest heartbeat of a live subscriber; 0 if there is none.

    Processes that have died are live until their leases expire. Heartbeats are due twice in the duration of a lease.
    """
    beats = [row.heartbeat_at for group in overview.groups for row in group.live]
    return age(overview.now, max(beats, default=None))


def quarantined(session: Session, overview: QueueOverview) -> Iterator[Problem]:
    """Yield the topics of which the log has refused messages."""
    for topic in log.quarantined(session):
        found = list_quarantined(topic=topic, limit=QUARANTINED + 1, using=session.using)
        if not found:  # They were requeued or deleted meanwhile.
            continue
        count = Count.up_to(QUARANTINED, len(found))
        text = ngettext(
            "The log has refused %(number)s message of topic %(topic)s, which is in the quarantine: message %(id)s, "
            "%(age)s ago.",
            "The log has refused %(number)s messages of topic %(topic)s, which are in the quarantine: the first is "
            "message %(id)s, %(age)s ago.",
            count.value,
        )
        first = found[0]
        values = {"id": repr(first.message_id), "age": duration(age(overview.now, first.quarantined_at))}
        yield Problem(
            0,
            "quarantined",
            text % {"number": count, "topic": repr(topic), **values},
            topic=topic,
            message_id=first.message_id,
            since=first.quarantined_at,
            messages=count,
            error=first.reason,
            upto=found[-1].quarantine_id,
        )


def _held_text(holder: Holder) -> str:
    if holder.is_certain and holder.age is not None:
        text = _("Connection %(id)s (%(user)s) has locked the sequencer. Its transaction has been open for %(age)s.")
    elif holder.is_certain:
        text = _("Connection %(id)s (%(user)s) has locked the sequencer.")
    else:
        text = _(
            "Connection %(id)s (%(user)s) may have locked the sequencer: its transaction, which has locked rows, has "
            "been open for %(age)s."
        )
    return text % {"id": holder.connection, "user": holder.user or "-", "age": duration(holder.age or 0)}


def relays(overview: QueueOverview, times: StallTimes) -> Iterator[Problem]:
    """Yield databases that do not receive the messages that are published for them via this one."""
    for relay in overview.relays:
        waits = age(overview.now, relay.oldest_at)
        values = {"lag": waiting(relay.messages), "target": repr(relay.target), "age": duration(waits)}
        waiting_for = partial(Problem, database=relay.target, since=relay.oldest_at, messages=relay.messages)
        if (refused := relay.refused) is not None:
            text = _(
                "The database %(target)s refuses message %(id)s of topic %(topic)s, at offset %(offset)s here. %(lag)s "
                "to be relayed there, the oldest for %(age)s. Change what refuses it, such as max_allowed_packet or a "
                "trigger."
            )
            text %= {"id": repr(refused.id), "topic": repr(refused.topic), "offset": refused.offset, **values}
            yield waiting_for(
                0,
                "relay",
                text,
                offset=refused.offset,
                topic=refused.topic,
                message_id=refused.id,
                error=refused.error,
            )
        elif relay.messages and waits >= times.outbox:
            text = _("%(lag)s to be relayed to the database %(target)s, the oldest for %(age)s.")
            if relay.target in queue_aliases():
                advice = _("It does not answer, or no subscriber works on this database.")
            else:
                advice = _("MYSQLQUEUE names no such database here: subscribers with other settings must relay them.")
            yield waiting_for(0, "relay", f"{text} {advice}" % values)


def readers(overview: QueueOverview, times: StallTimes) -> Iterator[Problem]:
    """Yield registered readers that GC waits for, and that have not read for long."""
    for reader in waited_for(overview.readers):
        unread, silent = overview.last_offset - reader.offset, age(overview.now, reader.moved_at)
        if not reader.moved_at or unread <= 0 or silent < times.reader:
            continue
        text = ngettext(
            "The reader %(name)s has not read for %(age)s. GC keeps %(number)s offset of the log for it.",
            "The reader %(name)s has not read for %(age)s. GC keeps %(number)s offsets of the log for it.",
            unread,
        )
        text %= {"name": repr(reader.name), "age": duration(silent), "number": f"{unread:,}"}
        topic = reader.topics[0] if len(reader.topics) == 1 else None
        yield Problem(1, "reader", text, topic=topic, since=reader.moved_at)


def groupless_topics(session: Session, in_log: Iterable[str], now: int, *, bounds: Bounds = PAGES) -> Iterator[Problem]:
    """Yield topics without a consumer group, such as mistyped ones, whose messages GC deletes unhandled."""
    for topic, number in find_groupless(session, in_log, bounds=bounds).items():
        keys = partitions.all_in_log(session, topic, most=bounds.groupless_partitions)
        first = oldest_message(session, topic, keys or ())
        oldest_at = None if first is None else first[1]
        text = ngettext(
            "Topic %(topic)s has %(number)s message but no consumer group.",
            "Topic %(topic)s has %(number)s messages but no consumer group.",
            number.value,
        )
        retention = get_settings().retention_of(topic, has_groups=False)
        if retention is None:
            fate = _("GC never deletes them.")
        elif oldest_at is None:
            fate = _("GC deletes each message %(retention)s after it entered the log.")
        else:
            fate = _("GC deletes each message %(retention)s after it entered the log, the first in %(left)s.")
        values = {
            "topic": repr(topic),
            "number": number,
            "retention": duration(retention or 0),
            "left": duration(max(0.0, (retention or 0) - age(now, oldest_at))),
        }
        yield Problem(1, "groupless", f"{text} {fate}" % values, topic=topic, since=oldest_at, messages=number)


def long_transactions(session: Session, now: int, times: StallTimes) -> Iterator[Problem]:
    """Yield a transaction that has been open for long, if the server shows it."""
    found = open_transactions.oldest(session)
    if found is not None and found[0] >= times.transaction:
        text = _(
            "A transaction has been open for %(age)s (connection %(id)s). Until it ends, the server cannot purge rows "
            "that were deleted since, and the queue's queries become slower."
        )
        text %= {"age": duration(found[0]), "id": found[1]}
        yield Problem(1, "long_transaction", text, since=now - found[0] * 1000)


def slow_database(overview: QueueOverview, most: float | None) -> Iterator[Problem]:
    """Yield that half of a subscriber's polls take longer than some seconds; None: no limit."""
    found = overview.round_trips
    slow = [] if most is None else sorted((took, name) for name, took in found.items() if took.p50 > most)
    if most is None or not slow:
        return
    took, name = slow[-1]
    text = ngettext(
        "The database is slow: half of the polls of %(slow)s of %(number)s live subscriber take longer than %(most)s; "
        "those of %(name)s take %(p50)s (p50) and %(p95)s (p95).",
        "The database is slow: half of the polls of %(slow)s of %(number)s live subscribers take longer than %(most)s; "
        "those of %(name)s take %(p50)s (p50) and %(p95)s (p95).",
        len(found),
    )
    values = {
        "slow": f"{len(slow):,}",
        "number": f"{len(found):,}",
        "most": duration(most),
        "name": name,
        "p50": duration(took.p50),
        "p95": duration(took.p95),
    }
    # If others are fast, it is its host, or the network to it.
    named = name if len(slow) == 1 < len(found) else None
    names = {name for _, name in slow}
    times = [row.slow_since for group in overview.groups for row in group.live if row.name in names]
    since = min((at for at in times if at is not None), default=None)
    yield Problem(1, "slow_database", text % values, subscriber=named, since=since, is_private=True)


def routes(overview: QueueOverview) -> Iterator[Problem]:
    """Find topics that have moved to another database than the settings of this process name."""
    topics = get_settings().topics
    for topic, route in overview.routes.items():
        configured = queue_alias(topic=topic)
        leads = route.target or overview.using
        if route.planned or leads == configured or (topics.of(topic).via or configured) != overview.using:
            continue
        text = _(
            "Messages of the topic %(topic)s go to the database %(target)s since it was moved, but "
            "MYSQLQUEUE['TOPICS'] names %(configured)s. Correct the settings, or move the topic with queuemove."
        )
        values = {"topic": topic, "target": repr(leads), "configured": repr(configured)}
        yield Problem(0, "route", text % values, topic=topic)


def recurring(overview: QueueOverview, times: StallTimes) -> Iterator[Problem]:
    """Yield recurring schedules whose ticks are overdue, which nobody declares, or whose last job has failed."""
    found = list_schedules(using=overview.using, runs=RUNS)
    last_seen = max((one.seen_at for one in found), default=0)
    for one in found:
        yield from _failed_run(one)
        if one.error and (one.declared or one.editable) and not one.paused_at:
            text = (
                _("The recurring schedule %(name)s cannot run: %(error)s")
                if one.editable
                else _("Subscribers of this release cannot run the recurring schedule %(name)s: %(error)s")
            )
            text %= {"name": one.name, "error": one.error}
            advice = _("Edit the schedule, or declare its task again.") if one.editable else ""
            yield Problem(1, "recurring", text, topic=one.topic or None, is_private=True, advice=advice)
        if one.due >= times.tick:
            # Without subscribers, it is not known what they would declare, unless some have run since without it.
            is_gone = (
                not one.declared and not one.editable and (overview.live or last_seen - one.seen_at >= DECLARED_MS)
            )
            yield _removed(one) if is_gone else _overdue(one, is_live=bool(overview.live))


def _overdue(one: ScheduleStatus, *, is_live: bool) -> Problem:
    """Return that a tick does not run, although a process runs the schedule, or because none is running."""
    values = {"name": one.name, "age": duration(one.due), "since": moment(one.last_run)}
    if one.last_run:
        text = _("The recurring schedule %(name)s has not run since %(since)s. It has been due for %(age)s.")
    else:
        text = _("The recurring schedule %(name)s has never run. It has been due for %(age)s.")
    is_down = not one.declared and not (one.editable and is_live)
    if is_down:
        text += " " + _("No subscriber is running.")
    advice = "" if not is_down else _("Start “manage.py runsubscriber”.")
    return Problem(0, "recurring", text % values, topic=one.topic, since=one.next_tick, advice=advice)


def _removed(one: ScheduleStatus) -> Problem:
    text = _(
        "No running process declares the recurring schedule %(name)s, so it does not run. If it is no longer needed, "
        "delete it with queuerecurring."
    )
    advice = _("Delete it with “queuerecurring --delete”, or start subscribers whose code declares it.")
    return Problem(2, "recurring", text % {"name": one.name}, topic=one.topic, since=one.next_tick, advice=advice)


def _failed_run(one: ScheduleStatus) -> Iterator[Problem]:
    """Yield that the last job of a schedule that has ended has failed."""
    last = one.failed_run
    if last is None:
        return
    # The path of a class from "builtins" says no more than its name.
    error = last.error.removeprefix("builtins.")
    text = (
        _("The last job of the recurring schedule %(name)s failed at %(time)s: %(error)s.")
        if error
        else _("The last job of the recurring schedule %(name)s failed at %(time)s.")
    )
    values = {"name": one.name, "time": moment(last.finished_at), "error": error}
    yield Problem(
        2 if one.paused_at or not one.declared else 1,
        "recurring_failed",
        text % values,
        topic=one.topic or None,
        since=last.finished_at,
        is_private=bool(error),
    )


def find_groupless(session: Session, in_log: Iterable[str], *, bounds: Bounds = PAGES) -> dict[str, Count]:
    """Return how many messages topics without groups have, by name, unless they are ``GROUPLESS`` or DLQ topics."""
    waiting = dict(scheduled.topics(session, scheduled_only=False, bounds=bounds))
    settings = get_settings()
    topics = [topic for topic in sorted({*in_log, *waiting}) if not settings.may_lack_groups(topic)]
    # Read groups after topics: a group that was registered before its topic's first message must not be missed.
    read = {ref.topic for ref in groups.registered_refs(session.using)} if topics else set()
    return {
        topic: count_topic(session, topic, bounds.count) + waiting.get(topic, NONE)
        for topic in topics
        if topic not in read
    }


def oldest_message(session: Session, topic: str, keys: Sequence[str]) -> tuple[int, int] | None:
    """Return the offset of the oldest message of some partitions, and its time; None if there is none."""
    for first in log_places.in_partitions(session, topic, keys, 0, 1, newer=True):
        row = session.row(f"SELECT published_at FROM {LOG} WHERE `offset` = %s", (first,))
        return None if row is None else (first, row[0])
    return None
