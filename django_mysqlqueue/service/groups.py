"""Consumer groups: registering and locking them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from django.db.models import F, Model
from django.utils.translation import gettext_lazy

from django_mysqlqueue.db.tables import GROUPS
from django_mysqlqueue.exceptions import OperationRefused, SubscriberError
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.service import audit, log
from django_mysqlqueue.service.clocks import DatabaseClock
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.schedules import exists_editable
from django_mysqlqueue.sql.session import Session, flat, run


class Registered(NamedTuple):
    """A registered group."""

    ref: GroupRef
    mode: str
    start_offset: int
    paused: bool


def waiting_since(published_at: int, registered_at: int, sought_at: int) -> int:
    """Return since when a message of the log waits for a group, not counting time in which the group could not get it.

    All times are in epoch milliseconds.

    ``sought_at``: when the group's last seek began or ended; 0 if there was none.
    """
    return max(published_at, registered_at, sought_at)


class OptionColumns(NamedTuple):
    """The columns of a group row from which its subscribers take options, as JSON text."""

    limits: str = "{}"
    filter: str = "{}"
    allowed_users: str = "{}"
    overrides: str = "{}"


REGISTERED: Mapping[str, tuple[audit.Action, Callable[[Mapping[str, Any]], str]]] = {
    "limits": (
        audit.Action("limits", gettext_lazy("Register limits")),
        lambda found: ", ".join(f"{name}={value}" for name, value in found.items()) or "no limits",
    ),
    "filter": (
        audit.Action("filter", gettext_lazy("Register filter")),
        lambda found: json.dumps(found, ensure_ascii=False) if found else "no filter",
    ),
    "allowed_users": (
        audit.Action("allowed_users", gettext_lazy("Register allowed users")),
        lambda found: ", ".join(found.get("users", ())) or "all users",
    ),
}
"""The columns with options that ``migrate`` registers: the action in the audit log, and how it describes a value."""


class Fence(NamedTuple):
    """A group row under a shared lock: the group cannot be paused, sought, dropped or changed before the COMMIT."""

    paused: bool
    start_offset: int
    now: int
    operation: int
    """The id of the seek or drop in progress; 0 if there is none."""
    after_seek: str
    mode: str
    options: OptionColumns
    asked_at: float
    """The monotonic time at which the database was asked for ``now``."""


def register(
    using: str,
    ref: GroupRef,
    *,
    mode: str,
    start: str,
    options: Mapping[str, Mapping[str, object]] | None = None,
    check: Callable[[Session], None] | None = None,
) -> Registered:
    """Register a group if it is new. From then on, GC keeps messages that the group has not settled.

    ``start``: where a new group starts. ``"latest"`` is the current end of the log: messages that were published but
    have not entered the log are delivered to the group. ``options``: the options of a new group: by column of
    ``REGISTERED``, a JSON object. ``check``: called before a new group is inserted; raises an exception to refuse it.

    Returns:
        The group as it is registered, which may be with another mode.

    Raises:
        SubscriberError: the group was dropped at the same time.
    """
    run(using, lambda session: _insert(session, ref, mode, start, options or {}, check))
    registered = find(using, ref)
    if registered is None:
        raise SubscriberError(
            f"The group {ref.group!r} on topic {ref.topic!r} was dropped while it was being registered."
        )
    return registered


def _insert(
    session: Session,
    ref: GroupRef,
    mode: str,
    start: str,
    options: Mapping[str, Mapping[str, object]],
    check: Callable[[Session], None] | None,
) -> None:
    if ConsumerGroup.objects.using(session.using).filter(consumer_group=ref.group, topic=ref.topic).exists():
        return  # Without a lock, so that a running group does not wait for a subscriber that starts.
    if check is not None:
        check(session)
    # Read before the INSERT, not inside it: at some isolation levels, the INSERT would lock the rows that it reads.
    offset = log.end_of_log(session) if start == "latest" else 0
    given = {column: json.dumps(value) for column, value in options.items() if value}
    session.execute(
        f"INSERT INTO {GROUPS} ({', '.join(('consumer_group', 'topic', 'mode', 'start_offset', *given))}) "
        f"VALUES (%s, %s, %s, %s{', %s' * len(given)})"
        + session.dialect.on_conflict_keep(GROUPS, ("consumer_group", "topic")),
        (ref.group, ref.topic, mode, offset, *given.values()),
    )


def register_options(
    using: str,
    ref: GroupRef,
    column: str,
    options: Mapping[str, object],
    *,
    actor: str,
    check: Callable[[Session, GroupRef], None] | None = None,
) -> bool:
    """Replace registered options of a group, in the audit log, too. Its subscribers notice with their next claim.

    ``column``: the column, one of ``REGISTERED``. ``check``: called under the lock before a change; raises an exception
    to refuse it.

    Returns:
        Whether they were others before.
    """

    def write(session: Session) -> bool:
        found = ConsumerGroup.objects.using(session.using).filter(consumer_group=ref.group, topic=ref.topic)
        if _all_are(found.values_list(column, flat=True), options):
            return False  # Without a lock: this is the case at almost every migrate.
        if _all_are(found.select_for_update().values_list(column, flat=True), options):
            return False  # It was dropped, or another process has registered them, in the meantime.
        if check is not None:
            check(session, ref)
        found.update(**{column: dict(options)})
        action, describe = REGISTERED[column]
        audit.once(session, action, 0, ref, actor=actor, detail=describe(options))
        return True

    return run(using, write)


def _all_are(stored: Iterable[object], options: Mapping[str, object]) -> bool:
    """Return whether all stored values are the same JSON. To Python, true is 1; to a filter, it is not."""
    return {json.dumps(value, sort_keys=True) for value in stored} <= {json.dumps(options, sort_keys=True)}


def find(using: str, ref: GroupRef) -> Registered | None:
    """Return a group, or None if it is not registered."""
    row = (
        ConsumerGroup.objects.using(using)
        .filter(consumer_group=ref.group, topic=ref.topic)
        .values_list("mode", "start_offset", "paused")
        .first()
    )
    return None if row is None else Registered(ref, *row)


def registered_refs(using: str) -> list[GroupRef]:
    """Return all groups, in order of topic and group."""
    rows = ConsumerGroup.objects.using(using).order_by("topic", "consumer_group")
    return [GroupRef(*row) for row in rows.values_list("consumer_group", "topic")]


def fence(session: Session, ref: GroupRef, clock: DatabaseClock | None = None) -> Fence | None:
    """Lock a group's row shared, and return it; None if the group was dropped.

    ``clock``: the clock that the caller knows, to be compared with the database's time.
    """
    return ask_fence(session, ref, clock)()


def ask_fence(session: Session, ref: GroupRef, clock: DatabaseClock | None = None) -> Callable[[], Fence | None]:
    """Do the same as ``fence``, and as ``Session.ask``."""
    asked_at = time.monotonic()
    answer = session.ask(
        f"SELECT paused, start_offset, {session.dialect.now_ms}, operation, after_seek, mode, "
        f"{', '.join(OptionColumns._fields)} FROM {GROUPS} "
        f"WHERE consumer_group = %s AND topic = %s{session.dialect.share_lock}",
        ref,
    )

    def read() -> Fence | None:
        rows = answer()
        if not rows:
            return None
        paused, start, now, operation, after_seek, mode, *options = rows[0]
        if clock is not None:
            # At once: a slow flush before it would look like a step back.
            clock.check(int(now), time.monotonic() - asked_at)
        return Fence(
            bool(paused), int(start), int(now), int(operation), after_seek, mode, OptionColumns(*options), asked_at
        )

    return read


def wait_for_claims(session: Session, ref: GroupRef) -> None:
    """Lock a group's row exclusively, which waits for the end of all claims that hold it shared."""
    group = ConsumerGroup.objects.using(session.using).filter(consumer_group=ref.group, topic=ref.topic)
    list(group.select_for_update().values_list("id"))


