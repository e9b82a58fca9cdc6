"""Erase a publisher's key: its messages of a topic, and what refers to them.

A message moves from the outbox or the quarantine into the log, and its dead letter back into the outbox. So all of them
are searched again until nothing is found. Each step is a transaction that deletes messages with what refers to them. A
group's delivery of one is settled as deleted, except while a live subscriber holds it: that one ends its attempt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.arguments import checked, spelled_out
from django_mysqlqueue.db.tables import EVENTS, LEASES, LOG, OFFSETS, OPERATIONS, OUTBOX, QUARANTINE, SLOTS, STATE
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerGroup, Schedule
from django_mysqlqueue.names.keys import PARTITION_PREFIX, lane_of, lanes
from django_mysqlqueue.operations.arguments import key_of
from django_mysqlqueue.operations.declaring import How, operating
from django_mysqlqueue.operations.limits import COUNTED, LIMITS
from django_mysqlqueue.operations.results import Result, number_said, result_of
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.delivery_limits import as_limit_key
from django_mysqlqueue.options.topics import dlq_topic, first_topic
from django_mysqlqueue.service import (
    audit,
    debouncing,
    groups,
    heartbeats,
    leasing,
    partitions,
    pruning,
    quarantine,
    retention,
    scheduling,
    settling,
    watermarks,
)
from django_mysqlqueue.service.deliveries import Action, Claimed, Settlement
from django_mysqlqueue.service.losses import HELD_BY
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.base import lane_partition
from django_mysqlqueue.sql.session import Session, among, flat, matches, pieces, run
from django_mysqlqueue.text.humanize import listed

ERASE = audit.Action("erase", gettext_lazy("Erase a key"), audit.MESSAGES)
READ = 5000
"""Number of rows that a search reads at once."""
ROUNDS = 20
"""How often it is searched for messages that have moved, or were published meanwhile."""
BY_OFFSET = "s.consumer_group = %s AND s.topic = %s AND s.partition_key = %s AND s.message_offset = v.o"


@dataclass(frozen=True, slots=True)
class _Key:
    """A publisher's key, and the topics under which its messages and their dead letters are stored."""

    name: str
    topics: tuple[str, ...]

    def condition(self) -> tuple[str, tuple[str, ...]]:
        """Return the condition for a WHERE on a table of messages as ``s``, and its parameters."""
        is_key = f"(s.publisher_key = %s OR {lane_partition('s.partition_key')} = %s)"
        return f"{among('s.topic', self.topics)} AND {is_key}", (*self.topics, self.name, self.name)


@spelled_out
@checked(OperationRefused, only=("progress",))
def erase(topic: str, key: str, *, progress: Callable[[int], object] = lambda rows: None, **how: Unpack[How]) -> Result:
    """Erase all messages that were published to a topic with a key. This cannot be undone.

    It deletes them from the log, with their dead letters, from the outbox, whether or not they are scheduled, and from
    the quarantine; and their recorded deliveries. Groups settle those that they have claimed as deleted. A subscriber
    that has one of them in flight ends its attempt. The summary names what is left and why. The archive is not changed:
    the command ``queueerase`` does that, too.

    Args:
        topic: the topic, or its DLQ topic.
        key: the key with which the messages were published.
        progress: called after each transaction with the number of messages that it deleted.

    Raises:
        OperationRefused: the topic is a queue of jobs, whose keys are their tasks; the key is not valid; or a seek,
            drop or move of a group that has claimed some of the messages has not finished. What was erased before that
            stays erased.
    """
    with operating(how, topic=topic) as (alias, by, dry_run):
        if not key_of(key, None):
            raise OperationRefused("key '': must not be empty")
        if job_queues.is_queue(first_topic(topic)):
            raise OperationRefused(f"The topic {topic!r} is a queue of jobs: the key of a job is its task.")
        wanted, session = _Key(key, topics_of(alias, topic)), Session(alias)
        if dry_run:
            number = _count(session, wanted, most=COUNTED)
            text = _("Messages with this key in %(topic)s, and recorded deliveries, that will be erased: %(number)s.")
        else:
            number = _erase_all(alias, wanted, topic, progress=progress, **by)
            text = _("Erased messages with this key in %(topic)s, and recorded deliveries: %(number)s.")
        values = {"topic": topic, "number": number_said(number, dry_run=dry_run)}
        left = [] if dry_run else _in_use(session, wanted)
        return result_of(Result, ERASE, number, text % values, *left, *_kept(session, wanted), dry_run=dry_run)


