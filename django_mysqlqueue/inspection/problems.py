"""Problems of the queue, as the dashboard and the health check report them.

They are found in an overview, in the rollups and with a few short queries; nothing here walks the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from django.db import Error
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_mysqlqueue import naming
from django_mysqlqueue.conf import HealthSettings, get_settings
from django_mysqlqueue.humanize import duration, moment, partition_text
from django_mysqlqueue.inspection import groupless
from django_mysqlqueue.inspection.bounds import PAGES, STALL_TIMES, Bounds, StallTimes
from django_mysqlqueue.inspection.overview import GroupOverview, QueueOverview, get_overview
from django_mysqlqueue.inspection.problem import Problem
from django_mysqlqueue.inspection.relays import RefusedMessage, RelayBacklog
from django_mysqlqueue.inspection.schedules import list_schedules
from django_mysqlqueue.models import PartitionLease
from django_mysqlqueue.service import groups, rollups
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.databases import queue_alias, queue_aliases
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.rollups import Bucket
from django_mysqlqueue.service.subsets import EVERYTHING
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.subscriptions.effective import blocks_on_failure

LEASES = PartitionLease._meta.db_table
NAMES = 100
"""Maximum number of lost subscribers of idle groups whose leases are read."""


@dataclass(slots=True)
class Ended:
    """Deliveries of a group that ended within some time, as subscribers count them, up to 10 seconds late."""

    acked: int = 0
    failed: int = 0
    dead_lettered: int = 0

    def add(self, bucket: Bucket) -> None:
        """Add the numbers of a bucket of the rollups."""
        self.acked += bucket.acked
        # The last attempt at a dead letter is a failure, too. A poison message has no failures, only the dead letter.
        self.failed += max(bucket.failed, bucket.dead_lettered)
        self.dead_lettered += bucket.dead_lettered

    @property
    def attempts(self) -> int:
        """Number of attempts that ended."""
        return self.acked + self.failed


def find_problems(
    overview: QueueOverview | None = None,
    *,
    using: str | None = None,
    thresholds: HealthSettings | None = None,
    stall_times: StallTimes = STALL_TIMES,
    bounds: Bounds = PAGES,
) -> list[Problem]:
    """Find the problems of the queue, worst first.

    Args:
        overview: the state to check, read with the window of the thresholds; if None, it is read. With an overview of
            some groups, only their problems and those of the whole queue are found.
        using: alias of the queue's database, if there is no overview (default: ``MYSQLQUEUE["DATABASE"]``, else the
            router's choice).
        thresholds: limits above which failures are a problem (default: the setting ``HEALTH``).
        stall_times: times after which a lack of progress is a problem.
        bounds: limits of what is read.

    Raises:
        InvalidMessage: ``using`` is not an alias in ``DATABASES``.
        ImproperlyConfigured: the setting ``HEALTH`` is invalid.
        django.db.Error: the database refuses or does not answer.
    """
    thresholds = thresholds or get_settings().health
    overview = overview or get_overview(using=using, bounds=bounds, window=thresholds.window)
    session = Session(overview.using)
    found = [*_outbox(overview, stall_times), *_long_transactions(session, stall_times)]
    recent, still = (overview.now - int(seconds * 1000) for seconds in (overview.window, stall_times.still))
    lately: dict[GroupRef, Ended] = {}
    moving: set[GroupRef] = set()
    for bucket in rollups.since(session, rollups.MINUTE, min(recent, still)):
        if bucket.at >= recent:
            lately.setdefault(bucket.ref, Ended()).add(bucket)
        if bucket.at >= still and (
            bucket.acked or bucket.failed or bucket.dead_lettered or any(bucket.passed.values())
        ):
            moving.add(bucket.ref)
    for group in overview.groups:
        found += _of_group(group, overview.now, stall_times, moves=group.ref in moving)
        found += _failing(
            group, lately.get(group.ref, Ended()), thresholds, stall_times, overview.now, overview.window
        )
    found += [*_silent(session, overview), *_relays(overview, stall_times), *_routes(overview)]
    if overview.topics is not None:
        found += _recurring(overview, stall_times)
        found += groupless_topics(session, overview.topics, overview.now, bounds=bounds)
    return sorted(found, key=lambda problem: (problem.severity, problem.kind, problem.ref or ("", "")))


def _of_group(group: GroupOverview, now: int, times: StallTimes, *, moves: bool) -> Iterator[Problem]:
    ref = group.ref
    waits = _age(now, group.oldest_at)
    unfinished = groups.unfinished(group.after_seek)
    if isinstance(group.filter, str):
        text = _(
            "Subscribers of this release claim nothing for %(ref)s, because they cannot parse its filter: %(error)s. "
            "%(lag)s."
        )
        values = {"ref": ref, "error": group.filter, "lag": _waiting(_backlog(group))}
        is_late = waits >= times.stuck and not (group.paused or unfinished)
        yield Problem(0 if is_late else 2, "filter", text % values, ref)
    if unfinished == "drop":
        text = _("A drop of %(ref)s has not finished. If it was interrupted, run it again.") % {"ref": ref}
        yield Problem(0, "drop_ended_early", text, ref)
    elif unfinished == "move":
        text = _("%(ref)s waits until it has settled all messages in the database that its topic leaves; %(lag)s.")
        yield Problem(2, "moves", text % {"ref": ref, "lag": _waiting(_backlog(group))}, ref)
    elif unfinished:
        text = _("A seek of %(ref)s has not finished. If it was interrupted, run it again.") % {"ref": ref}
        yield Problem(0, "seek_ended_early", text, ref)
    elif group.paused:
        text = _("%(ref)s is paused; %(lag)s.") % {"ref": ref, "lag": _waiting(_backlog(group))}
        yield Problem(1 if group.has_work else 2, "paused", text, ref)
    elif group.has_work and not group.live:
        text = _(
            "No live subscribers for %(ref)s; %(lag)s, the oldest for %(age)s. GC keeps all messages for the group. "
            "Start a subscriber, or drop the group if it is no longer needed."
        )
        values = {"ref": ref, "lag": _waiting(_backlog(group)), "age": duration(waits)}
        # The subscribers may be restarting.
        yield Problem(0 if waits >= times.stuck else 2, "no_subscriber", text % values, ref)
    elif group.live:
        found = [*_stuck(group, now, times), *_unserved(group, now, times)]
        yield from found
        if group.limited and group.has_work:
            yield _limited(group)
        is_explained = isinstance(group.filter, str) or (group.limited and group.limited.by_rate)
        if not (found or moves or is_explained) and group.uptime(now) >= times.still:
            yield from _still(group, now, times)


def _failing(
    group: GroupOverview, ended: Ended, thresholds: HealthSettings, times: StallTimes, now: int, window: float
) -> Iterator[Problem]:
    """Yield problems of failing handlers: their share of failed attempts, and their dead letters."""
    ref, share, most = group.ref, thresholds.max_failure_ratio, thresholds.max_recent_dead_letters
    uptime = group.uptime(now)
    if ended.failed and uptime >= times.started:
        # A few failed attempts may all be of one message, so they are only for information.
        judged = share is not None and ended.attempts >= thresholds.min_attempts
        values = {"ref": ref, "number": f"{ended.failed:,}", "window": duration(window)}
        if not ended.acked:
            text = ngettext(
                "Every attempt of %(ref)s fails: %(number)s failure and no success in the last %(window)s.",
                "Every attempt of %(ref)s fails: %(number)s failures and no success in the last %(window)s.",
                ended.failed,
            )
            yield Problem(0 if judged and share != 1 else 1, "failing", text % values, ref)
        elif judged and share is not None and ended.failed / ended.attempts > share:
            text = _(
                "%(number)s of %(attempts)s attempts of %(ref)s failed in the last %(window)s; the limit is %(share)s."
            )
            values |= {"attempts": f"{ended.attempts:,}", "share": f"{share:.0%}"}
            yield Problem(0, "failing", text % values, ref)
    # The log's count is exact and current, unless the DLQ topic is too long: then use the subscribers' counts.
    recent = group.recent_dead_letters
    if not recent.exact:
        recent = Count(max(recent.value, ended.dead_lettered), exact=False)
    if most is not None and recent.value > most:
        text = _("%(ref)s dead-lettered %(number)s messages in the last %(window)s; the limit is %(limit)s.")
        values = {"ref": ref, "number": str(recent), "window": duration(window), "limit": f"{most:,}"}
        yield Problem(0, "recent_dead_letters", text % values, ref)
    if group.dead_letters:
        text = _("%(ref)s has dead-lettered messages: %(number)s in %(topic)s.")
        values = {"ref": ref, "number": str(group.dead_letters), "topic": naming.dlq_topic(ref.topic)}
        yield Problem(1, "dead_letters", text % values, ref)


def _stuck(group: GroupOverview, now: int, times: StallTimes) -> Iterator[Problem]:
    """Yield messages that fail repeatedly. Other messages wait for them only with ``on_failure="block"``."""
    blocks = blocks_on_failure(group.ref, group.mode)
    for head in group.heads:
        waits = _age(now, group.waiting_since(head.published_at))
        if head.attempts and waits >= times.stuck:
            if blocks:
                text = _(
                    "Partition %(key)s of %(ref)s waits for message %(offset)s, which has failed %(times)s. It has "
                    "waited for %(age)s."
                )
            else:
                text = _("Message %(offset)s of %(ref)s has failed %(times)s and has waited for %(age)s.")
            if naming.is_dlq(group.ref.topic):
                text += " " + _("A DLQ topic has no DLQ: the message is retried until it succeeds or is discarded.")
            failures = ngettext("once", "%(number)s times", head.attempts) % {"number": head.attempts}
            values = {
                "key": partition_text(*naming.lane_of(head.key), quoted=True),
                "ref": group.ref,
                "offset": head.offset,
                "times": failures,
            }
            severity = 2 if blocks is False else 1
            yield Problem(
                severity, "stuck", text % {**values, "age": duration(waits)}, group.ref, head.key, head.offset
            )


def _limited(group: GroupOverview) -> Problem:
    """Return that messages of a group wait because its limits are reached."""
    values = {"ref": group.ref, "limits": group.limits.text, "lag": _waiting(_backlog(group))}
    if group.limited is not None and group.limited.keys and not group.limited.group:
        keys = group.limited.keys
        values["keys"] = f"{keys:,}" if group.limited.exact else f"{keys:,}+"
        text = ngettext(
            "%(ref)s is limited to %(limits)s; %(keys)s key is at its limit; %(lag)s.",
            "%(ref)s is limited to %(limits)s; %(keys)s keys are at their limit; %(lag)s.",
            keys,
        )
    else:
        text = _("%(ref)s is limited to %(limits)s; %(lag)s.")
    return Problem(2, "limited", text % values, group.ref)


def _still(group: GroupOverview, now: int, times: StallTimes) -> Iterator[Problem]:
    """Yield a group with live subscribers if no delivery ends: its handlers or subscribers hang."""
    for head in group.heads:
        waits = _age(now, group.waiting_since(head.published_at))
        # Messages in backoff or snoozed are not stalled.
        if waits >= times.still and (head.delivered_by or head.invisible_until <= now):
            text = _(
                "%(ref)s is stalled: it has live subscribers, but no delivery has ended in the last %(window)s; "
                "%(lag)s, one of them for %(age)s."
            )
            values = {"ref": group.ref, "lag": _waiting(group.lag), "age": duration(waits)}
            values["window"] = duration(times.still)
            yield Problem(1, "still", text % values, group.ref, head.key, head.offset)
            return


def _unserved(group: GroupOverview, now: int, times: StallTimes) -> Iterator[Problem]:
    subsets = {row.subset for row in group.live}
    if EVERYTHING in subsets or group.uptime(now) < times.started:
        return
    for head in group.heads:
        if (
            not any(head.key in subset for subset in subsets)
            and _age(now, group.waiting_since(head.published_at)) >= times.stuck
        ):
            text = _("No live subscriber of %(ref)s claims partition %(key)s: it is in none of their subsets.")
            yield Problem(
                0,
                "unserved",
                text % {"ref": group.ref, "key": partition_text(*naming.lane_of(head.key), quoted=True)},
                group.ref,
                head.key,
            )
            return


def _silent(session: Session, overview: QueueOverview) -> Iterator[Problem]:
    """Yield lost subscribers, for each group with a backlog or with leases of theirs."""
    lost = {(row.name, group.ref): row for group in overview.groups for row in group.subscribers if not row.live}
    # Messages that it has claimed are unsettled, and so part of the backlog.
    behind = {group.ref for group in overview.groups if group.lag or not group.lag.exact}
    idle = sorted({name for name, ref in lost if ref not in behind})[:NAMES]
    owners = _with_leases(session, idle)
    for (name, ref), row in sorted(lost.items()):
        if ref in behind or (name, ref) in owners:
            text = _("Subscriber %(name)s of %(ref)s is lost: no heartbeat for %(age)s.")
            values = {"name": name, "ref": ref, "age": duration(_age(overview.now, row.heartbeat_at))}
            yield Problem(2, "silent", text % values, ref, subscriber=name)


def _with_leases(session: Session, names: Sequence[str]) -> set[tuple[str, GroupRef]]:
    """Return the subscribers that own partitions, with the groups of these partitions."""
    if not names:
        return set()
    places = ", ".join(["%s"] * len(names))
    rows = session.rows(
        f"SELECT DISTINCT leased_by, consumer_group, topic FROM {LEASES}"
        f"{session.dialect.force_index('queue_leases_owner')} WHERE leased_by IN ({places})",
        names,
    )
    return {(name, GroupRef(group, topic)) for name, group, topic in rows}


def _outbox(overview: QueueOverview, times: StallTimes) -> Iterator[Problem]:
    """Yield problems of due messages that are not in the log yet. They are not part of any backlog."""
    waiting = overview.outbox.waiting
    waits = _age(overview.now, overview.outbox.waiting_since)
    if not waiting:
        return
    if waits < times.outbox:
        # A group with work and no live subscribers is another problem.
        if not overview.live and not any(group.has_work for group in overview.groups):
            text = _("%(lag)s to be moved into the log, but no subscriber is running.")
            yield Problem(2, "outbox", text % {"lag": _waiting(waiting)})
        return
    values = {"lag": _waiting(waiting), "age": duration(waits)}
    if _age(overview.now, overview.sequenced_at) < times.outbox:
        # Many messages were committed at once, or by a long transaction: no alarm.
        text = _(
            "The outbox is behind: %(lag)s to be moved into the log, the oldest for %(age)s. They are being moved."
        )
        yield Problem(1, "outbox_behind", text % values)
    else:
        text = _(
            "The outbox is stalled: %(lag)s to be moved into the log, the oldest for %(age)s. No subscriber is moving "
            "them."
        )
        yield Problem(0, "outbox", text % values)


def _relays(overview: QueueOverview, times: StallTimes) -> Iterator[Problem]:
    """Yield databases that do not receive the messages that are published for them via this one."""
    for relay in overview.relays:
        waits = _age(overview.now, relay.oldest_at)
        if relay.refused is not None:
            yield _refused(relay, relay.refused, waits)
            continue
        if not relay.messages or waits < times.outbox:
            continue
        text = _("%(lag)s to be relayed to the database %(target)s, the oldest for %(age)s.")
        values = {"lag": _waiting(relay.messages), "target": repr(relay.target), "age": duration(waits)}
        if relay.target in queue_aliases():
            advice = _("It does not answer, or no subscriber works on this database.")
        else:
            advice = _("MYSQLQUEUE names no such database here: subscribers with other settings must relay them.")
        yield Problem(0, "relay", f"{text} {advice}" % values, database=relay.target)


def _refused(relay: RelayBacklog, message: RefusedMessage, waits: float) -> Problem:
    text = _(
        "The database %(target)s refuses message %(id)s of topic %(topic)s, at offset %(offset)s here (%(error)s). "
        "%(lag)s to be relayed there, the oldest for %(age)s. Change what refuses it, such as max_allowed_packet or a "
        "trigger."
    )
    values = {
        "target": repr(relay.target),
        "id": repr(message.id),
        "topic": repr(message.topic),
        "offset": message.offset,
        "error": message.error,
        "lag": _waiting(relay.messages),
        "age": duration(waits),
    }
    return Problem(
        0,
        "relay",
        text % values,
        offset=message.offset,
        topic=message.topic,
        message_id=message.id,
        database=relay.target,
    )


def groupless_topics(session: Session, in_log: Iterable[str], now: int, *, bounds: Bounds = PAGES) -> Iterator[Problem]:
    """Yield topics without a consumer group, such as mistyped ones, whose messages GC deletes unhandled.

    Args:
        session: session on the queue's database.
        in_log: the topics that have messages in the log.
        now: the database's clock, in epoch milliseconds.
        bounds: limits of what is read.
    """
    for one in groupless.find(session, in_log, bounds=bounds):
        text = ngettext(
            "Topic %(topic)s has %(number)s message but no consumer group.",
            "Topic %(topic)s has %(number)s messages but no consumer group.",
            one.messages.value,
        )
        retention = get_settings().retention_of(one.topic, has_groups=False)
        if retention is None:
            fate = _("GC never deletes them.")
        elif one.oldest_at is None:
            fate = _("GC deletes each message %(retention)s after it entered the log.")
        else:
            fate = _("GC deletes each message %(retention)s after it entered the log, the first in %(left)s.")
        values = {
            "topic": repr(one.topic),
            "number": one.messages,
            "retention": duration(retention or 0),
            "left": duration(max(0.0, (retention or 0) - _age(now, one.oldest_at))),
        }
        yield Problem(1, "groupless", f"{text} {fate}" % values, topic=one.topic)


def _long_transactions(session: Session, times: StallTimes) -> Iterator[Problem]:
    found = _oldest_transaction(session)
    if found is not None and found[0] >= times.transaction:
        text = _(
            "A transaction has been open for %(age)s (connection %(id)s). Until it ends, the server cannot purge rows "
            "that were deleted since, and the queue's queries become slower."
        )
        yield Problem(1, "long_transaction", text % {"age": duration(found[0]), "id": found[1]})


def _oldest_transaction(session: Session) -> tuple[int, int] | None:
    """Return the age in seconds and the connection id of the oldest transaction; None if none is visible."""
    for sql in session.dialect.oldest_transaction:
        try:
            row = session.row(sql)
        except Error as error:
            if not session.dialect.hides_transactions(error):
                raise
        else:
            return None if row is None else (int(row[0]), int(row[1]))
    return None


def _backlog(group: GroupOverview) -> Count:
    """Return the number of messages that wait for the group, in the log and in the outbox."""
    return group.lag + (group.waiting.count if group.waiting is not None else Count(0))


def _waiting(count: Count) -> str:
    return ngettext("%(count)s message is waiting", "%(count)s messages are waiting", count.value) % {"count": count}


def _age(now: int, since: int | None) -> float:
    return 0.0 if since is None else max(0.0, (now - since) / 1000)


def _routes(overview: QueueOverview) -> Iterator[Problem]:
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


def _recurring(overview: QueueOverview, times: StallTimes) -> Iterator[Problem]:
    """Yield recurring schedules whose ticks are overdue."""
    for one in list_schedules(using=overview.using, runs=0):
        values = {"name": one.name, "age": duration(one.overdue), "error": one.error}
        if one.error and one.declared and not one.paused_at:
            text = _("Subscribers of this release cannot run the recurring schedule %(name)s: %(error)s")
            yield Problem(1, "recurring", text % values, topic=one.topic or None)
        if one.overdue < times.tick:
            continue
        if one.last_run:
            text = _("The recurring schedule %(name)s has not run since %(since)s. It has been due for %(age)s.")
            values["since"] = moment(one.last_run)
        else:
            text = _("The recurring schedule %(name)s has never run. It has been due for %(age)s.")
        if one.declared:
            yield Problem(0, "recurring", text % values, topic=one.topic)
        elif overview.live:
            text += " " + _("No running process declares it. If it is no longer needed, delete it with queuerecurring.")
            yield Problem(2, "recurring", text % values, topic=one.topic)
        else:
            text += " " + _("No subscriber is running.")
            yield Problem(0, "recurring", text % values, topic=one.topic)
