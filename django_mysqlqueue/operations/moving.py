"""Move: hand a topic over from one database to another while messages are published.

All messages of the topic pass the sequencer of one database, that of the publishers (``VIA``). A route, which is set
under its mutex, divides them: up to an offset they go to the old database, from then on to the new one. There, each
group waits (``AfterSeek.MOVES``) until its namesake has settled everything in the old one. So no message is handled
before an earlier one of its key, and none twice. Each step can be repeated, so an interrupted move is run again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from django.utils.translation import gettext_lazy

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerGroup, OutboxMessage
from django_mysqlqueue.operations import dropping
from django_mysqlqueue.service import audit, groups, leasing, log, relaying, routing
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.routing import HERE, Route
from django_mysqlqueue.sql.session import Session, run

OUTBOX = OutboxMessage._meta.db_table
AfterSeek = ConsumerGroup.AfterSeek
MOVE = audit.Action("move", gettext_lazy("Move topic"))
COPIED = ("mode", "limits", "filter", "allowed_users", "overrides")
"""The columns that a group has in both databases."""
SLICE = 500
"""Partitions per statement."""


@dataclass(frozen=True, slots=True)
class Move:
    """A move of a topic."""

    topic: str
    via: str
    """Alias of the database whose outbox takes the topic's messages."""
    source: str
    """Alias of the database that the groups leave."""
    target: str
    """Alias of the database to which they go."""
    actor: str
    reason: str = ""

    def route(self, alias: str) -> Route:
        """Return the route at ``via`` that leads to a database."""
        return Route(HERE if alias == self.via else alias, self.source)


def groups_of(using: str, topic: str) -> dict[GroupRef, ConsumerGroup]:
    """Return the registered groups of a topic."""
    rows = ConsumerGroup.objects.using(using).filter(topic=topic).order_by("consumer_group")
    return {GroupRef(row.consumer_group, topic): row for row in rows}


def prepare(move: Move) -> None:
    """Register the groups at the target, where they wait, and keep the topic in its current database.

    From then on, settings that name the target can be deployed: what they publish still goes to the source.
    """
    register(move)
    _set_route(move, move.source, planned=move.target)


def register(move: Move) -> None:
    """Register the groups at the target, where they wait, as they are now at the source. Call it before the cut."""
    found = groups_of(move.source, move.topic)
    for ref, row in found.items():
        run(move.target, partial(_register_waiting, move=move, ref=ref, row=row))
    for ref in waiting(move):
        if ref not in found:
            dropping.drop(move.target, ref, actor=move.actor, reason=f"was dropped in {move.source}")


def _register_waiting(session: Session, *, move: Move, ref: GroupRef, row: ConsumerGroup) -> None:
    there = ConsumerGroup.objects.using(session.using).filter(consumer_group=ref.group, topic=ref.topic)
    values = {name: getattr(row, name) for name in COPIED} | {"paused": True, "after_seek": AfterSeek.MOVES}
    found = there.select_for_update().values_list("after_seek", flat=True).first()
    if found is not None:
        if found != AfterSeek.MOVES:
            groups.refuse_unfinished(ref, found)
        there.update(**values)
    else:
        # The log may have messages from an earlier stay, which the group has settled.
        end = log.end_of_log(session)
        there.create(consumer_group=ref.group, topic=ref.topic, start_offset=end, **values)
    _record(session, move, ref, f"waits for its messages in {move.source}")


def waiting(move: Move) -> list[GroupRef]:
    """Return the groups that wait at the target."""
    return _in_state(move, AfterSeek.MOVES)


def _in_state(move: Move, state: str) -> list[GroupRef]:
    return [ref for ref, row in groups_of(move.target, move.topic).items() if row.after_seek == state]


def check_cancel(move: Move) -> None:
    """Refuse if a group has got messages at the target, which only the move can deliver."""
    for ref in waiting(move):
        if not is_drained(move.target, ref):
            raise OperationRefused(
                f"The database {move.target!r} has messages for the group {ref.group!r} on topic {ref.topic!r}: they "
                "were published directly to it. Move the topic."
            )


def cancel(move: Move) -> None:
    """Undo ``prepare``: delete the waiting groups, and let the settings decide again where the topic is."""

    def still_prepared(present: Route | None) -> None:
        if present is not None and present.target != move.route(move.source).target:
            raise OperationRefused(f"The topic {move.topic!r} has begun to move to {move.target!r}: finish the move.")

    # From then on, a move that is about to begin is refused, and nothing more arrives at the target.
    _set_route(move, move.source, check=still_prepared)
    try:
        check_cancel(move)
    except OperationRefused:
        _set_route(move, move.source, planned=move.target, check=still_prepared)
        raise
    if move.target != move.via:
        run(move.target, lambda session: _undo_first_cut(session, move))
    # Those whose drop was interrupted are of a cancel before this one.
    for ref in (*waiting(move), *_in_state(move, AfterSeek.DROPPED)):
        dropping.drop(move.target, ref, actor=move.actor, reason=move.reason or f"stays in {move.source}")
    run(move.via, lambda session: _forget_route(session, move))


def _undo_first_cut(session: Session, move: Move) -> None:
    """Undo the first step of a cut that was interrupted before the second one."""
    if routing.route_of(session, move.topic) == Route(HERE, move.source):
        # What an earlier stay has left in the outbox still has to leave.
        back = Route(move.source, move.target) if _has_scheduled(session, move.topic) else None
        routing.set_route(session, move.topic, back)