class GroupControls(NamedTuple):
    """Operators' settings of a group that subscribers have to follow."""

    paused: bool
    mode: str
    revision: tuple[int, int]
    """The id of the registration, and a number that grows: others mean that subscribers' memory of the group is out of
    date."""
    options: OptionColumns
    has_schedules: bool
    """Whether the database has schedules that people have made: it is read here, so that no query asks for it alone."""


def group_controls(session: Session, refs: Sequence[GroupRef]) -> dict[GroupRef, GroupControls]:
    """Return operators' settings of groups, by one query. Groups that were dropped are missing."""
    if not refs:
        return {}
    rows = session.rows(
        "SELECT s.consumer_group, s.topic, s.paused, s.mode, s.id, s.revision, "
        f"{', '.join(f's.{name}' for name in OptionColumns._fields)}, {exists_editable(session)} "
        f"FROM {session.dialect.rows(('g', 't'), len(refs))} "
        f"{session.dialect.join_to(GROUPS, 's', 'queue_consumer_groups_name')} "
        "ON s.consumer_group = v.g AND s.topic = v.t",
        flat(refs),
    )
    return {
        GroupRef(group, topic): GroupControls(
            bool(paused), mode, (int(registration), int(revision)), OptionColumns(*options), bool(has_schedules)
        )
        for group, topic, paused, mode, registration, revision, *options, has_schedules in rows
    }


