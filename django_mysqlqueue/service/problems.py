"""What is wrong with the queue, in words: what the dashboard lists and the health check reports.

Everything is told from an overview, the charts' rollups and a few short
queries; nothing here walks the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from django.db import Error
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_mysqlqueue import names
from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.service import groupless, rollups
from django_mysqlqueue.service.groups import GroupRef
from django_mysqlqueue.service.overview import Count, GroupOverview, QueueOverview
from django_mysqlqueue.service.subsets import EVERYTHING
from django_mysqlqueue.service.transactions import Session

STUCK_SECONDS = 60.0
"""A partition whose first message has failed and waits for so long is stuck; a group without subscribers is one too."""
OUTBOX_SECONDS = 15.0
"""What is due in the outbox for so long has no sequencer: a poll comes every second at the latest."""
FAILING_SECONDS = 600.0
"""A handler without a single ack for so long, and with failures, fails every attempt."""
TRANSACTION_SECONDS = 300.0
"""A transaction open for so long holds back purge."""

Kind = Literal[
    "no_subscriber",
    "stuck",
    "silent",
    "outbox",
    "outbox_behind",
    "failing",
    "paused",
    "seek_ended_early",
    "unserved",
    "still",
    "dead_letters",
    "long_transaction",
    "groupless",
]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that a person should know of; worst first when sorted."""

    severity: int
    """0: messages stand still; 1: something will, or was given up; 2: worth knowing."""
    kind: Kind
    text: str
    ref: GroupRef | None = None
    key: str | None = None
    """The partition that it is about."""
    offset: int | None = None
    """The message that it is about."""
    subscriber: str | None = None
    topic: str | None = None
    """The topic that it is about, where that has no group."""


def find(using: str, overview: QueueOverview) -> list[Problem]:
    """What is wrong, worst first."""
    session = Session(using)
    found = [*_outbox(overview), *_long_transactions(session)]
    since = overview.now - int(FAILING_SECONDS * 1000)
    handled: dict[GroupRef, tuple[int, int]] = {}
    for bucket in rollups.since(session, rollups.MINUTE, since):
        acked, failed = handled.get(bucket.ref, (0, 0))
        # The last attempt of a dead letter is a failure, too; of what killed its process every time there is none.
        handled[bucket.ref] = (acked + bucket.acked, failed + max(bucket.failed, bucket.dead_lettered))
    for group in overview.groups:
        found += _of_group(group, overview.now, *handled.get(group.ref, (0, 0)))
    found += _silent(overview)
    if overview.topics is not None:
        found += groupless_topics(session, overview.topics, overview.now)
    return sorted(found, key=lambda problem: (problem.severity, problem.kind, problem.ref or ("", "")))


def _of_group(group: GroupOverview, now: int, acked: int, failed: int) -> Iterator[Problem]:
    ref = group.ref
    waits = _age(now, group.oldest_at)
    if group.after_seek:
        text = _("A seek of %(ref)s has begun and not ended: the group stands still until it is run again.")
        yield Problem(0, "seek_ended_early", text % {"ref": ref}, ref)
    elif group.paused:
        text = _("%(ref)s is paused; %(lag)s.") % {"ref": ref, "lag": _waiting(group.lag)}
        yield Problem(1 if group.lag else 2, "paused", text, ref)
    elif group.lag and not group.live and waits >= STUCK_SECONDS:
        text = _("Nobody works for %(ref)s; %(lag)s, the oldest for %(age)s. Cleaning up waits for the group, too.")
        values = {"ref": ref, "lag": _waiting(group.lag), "age": seconds(waits)}
        yield Problem(0, "no_subscriber", text % values, ref)
    elif group.live:
        found = [*_stuck(group, now), *_unserved(group, now)]
        yield from found
        if not (found or acked or failed):
            yield from _still(group, now)
    if failed and not acked and group.live:
        text = ngettext(
            "Every attempt of %(ref)s fails: %(number)s failure and no success in ten minutes.",
            "Every attempt of %(ref)s fails: %(number)s failures and no success in ten minutes.",
            failed,
        )
        yield Problem(0, "failing", text % {"ref": ref, "number": failed}, ref)
    if group.dead_letters:
        text = _("%(ref)s has given up on messages: %(number)s in %(topic)s.")
        values = {"ref": ref, "number": str(group.dead_letters), "topic": names.dlq_topic(ref.topic)}
        yield Problem(1, "dead_letters", text % values, ref)


def _stuck(group: GroupOverview, now: int) -> Iterator[Problem]:
    """Partitions that wait behind one message that fails again and again."""
    for head in group.heads:
        waits = _age(now, head.published_at)
        if head.attempts and waits >= STUCK_SECONDS:
            text = _(
                "The partition %(key)s of %(ref)s waits behind message %(offset)s, which has failed %(times)s "
                "and is %(age)s old."
            )
            times = ngettext("once", "%(number)s times", head.attempts) % {"number": head.attempts}
            values = {"key": repr(head.key), "ref": group.ref, "offset": head.offset, "times": times}
            severity = 1 if group.mode == "ordered" else 2
            yield Problem(severity, "stuck", text % {**values, "age": seconds(waits)}, group.ref, head.key, head.offset)