def topics_of(alias: str, topic: str) -> tuple[str, ...]:
    """Return the topics under which a database has the messages of a topic, and their dead letters."""
    first = first_topic(topic)
    return tuple(
        dict.fromkeys(one for each in (first, dlq_topic(first)) for one in scheduling.stored_topics(each, alias))
    )


def _count(session: Session, key: _Key, *, most: int) -> int:
    number = 0
    for page in (
        *(_rows(session, table, key) for table in (OUTBOX, QUARANTINE)),
        (offsets for *_place, offsets in _messages(session, key)),
        _events(session, key),
    ):
        for ids in page:
            number += len(ids)
            if number >= most:
                return most
    return number


def _erase_all(alias: str, key: _Key, topic: str, *, progress: Callable[[int], object], **by: Unpack[audit.By]) -> int:
    session = Session(alias)
    # Without the key, which would be left.
    operation = run(alias, lambda session: audit.begin(session, ERASE, GroupRef("", topic), **by))
    beat = audit.beats(alias, operation)
    done = 0

    def change(delete: Callable[[Session], int]) -> int:
        def write(session: Session) -> int:
            number = delete(session)
            audit.add(session, operation, number)
            return number

        nonlocal done
        beat()
        number = run(alias, write)
        done += number
        progress(number)
        return number

    with audit.ending(alias, operation):
        for _round in range(ROUNDS):
            before = done
            for ids in _rows(session, OUTBOX, key):
                change(partial(_delete_from_outbox, ids=ids))
            for ids in _rows(session, QUARANTINE, key):
                change(lambda session, ids=ids: quarantine.delete(session, ids))  # type: ignore[misc]
            for stored, partition, offsets in _messages(session, key):
                change(partial(_delete_from_log, topic=stored, partition=partition, offsets=offsets, by=by["actor"]))
            if done == before:
                break
        for ids in _events(session, key):
            change(partial(_delete_events, ids=ids))
        _forget(alias, key)
    return done


# -- what is searched --------------------------------------------------------------


def _rows(session: Session, table: str, key: _Key) -> Iterator[list[int]]:
    """Yield the primary keys of messages in the outbox or the quarantine. Those that are added meanwhile are left."""
    condition, parameters = key.condition()
    column = "outbox_id" if table == OUTBOX else "quarantine_id"
    yield from _found(session, table, column, condition, parameters)


def _events(session: Session, key: _Key) -> Iterator[list[int]]:
    """Yield the primary keys of recorded deliveries in the key's partitions whose messages are no longer in the log."""
    is_of_key = f"{lane_partition('s.partition_key')} = %s"
    condition = f"{among('s.topic', key.topics)} AND {is_of_key} AND {_has_no_message(session)}"
    yield from _found(session, EVENTS, "id", condition, (*key.topics, key.name))


def _has_no_message(session: Session) -> str:
    # Not NOT EXISTS: MySQL may read all rows of the log once, if these seem to be few.
    hint = session.force_index("PRIMARY")
    return f"(SELECT 1 FROM {LOG} m{hint} WHERE m.`offset` = s.message_offset LIMIT 1) IS NULL"


def _found(session: Session, table: str, column: str, condition: str, parameters: Sequence[Any]) -> Iterator[list[int]]:
    """Read a table along its primary key, and yield those of the rows that meet a condition, in pages."""
    source = f"FROM {table} s{session.force_index('PRIMARY')} WHERE s.{column} > %s"
    newest = session.row(f"SELECT s.{column} {source} ORDER BY s.{column} DESC LIMIT 1", (0,))
    last, end = 0, 0 if newest is None else newest[0]
    while last < end:
        rows = session.rows(
            f"SELECT s.{column}, {matches(condition)} {source} AND s.{column} <= %s ORDER BY s.{column} LIMIT %s",
            (*parameters, last, end, READ),
        )
        if not rows:
            return
        last = rows[-1][0]
        yield from map(list, pieces([row[0] for row in rows if row[1]], LIMITS.rows))


def _messages(session: Session, key: _Key) -> Iterator[tuple[str, str, list[int]]]:
    """Yield topic, partition and offsets of the key's messages in the log, in pages."""
    condition, parameters = key.condition()
    page = (
        f"SELECT s.`offset`, {matches(condition)} FROM {LOG} s{session.force_index('queue_messages_partition')} "
        "WHERE s.topic = %s AND s.partition_key = %s AND s.`offset` > %s ORDER BY s.`offset` LIMIT %s"
    )
    for topic in key.topics:
        for partition in (*partitions.among(session, topic, lanes(key.name)), *_hashed(session, topic)):
            above = 0
            while rows := session.rows(page, (*parameters, topic, partition, above, READ)):
                above = rows[-1][0]
                for offsets in pieces([row[0] for row in rows if row[1]], LIMITS.rows):
                    yield topic, partition, list(offsets)


