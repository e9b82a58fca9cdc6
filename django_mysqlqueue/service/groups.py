"""Consumer groups: registering them, fencing claims from them, pausing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from django.db.models import F, Model

from django_mysqlqueue.exceptions import OperationRefused, SubscriberError
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.service import log
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, flat, run

GROUPS = ConsumerGroup._meta.db_table


@dataclass(frozen=True, slots=True)
class Registered:
    """A group as the database knows it."""

    ref: GroupRef
    mode: str
    start_offset: int
    paused: bool


def waiting_since(published_at: int, registered_at: int, sought_at: int) -> int:
    """Since when a message of the log waits for a group: not from before it could be handled at all.

    Args:
        published_at: when it took its place in the log, epoch milliseconds.
        registered_at: when the group was registered.
        sought_at: when its last seek began or ended; 0: never.
    """
    return max(published_at, registered_at, sought_at)


@dataclass(frozen=True, slots=True)
class Fence:
    """A group row locked shared: until the transaction ends it is not paused, sought, dropped or changed."""

    paused: bool
    start_offset: int
    now: int
    operation: int
    """Id of the seek or drop that is under way; 0: none."""
    after_seek: str
    mode: str


def register(using: str, ref: GroupRef, *, mode: str, start: str) -> Registered:
    """Registers a group if it is new: from then on GC keeps what it has not passed.

    ``start="latest"`` begins behind the log's present end: messages that were
    published but not yet sequenced still reach the group.
    """
    run(using, lambda session: _insert(session, ref, mode, start))
    registered = find(using, ref)
    if registered is None:
        raise SubscriberError(f"The group {ref.group!r} of {ref.topic!r} was dropped while it was registered.")
    return registered


def _insert(session: Session, ref: GroupRef, mode: str, start: str) -> None:
    if ConsumerGroup.objects.using(session.using).filter(consumer_group=ref.group, topic=ref.topic).exists():
        return  # so that a start-up takes no lock that a running group would wait for
    # Read before, not inside the INSERT: that would lock what it reads at some isolation levels.
    offset = log.end_of_log(session) if start == "latest" else 0
    session.execute(
        f"INSERT INTO {GROUPS} (consumer_group, topic, mode, start_offset) VALUES (%s, %s, %s, %s)"
        + session.dialect.on_conflict_keep(GROUPS, ("consumer_group", "topic")),
        (ref.group, ref.topic, mode, offset),
    )


def find(using: str, ref: GroupRef) -> Registered | None:
    """Reads a group; None if it is not registered. (``migrate`` reads groups too, on the schema of any release.)"""
    row = (
        ConsumerGroup.objects.using(using)
        .filter(consumer_group=ref.group, topic=ref.topic)
        .values_list("mode", "start_offset", "paused")
        .first()
    )
    return None if row is None else Registered(ref, *row)


def registered_refs(using: str) -> list[GroupRef]:
    """Every group, in order of topic and group."""
    rows = ConsumerGroup.objects.using(using).order_by("topic", "consumer_group")
    return [GroupRef(*row) for row in rows.values_list("consumer_group", "topic")]


def fence(session: Session, ref: GroupRef) -> Fence | None:
    """Locks the group row shared; None if the group has been dropped."""
    row = session.row(
        f"SELECT paused, start_offset, {session.dialect.now_ms}, operation, after_seek, mode FROM {GROUPS} "
        f"WHERE consumer_group = %s AND topic = %s{session.dialect.share_lock}",
        ref,
    )
    return None if row is None else Fence(bool(row[0]), int(row[1]), int(row[2]), int(row[3]), row[4], row[5])


def wait_for_claims(session: Session, ref: GroupRef) -> None:
    """Locks the group row exclusively: every claim that held it shared is over."""
    group = ConsumerGroup.objects.using(session.using).filter(consumer_group=ref.group, topic=ref.topic)
    list(group.select_for_update().values_list("id"))


@dataclass(frozen=True, slots=True)
class GroupControls:
    """What operators have said of a group, for subscribers to follow."""

    paused: bool
    mode: str
    revision: int
    """Rises when what a subscriber remembers of the group is out of date."""


def group_controls(session: Session, refs: Sequence[GroupRef]) -> dict[GroupRef, GroupControls]:
    """Reads what operators have said of some groups, one query; a dropped group is not in it."""
    if not refs:
        return {}
    rows = session.rows(
        "SELECT s.consumer_group, s.topic, s.paused, s.mode, s.revision "
        f"FROM {session.dialect.rows(('g', 't'), len(refs))} "
        f"{session.dialect.join_to(GROUPS, 's', 'queue_consumer_groups_name')} "
        "ON s.consumer_group = v.g AND s.topic = v.t",
        flat(refs),
    )
    return {
        GroupRef(group, topic): GroupControls(bool(paused), mode, int(revision))
        for group, topic, paused, mode, revision in rows
    }


class Locked(NamedTuple):
    """A group row under its exclusive lock: no claim of the group is under way, and none begins."""

    id: int
    """The number of this registration: a group that is dropped and registered again has another one."""
    paused: bool
    start_offset: int
    after_seek: str
    operation: int
    """Id of the seek or drop that is under way; 0: none."""
    mode: str


def lock(session: Session, ref: GroupRef) -> Locked:
    """Locks a group's row exclusively.

    Raises:
        OperationRefused: there is no such group.
    """
    group = ConsumerGroup.objects.using(session.using).filter(consumer_group=ref.group, topic=ref.topic)
    rows = list(group.select_for_update().values_list(*Locked._fields))
    if not rows:
        raise OperationRefused(no_group_text(ref))
    return Locked(*rows[0])


def no_group_text(ref: GroupRef) -> str:
    """What is said of a group that is not registered."""
    return f"There is no group {ref.group!r} of {ref.topic!r}."


def unfinished(after_seek: str) -> Literal["", "seek", "drop"]:
    """What has begun on a group and not ended, by the column ``after_seek`` of its row."""
    if not after_seek:
        return ""
    return "drop" if after_seek == ConsumerGroup.AfterSeek.DROPPED else "seek"


def refuse_unfinished(ref: GroupRef, after_seek: str) -> None:
    """Keeps other operations from what a seek or drop has only half done.

    Args:
        after_seek: the column of the group row, read under its exclusive lock.

    Raises:
        OperationRefused: a seek or drop of the group has not finished.
    """
    if action := unfinished(after_seek):
        raise OperationRefused(
            f"A {action} of the group {ref.group!r} of {ref.topic!r} has not finished. "
            "If it was interrupted, run it again."
        )


def change(session: Session, ref: GroupRef, *, revise: bool = False, **columns: object) -> None:
    """Writes to a group row that is locked; with ``revise`` subscribers read the group's state anew."""
    values: dict[str, object] = {**columns, "revision": F("revision") + 1} if revise else columns
    ConsumerGroup.objects.using(session.using).filter(consumer_group=ref.group, topic=ref.topic).update(**values)


def delete_rows(session: Session, ref: GroupRef, model: type[Model], key: str, most: int) -> int:
    """Deletes the group's next rows of a table by primary key, at most ``most``; returns how many.

    Args:
        model: of a table whose primary key is group, topic and one more column.
        key: that column.
    """
    table = model._meta.db_table
    rows = session.rows(
        f"SELECT {key} FROM {table}{session.dialect.force_index('PRIMARY')} "
        f"WHERE consumer_group = %s AND topic = %s ORDER BY {key} LIMIT %s",
        (*ref, most),
    )
    if rows:
        on = f"s.consumer_group = %s AND s.topic = %s AND s.{key} = v.k"
        session.execute(session.dialect.delete_joined(table, ("k",), len(rows), on), (*flat(rows), *ref))
    return len(rows)