def _still(group: GroupOverview, now: int) -> Iterator[Problem]:
    """A group with living subscribers of which nothing ends: handlers that hang, or subscribers that do not get on."""
    for head in group.heads:
        waits = _age(now, head.published_at)
        # What waits for its time, after a backoff or a snooze, may do so.
        if waits >= FAILING_SECONDS and (head.delivered_by or head.invisible_until <= now):
            text = _("Nothing of %(ref)s has ended in ten minutes, with subscribers alive; %(lag)s, one for %(age)s.")
            values = {"ref": group.ref, "lag": _waiting(group.lag), "age": seconds(waits)}
            yield Problem(1, "still", text % values, group.ref, head.key, head.offset)
            return


def _unserved(group: GroupOverview, now: int) -> Iterator[Problem]:
    subsets = {row.subset for row in group.live}
    if EVERYTHING in subsets:
        return
    for head in group.heads:
        if not any(head.key in subset for subset in subsets) and _age(now, head.published_at) >= STUCK_SECONDS:
            text = _("No live subscriber of %(ref)s takes the partition %(key)s: all work on other subsets.")
            yield Problem(0, "unserved", text % {"ref": group.ref, "key": repr(head.key)}, group.ref, head.key)
            return


def _silent(overview: QueueOverview) -> Iterator[Problem]:
    """Subscribers that have neither left nor given a sign of life, each once."""
    last: dict[str, tuple[int, GroupRef]] = {}
    for group in overview.groups:
        for row in group.subscribers:
            if not row.live:
                last[row.name] = max(last.get(row.name, (0, row.ref)), (row.heartbeat_at, row.ref))
    for name, (at, ref) in sorted(last.items()):
        text = _("The subscriber %(name)s vanished: no sign of life for %(age)s.")
        values = {"name": name, "age": seconds(_age(overview.now, at))}
        yield Problem(2, "silent", text % values, ref, subscriber=name)


def _outbox(overview: QueueOverview) -> Iterator[Problem]:
    waits = _age(overview.now, overview.outbox.waiting_since)
    if overview.outbox.waiting and waits >= OUTBOX_SECONDS:
        values = {"lag": _waiting(overview.outbox.waiting), "age": seconds(waits)}
        if _age(overview.now, overview.sequenced_at) < OUTBOX_SECONDS:
            # Much was committed at once, or by a transaction that had lasted: no reason to call anybody.
            text = _(
                "The outbox is behind: %(lag)s to be moved into the log, the oldest for %(age)s. It is being moved."
            )
            yield Problem(1, "outbox_behind", text % values)
            return
        text = _("The outbox grows: %(lag)s to be moved into the log, the oldest for %(age)s. No subscriber does it.")
        yield Problem(0, "outbox", text % values)


def groupless_topics(session: Session, in_log: Iterable[str], now: int) -> Iterator[Problem]:
    """Topics that nobody reads, a mistyped one perhaps: what is in them is deleted without having been handled.

    Args:
        in_log: the topics that have messages in the log.
        now: the database's clock, epoch milliseconds.
    """
    for one in groupless.find(session, in_log):
        text = ngettext(
            "Topic %(topic)s has %(number)s message but no consumer group.",
            "Topic %(topic)s has %(number)s messages but no consumer group.",
            one.messages.value,
        )
        retention = get_settings().retention_of(one.topic, has_groups=False)
        if retention is None:
            fate = _("GC never deletes them.")
        elif one.oldest_at is None:
            fate = _("GC deletes each %(retention)s after it entered the log.")
        else:
            fate = _("GC deletes each %(retention)s after it entered the log, the first in %(left)s.")
        values = {
            "topic": repr(one.topic),
            "number": one.messages,
            "retention": seconds(retention or 0),
            "left": seconds(max(0.0, (retention or 0) - _age(now, one.oldest_at))),
        }
        yield Problem(1, "groupless", f"{text} {fate}" % values, topic=one.topic)


def _long_transactions(session: Session) -> Iterator[Problem]:
    sql = session.dialect.oldest_transaction
    if sql is None:
        return
    try:
        found = session.row(sql)
    except Error as error:
        if session.dialect.is_denied(error):
            return  # the database's user may not look: then nothing is said of it
        raise
    if found is not None and found[0] >= TRANSACTION_SECONDS:
        text = _(
            "A transaction has been open for %(age)s (connection %(id)s): until it ends, nothing deleted since is "
            "cleaned up by the server, and the queue's looks become slower."
        )
        yield Problem(1, "long_transaction", text % {"age": seconds(found[0]), "id": found[1]})


def _waiting(count: Count) -> str:
    return ngettext("%(count)s message waits", "%(count)s messages wait", count.value) % {"count": count}


def _age(now: int, since: int | None) -> float:
    return 0.0 if since is None else max(0.0, (now - since) / 1000)


def seconds(number: float) -> str:
    """A length of time in its largest unit: ``45 s``, ``12 min``, ``3 h``, ``2 d``."""
    for size, unit in ((86_400, _("d")), (3600, _("h")), (60, _("min"))):
        if number >= size:
            return f"{number / size:.0f} {unit}"
    return f"{number:.0f} {_('s')}"