def _hashed(session: Session, topic: str) -> Iterator[str]:
    """Yield the partitions to which keys were hashed, whatever number of them ``PARTITIONS`` has had."""
    after: str | None = None
    while keys := partitions.in_log(session, topic, after=after, limit=READ, since=PARTITION_PREFIX):
        for after in keys:
            if not after.startswith(PARTITION_PREFIX):
                return
            if lane_of(after).partition.startswith(PARTITION_PREFIX):
                yield after


# -- steps --------------------------------------------------------------------------


def _delete_from_outbox(session: Session, ids: Sequence[int]) -> int:
    select = f"{session.dialect.join_to(OUTBOX, 's')} ON s.outbox_id = v.i{session.dialect.for_update}"
    locked = sorted(flat(session.joined("SELECT s.outbox_id", "i", ids, select)))
    debouncing.forget(session, locked)
    return session.delete(OUTBOX, "i", locked, "s.outbox_id = v.i")


def _delete_from_log(session: Session, topic: str, partition: str, offsets: Sequence[int], by: str) -> int:
    for ref in _refs(session, (topic,)):
        _settle(session, ref, partition, offsets, by)
    of_offset = f"{session.dialect.join_to(EVENTS, 's', 'queue_delivery_events_message')} ON s.message_offset = v.o"
    _delete_events(session, sorted(flat(session.joined("SELECT s.id", "o", offsets, of_offset, plain=True))))
    return session.delete(LOG, "o", offsets, "s.`offset` = v.o")


def _delete_events(session: Session, ids: Sequence[int]) -> int:
    return session.delete(EVENTS, "i", ids, "s.id = v.i")


def _settle(session: Session, ref: GroupRef, partition: str, offsets: Sequence[int], by: str) -> None:
    """Settle what a group has claimed of the messages, and no live subscriber holds; delete the errors of all."""
    select = f"SELECT s.message_offset, s.delivery_token, s.retry_count, {HELD_BY}, s.acked"
    join = f"{session.dialect.join_to(STATE, 's')} ON {BY_OFFSET}"
    place = (*ref, partition)
    if not session.joined(select, "o", offsets, join, after=place, plain=True):
        return
    groups.refuse_unfinished(ref, groups.lock(session, ref).after_seek)
    live = heartbeats.live(session, [ref], int(get_settings().lease_duration * 1000))[ref]
    # Skip locked rows: the transaction that holds a partition's offsets row moves its watermark.
    locked = watermarks.lock(session, ref, [partition], skip_locked=True)
    deleted = [
        Settlement(Claimed(ref, partition, offset, token, retries, suspect=False, size=0, by=by), Action.DELETED)
        for offset, token, retries, held_by, is_settled in session.joined(
            select, "o", offsets, join, after=place, plain=True
        )
        if not is_settled and held_by not in live
    ]
    flushed = settling.settle(session, ref, deleted, locked, max_attempts=None)
    watermarks.store(session, ref, locked, flushed.watermarks, {})
    # Also those that are held, unless an atomic handler has locked them.
    free = session.joined("SELECT s.message_offset", "o", offsets, f"{join}{session.dialect.skip_locked}", after=place)
    session.update(STATE, "o", flat(free), BY_OFFSET, {"last_error": "''"}, after=place)
    groups.change(session, ref, revise=True)  # Owners of ordered partitions keep backoffs in memory.


def _forget(alias: str, key: _Key) -> None:
    """Delete what GC would delete later: rows of the key's partitions, which are empty now, and of coalesce keys."""
    session, names = Session(alias), lanes(key.name)
    lease_ms = int(get_settings().lease_duration * 1000)
    for ref in _refs(session, key.topics):
        live = heartbeats.live(session, [ref], lease_ms)[ref]
        owners: dict[str, list[str]] = {}
        for partition, owner in _of_partitions(session, LEASES, "s.partition_key, s.leased_by", ref, names):
            owners.setdefault(owner, []).append(partition)
        for owner in sorted(owners.keys() - live.keys()):
            leasing.drop_drained(alias, ref, owner, owners[owner])
        run(alias, lambda session, ref=ref: retention.forget_positions(session, ref, names))  # type: ignore[misc]
    pruning.forget_unreferenced(alias)


def _of_partitions(session: Session, table: str, columns: str, ref: GroupRef, names: Sequence[str]) -> list[Any]:
    join = f"{session.dialect.join_to(table, 's')} ON s.consumer_group = %s AND s.topic = %s AND s.partition_key = v.k"
    return session.joined(f"SELECT {columns}", "k", names, join, after=ref, plain=True)