def _has_scheduled(session: Session, topic: str) -> bool:
    row = session.row(
        f"SELECT EXISTS(SELECT 1 FROM {OUTBOX}{session.dialect.force_index('queue_outbox_due')} "
        "WHERE deliver_at > 0 AND topic = %s)",
        (topic,),
    )
    return bool(row and row[0])


def _forget_route(session: Session, move: Move) -> None:
    routing.set_route(session, move.topic, None)
    _record(session, move, None, f"cancelled: messages stay in {move.source}")


def cut(move: Move, *, check: Callable[[Route | None], None] | None = None) -> int:
    """Send the topic's messages to the target from now on; return the last offset of ``via`` that went elsewhere.

    ``check``: called with the present route, under the mutex; raises an exception to refuse the move.
    """
    if move.target != move.via:
        # From an earlier stay there, a route may lead away.
        run(move.target, lambda session: routing.set_route(session, move.topic, Route(HERE, move.source)))
    return _set_route(move, move.target, check=check)


def require_prepared(move: Move, present: Route | None) -> None:
    """Refuse if a move is neither prepared nor begun: somebody has cancelled it."""
    if present is None or (present.planned != move.target and present.target != move.route(move.target).target):
        raise OperationRefused(f"The topic {move.topic!r} is not prepared to move to {move.target!r} any more.")


def _set_route(
    move: Move, alias: str, *, planned: str = "", check: Callable[[Route | None], None] | None = None
) -> int:
    def write(session: Session) -> int:
        route = move.route(alias)._replace(planned=planned)
        offset = routing.set_route(session, move.topic, route, check=check)
        _record(session, move, None, f"messages go to {alias}, from offset {offset + 1}")
        return offset

    return run(move.via, write)


def require_cut(move: Move) -> None:
    """Refuse if messages do not go to the target: ``via`` may have gone back to a state before the cut."""
    route = routing.route_of(Session(move.via), move.topic)
    if route is None or route.target != move.route(move.target).target:
        raise OperationRefused(
            f"The database {move.via!r} no longer sends the topic {move.topic!r} to {move.target!r}: it was restored "
            "to an earlier state, or has failed over. Move the topic again."
        )


def has_left(move: Move, offset: int) -> bool:
    """Return whether all that went to the source is in its log, and send there what comes later to the target.

    If publishers use another database than the source, messages up to the cut may still be on their way.
    """
    if move.source == move.via:
        return True
    session = Session(move.source)
    if not relaying.has_arrived(Session(move.via), move.source, offset):
        return False
    row = session.row(
        f"SELECT EXISTS(SELECT 1 FROM {OUTBOX}{session.dialect.force_index('queue_outbox_due')} "
        f"WHERE deliver_at <= {session.dialect.now_ms} AND topic = %s)",
        (move.topic,),
    )
    if row is not None and row[0]:
        return False
    # Scheduled messages, and those that are redriven there.
    run(move.source, lambda session: routing.set_route(session, move.topic, Route(move.target, move.source)))
    return True


def is_drained(using: str, ref: GroupRef) -> bool:
    """Return whether a group has settled everything.

    A group that was dropped had, and so had one whose drop was interrupted: it no longer has the positions that say so.
    """
    row = groups_of(using, ref.topic).get(ref)
    if row is None or row.after_seek == ConsumerGroup.AfterSeek.DROPPED:
        return True
    session = Session(using)
    after: str | None = None
    while True:
        keys, after = leasing.find_work(session, ref, after=after, limit=SLICE)
        if keys:
            return False
        if after is None:
            return True


def hand_over(move: Move, ref: GroupRef) -> None:
    """Resume a group at the target, unless it is paused at the source, and drop it there."""
    row = groups_of(move.source, ref.topic).get(ref)
    if row is None:
        return  # Another process has moved or dropped it.
    if ref not in groups_of(move.target, ref.topic):
        raise OperationRefused(
            f"The group {ref.group!r} on topic {ref.topic!r} was registered in the database {move.source!r} after the "
            f"move had begun, and not in {move.target!r}. Register it there (its subscribers do that when they start "
            "with the new settings), and move the topic again."
        )
    run(move.target, lambda session: _end_waiting(session, move, ref, paused=row.paused))
    dropping.drop(move.source, ref, actor=move.actor, reason=move.reason or f"moved to {move.target}")


def finish(move: Move) -> None:
    """Resume waiting groups that the source does not have any more, and record that all groups have moved."""
    for ref in waiting(move):
        run(move.target, partial(_end_waiting, move=move, ref=ref, paused=False))
    run(move.via, lambda session: _record(session, move, None, f"all groups have moved to {move.target}"))


def _end_waiting(session: Session, move: Move, ref: GroupRef, *, paused: bool) -> None:
    there = ConsumerGroup.objects.using(session.using).filter(consumer_group=ref.group, topic=ref.topic)
    if there.filter(after_seek=AfterSeek.MOVES).update(paused=paused, after_seek=AfterSeek.NOTHING):
        _record(session, move, ref, f"everything in {move.source} is settled")


def _record(session: Session, move: Move, ref: GroupRef | None, detail: str) -> None:
    on = GroupRef("", move.topic) if ref is None else ref
    audit.once(session, MOVE, 0, on, detail=detail, actor=move.actor, reason=move.reason)