class Locked(NamedTuple):
    """A group row under its exclusive lock: no claim of the group is in progress, and none begins."""

    id: int
    """The id of the registration. A group that is dropped and registered again has another one."""
    paused: bool
    start_offset: int
    after_seek: str
    operation: int
    """The id of the seek or drop in progress; 0 if there is none."""
    mode: str


def lock(session: Session, ref: GroupRef) -> Locked:
    """Lock a group's row exclusively, and return it.

    Raises:
        OperationRefused: there is no such group.
    """
    group = ConsumerGroup.objects.using(session.using).filter(consumer_group=ref.group, topic=ref.topic)
    rows = list(group.select_for_update().values_list(*Locked._fields))
    if not rows:
        raise OperationRefused(no_group_text(ref))
    return Locked(*rows[0])


def no_group_text(ref: GroupRef) -> str:
    """Return the error for a group that is not registered."""
    return f"There is no group {ref.group!r} on topic {ref.topic!r}."


Unfinished = Literal["", "seek", "drop", "move"]


def unfinished(after_seek: str) -> Unfinished:
    """Return which operation on a group has not finished, from the column ``after_seek`` of its row."""
    if not after_seek:
        return ""
    match after_seek:
        case ConsumerGroup.AfterSeek.DROPPED:
            return "drop"
        case ConsumerGroup.AfterSeek.MOVES:
            return "move"
    return "seek"


def refuse_unfinished(ref: GroupRef, after_seek: str) -> None:
    """Refuse an operation on a group whose seek, drop or move has not finished.

    Raises:
        OperationRefused: a seek, drop or move of the group has not finished.
    """
    action = unfinished(after_seek)
    if action == "move":
        raise OperationRefused(
            f"The group {ref.group!r} on topic {ref.topic!r} waits until it has settled all messages in the database "
            "that its topic leaves. Finish or cancel the move with queuemove."
        )
    if action:
        raise OperationRefused(
            f"A {action} of the group {ref.group!r} on topic {ref.topic!r} has not finished. "
            "If it was interrupted, run it again."
        )


def change(session: Session, ref: GroupRef, *, revise: bool = False, **columns: object) -> None:
    """Change columns of a locked group row."""
    values: dict[str, object] = {**columns, "revision": F("revision") + 1} if revise else columns
    ConsumerGroup.objects.using(session.using).filter(consumer_group=ref.group, topic=ref.topic).update(**values)


def delete_rows(session: Session, ref: GroupRef, model: type[Model], *keys: str, most: int) -> int:
    """Delete the next rows of a group from a table, by primary key; return how many."""
    table = model._meta.db_table
    rows = session.rows(
        f"SELECT {', '.join(keys)} FROM {table}{session.dialect.force_index('PRIMARY')} "
        f"WHERE consumer_group = %s AND topic = %s ORDER BY {', '.join(keys)} LIMIT %s",
        (*ref, most),
    )
    if rows:
        on = " AND ".join(["s.consumer_group = %s AND s.topic = %s", *(f"s.{key} = v.{key}" for key in keys)])
        session.execute(session.dialect.delete_joined(table, keys, len(rows), on), (*flat(rows), *ref))
    return len(rows)