def _refs(session: Session, topics: Sequence[str]) -> list[GroupRef]:
    rows = ConsumerGroup.objects.using(session.using).filter(topic__in=topics)
    return sorted(GroupRef(*row) for row in rows.values_list("consumer_group", "topic"))


# -- what is left --------------------------------------------------------------------


def _in_use(session: Session, key: _Key) -> list[str]:
    """Return sentences about rows that name the key, or belong to deleted messages, because subscribers use them."""
    held = positions = 0
    names = lanes(key.name)
    for ref in _refs(session, key.topics):
        held += _deliveries_without_message(session, ref, key.name)
        for table in (LEASES, OFFSETS):
            positions += len(_of_partitions(session, table, "s.partition_key", ref, names))
        of_key = f"{SLOTS}{session.force_index('PRIMARY')} WHERE consumer_group = %s AND topic = %s AND limit_key = %s"
        positions += len(session.rows(f"SELECT 1 FROM {of_key}", (*ref, as_limit_key(key.name))))
    deliveries = _(
        "Deliveries of messages that are no longer in the log, which subscribers hold: %(number)s. They end with their "
        "attempts. Erase the key again afterwards."
    )
    others = _("Positions, leases and limits of the key: %(number)s. They are deleted when they are no longer used.")
    return [text % {"number": f"{number:,}"} for number, text in ((held, deliveries), (positions, others)) if number]


def _kept(session: Session, key: _Key) -> list[str]:
    """Return sentences about rows that are never erased, and perhaps contain the key."""
    configured = [
        str(row)
        for row in ConsumerGroup.objects.using(session.using).filter(topic__in=key.topics)
        if _contains(json.dumps([row.overrides, row.limits, row.filter]), key.name)
    ]
    schedules = [
        row.name
        for row in Schedule.objects.using(session.using).filter(name__gt="").order_by("name")
        if _contains(row.definition, key.name)
    ]
    events = _hashed_events(session, key)
    hashed = _(
        "Recorded deliveries of messages that GC has deleted, in partitions to which keys are hashed: %(number)s. They "
        "have no key, but may have errors of messages of this one. They are kept for HISTORY_RETENTION."
    )
    named = (
        (
            _audited(session, key),
            _("Entries of the audit log that contain the key: %(names)s. They are kept for a year."),
        ),
        (schedules, _("Recurring schedules that contain the key: %(names)s.")),
        (configured, _("Groups whose options contain the key: %(names)s.")),
    )
    texts = [hashed % {"number": f"{events:,}"}] if events else []
    return texts + [text % {"names": listed(names)} for names, text in named if names]


def _contains(text: str, key: str) -> bool:
    """Return whether JSON contains a key."""
    return any(json.dumps(key, ensure_ascii=is_ascii)[1:-1] in text for is_ascii in (True, False))


def _deliveries_without_message(session: Session, ref: GroupRef, key: str) -> int:
    """Count a group's deliveries in the partitions of the key and in hashed ones whose messages were deleted."""
    partition = lane_partition("s.partition_key")
    return int(
        session.one(
            f"SELECT COUNT(*) FROM {STATE} s{session.force_index('PRIMARY')} "
            "WHERE s.consumer_group = %s AND s.topic = %s "
            f"AND ({partition} = %s OR SUBSTR({partition}, 1, %s) = %s) "
            f"AND {_has_no_message(session)}",
            (*ref, key, len(PARTITION_PREFIX), PARTITION_PREFIX),
        )[0]
    )


def _hashed_events(session: Session, key: _Key) -> int:
    """Count recorded deliveries in hashed partitions whose messages are no longer in the log."""
    is_hashed = f"SUBSTR({lane_partition('s.partition_key')}, 1, %s) = %s"
    condition = f"{among('s.topic', key.topics)} AND {is_hashed} AND {_has_no_message(session)}"
    parameters = (*key.topics, len(PARTITION_PREFIX), PARTITION_PREFIX)
    return sum(len(ids) for ids in _found(session, EVENTS, "id", condition, parameters))


def _audited(session: Session, key: _Key) -> list[str]:
    """Return the ids of the entries of the audit log that contain the key."""
    texts = ("s.detail", key.name), ("s.detail", repr(key.name)[1:-1]), ("s.reason", key.name)
    is_in = " OR ".join(f"INSTR({column}, %s) > 0" for column, _ in texts)
    condition = f"{among('s.topic', key.topics)} AND ({is_in})"
    pages = _found(session, OPERATIONS, "id", condition, (*key.topics, *(text for _, text in texts)))
    return [str(one) for ids in pages for one in ids]
