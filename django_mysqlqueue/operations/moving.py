"""Move: hand a topic over from one database to another while messages are published.

All messages of the topic pass the sequencer of one database, that of the publishers (``VIA``). A route, which is set
under its mutex, divides them: up to an offset they go to the old database, from then on to the new one. There, each
group waits (``AfterSeek.MOVES``) until its namesake has settled everything in the old one. So no message is handled
before an earlier one of its key, and none twice. Each step can be repeated, so an interrupted move is run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Unpack

from django.db import connections
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.arguments import checked, spelled_out
from django_mysqlqueue.db.tables import OUTBOX
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.names.rules import relayed_topic
from django_mysqlqueue.operations import dropping, seeking
from django_mysqlqueue.operations.declaring import How, Work, operating
from django_mysqlqueue.operations.limits import COUNTED
from django_mysqlqueue.operations.lookups import check_topic
from django_mysqlqueue.operations.results import Result, result_of
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.topics import check_topic as check_topic_name
from django_mysqlqueue.service import audit, groups, heartbeats, leasing, log, relaying, routing
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.databases import queue_alias, works_on
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.routing import HERE, Route
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, run
from django_mysqlqueue.text.humanize import up_to

AfterSeek = ConsumerGroup.AfterSeek
MOVE = audit.Action("move", gettext_lazy("Move topic"))
COPIED = ("mode", "limits", "filter", "allowed_users", "overrides")
"""The columns that a group has in both databases."""
SLICE = 500
"""Partitions per statement."""
PAUSE = 0.5
"""Seconds between two checks whether the groups have settled everything."""
FIRST_REPORT, REPORTS = 2.0, 10.0
"""Seconds until the first report of what a move waits for, and between two of them."""


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


# -- the operations -----------------------------------------------------------


@spelled_out
def prepare_move(topic: str, target: str, **how: Unpack[How]) -> Result:
    """Prepare the move of a topic to another database, before settings that name it there are deployed.

    The topic's groups are registered in the target, where they wait. Until ``move_topic`` is called, all messages of
    the topic stay where they are, regardless of the settings of their publishers.

    Args:
        topic: the topic.
        target: alias of the database to which it will move.
        using: alias of the database to which the topic's messages are published (default: ``VIA`` of the topic, else
            its database).

    Raises:
        OperationRefused: the topic is in the target already.
    """
    with _via(topic, target, how) as (via, by, dry_run), ExitStack() as stack:
        known = routing.route_of(Session(via), topic)
        source = queue_alias(topic=topic) if known is None else known.target or via
        move = _move(topic, via, source, target, by)
        stack.enter_context(apart(source))
        if known is not None and known.planned not in ("", target):
            raise OperationRefused(
                f"The topic {topic!r} is prepared to move to {known.planned!r}. Move it, or cancel that first."
            )
        if known is not None and known.source != source and groups_of(known.source, topic):
            raise OperationRefused(
                f"The topic {topic!r} has not left the database {known.source!r}: finish its move to {source!r} first."
            )
        check_topic(source, topic)
        found = groups_of(source, topic)
        if not dry_run:
            prepare(move)
        text = (
            _("The topic %(topic)s will be prepared to move from the database %(source)s to %(target)s.")
            if dry_run
            else _("The topic %(topic)s is prepared to move from the database %(source)s to %(target)s.")
        )
        return result_of(
            Result,
            MOVE,
            max(1, len(found)),
            text % {"topic": topic, "source": source, "target": target},
            _("Groups, which are registered there and wait: %(names)s.") % {"names": _names(found)},
            _("Next, deploy these settings of the topic in MYSQLQUEUE['TOPICS'] everywhere: %(settings)s.")
            % {"settings": repr({"DATABASE": target, "VIA": via} | ({} if source == via else {"MOVES_FROM": source}))},
            dry_run=dry_run,
        )


@spelled_out
@checked(OperationRefused, only=("progress", "report"))
def move_topic(
    topic: str,
    target: str,
    *,
    progress: Callable[[int], object] = lambda groups: None,
    report: Callable[[str], object] = lambda text: None,
    **how: Unpack[How],
) -> Result:
    """Move a topic to another database, after ``prepare_move`` and the deployment of the settings.

    From a certain offset on, the topic's messages go to the target. Each group handles them there as soon as it has
    settled all earlier messages. This waits until all groups have; if it is interrupted, call it again.

    Args:
        topic: the topic.
        target: alias of the database to which it moves.
        using: as for ``prepare_move``.
        progress: called with 1 whenever a group has moved.
        report: called every 10 seconds with a text that says for what this waits.

    Raises:
        OperationRefused: the move is not prepared, or has ended; the settings do not name the target; or the database
            of the publishers went back to a state before the move.
    """
    with _via(topic, target, how) as (via, by, dry_run), ExitStack() as stack:
        known = routing.route_of(Session(via), topic)
        if known is None:
            check_topic(via, topic)
            raise OperationRefused(f"The topic {topic!r} is not prepared to move to {target!r}. Prepare it first.")
        if (configured := queue_alias(topic=topic)) != target:
            raise OperationRefused(
                f"MYSQLQUEUE['TOPICS'] names the database {configured!r} for the topic {topic!r}, not {target!r}. "
                "Deploy the new settings first."
            )
        move = _move(topic, via, known.source, target, by)
        if known.planned not in ("", target):
            raise OperationRefused(f"The topic {topic!r} is prepared to move to {known.planned!r}, not to {target!r}.")
        if move.source not in works_on(topic):
            raise OperationRefused(
                f"The topic {topic!r} leaves the database {move.source!r}, but MYSQLQUEUE['TOPICS'] does not say so: "
                f"subscribers would not work for its groups there. Deploy MOVES_FROM = {move.source!r}."
            )
        stack.enter_context(apart(move.source))
        found = groups_of(move.source, topic)
        if dry_run:
            return _preview(move, found)
        if known.target != move.route(target).target:
            register(move)  # Those that were registered or changed since.
        offset = cut(move, check=partial(require_prepared, move))
        waiting = _Waiting(move, report)
        waiting.for_relay(offset)
        # This includes a group that was registered at the last moment. After the cut, none is registered.
        left = groups_of(move.source, topic)
        number = len(found | left)
        while left:
            require_cut(move)
            for ref in [ref for ref in left if is_drained(move.source, ref)]:
                hand_over(move, ref)
                del left[ref]
                progress(1)
            if left:
                waiting.for_groups()
        finish(move)
        text = _("The topic %(topic)s has moved from the database %(source)s to %(target)s.")
        values = {"topic": topic, "source": move.source, "target": move.target}
        return result_of(Result, MOVE, max(1, number), text % values, dry_run=False)


@spelled_out
def cancel_move(topic: str, target: str, **how: Unpack[How]) -> Result:
    """Undo ``prepare_move``, after settings that do not name the target have been deployed again.

    Args:
        topic: the topic.
        target: alias of the database to which it was to move.
        using: as for ``prepare_move``.

    Raises:
        OperationRefused: no move is prepared, or it has begun; the settings name the target; or the target has messages
            of a group that only the move can deliver.
    """
    with _via(topic, target, how) as (via, by, dry_run):
        known = routing.route_of(Session(via), topic)
        if known is None:
            check_topic(via, topic)
        # Without a plan, an earlier cancel was interrupted.
        if known is None or known.planned not in (target, "") or (known.target or via) != known.source:
            has_begun = known is not None and (known.target or via) == target
            text = f"The topic {topic!r} {'has begun' if has_begun else 'is not prepared'} to move to {target!r}"
            raise OperationRefused(f"{text}: finish the move." if has_begun else f"{text}.")
        move = _move(topic, via, known.source, target, by)
        if (configured := queue_alias(topic=topic)) != move.source:
            raise OperationRefused(
                f"MYSQLQUEUE['TOPICS'] names the database {configured!r} for the topic {topic!r}, not {move.source!r}. "
                "Deploy the earlier settings everywhere first."
            )
        check_cancel(move)
        names = _names(waiting(move))
        if not dry_run:
            cancel(move)
        text = (
            _("The topic %(topic)s will stay in the database %(source)s. Groups that will be deleted in %(target)s:")
            if dry_run
            else _("The topic %(topic)s stays in the database %(source)s. Groups that were deleted in %(target)s:")
        )
        values = {"topic": topic, "source": move.source, "target": target}
        return result_of(Result, MOVE, 1, f"{text % values} {names}.", dry_run=dry_run)


class _Waiting:
    """Waits during a move, and reports for what it waits."""

    def __init__(self, move: Move, report: Callable[[str], object]) -> None:
        self._move = move
        self._report = report
        self._next_report = time.monotonic() + FIRST_REPORT

    def for_relay(self, offset: int) -> None:
        """Wait until the source has everything that was published to ``via`` up to an offset."""
        text = _("Waiting until subscribers have relayed to %(source)s what was published in %(via)s before.")
        line = text % {"source": self._move.source, "via": self._move.via}
        while not has_left(self._move, offset):
            self._turn(lambda: [line])
            require_cut(self._move)

    def for_groups(self) -> None:
        """Wait a moment for the groups that have not moved."""
        self._turn(lambda: chain(*_states(self._move, groups_of(self._move.source, self._move.topic))))

    def _turn(self, lines: Callable[[], Iterable[str]]) -> None:
        if time.monotonic() >= self._next_report:
            for line in lines():
                self._report(line)
            self._next_report = time.monotonic() + REPORTS
        time.sleep(PAUSE)


def _states(move: Move, found: Mapping[GroupRef, ConsumerGroup]) -> tuple[list[str], list[str]]:
    """Return what each group still has to do in the source, and what keeps it from doing so."""
    lease_ms = int(get_settings().lease_duration * 1000)
    live, there = (heartbeats.live(Session(alias), list(found), lease_ms) for alias in (move.source, move.target))
    lines, warnings = [], []
    for ref, row in found.items():
        left = seeking.preview(move.source, ref, seeking.position_of(move.source, "latest")).skipped
        values = {"ref": ref, "number": up_to(COUNTED, left), "source": move.source, "target": move.target}
        lines.append(_("The group %(ref)s has %(number)s unsettled messages in %(source)s.") % values)
        if row.paused:
            warnings.append(_("%(ref)s is paused in %(source)s: it does not move until it is resumed.") % values)
        elif left and not live[ref]:
            warnings.append(_("No live subscribers for %(ref)s in %(source)s: it does not move.") % values)
        if not there[ref]:
            warnings.append(_("No live subscribers for %(ref)s in %(target)s.") % values)
    return lines, warnings


def _preview(move: Move, found: Mapping[GroupRef, ConsumerGroup]) -> Result:
    lines, warnings = _states(move, found)
    text = _("The topic %(topic)s will move from the database %(source)s to %(target)s.")
    values = {"topic": move.topic, "source": move.source, "target": move.target}
    return result_of(Result, MOVE, max(1, len(found)), text % values, *lines, dry_run=True, warnings=tuple(warnings))


def _names(found: Iterable[GroupRef]) -> str:
    return ", ".join(ref.group for ref in found) or _("none")


@contextmanager
def _via(topic: str, target: str, how: How) -> Iterator[Work]:
    """Yield as ``operating`` does, for the database to which the topic's messages are published."""
    check_topic_name(topic)
    if job_queues.is_queue(topic):
        raise OperationRefused(f"The topic {topic!r} is a queue of jobs, whose results would not move with it.")
    if target not in connections:
        raise OperationRefused(f"target {target!r}: DATABASES has no such alias")
    via = how.get("using") or get_settings().topics.of(topic).via
    with operating({**how, "using": via}, topic=topic) as found, apart(target):
        yield found


def _move(topic: str, via: str, source: str, target: str, by: By) -> Move:
    if source == target:
        raise OperationRefused(f"The topic {topic!r} is in the database {target!r} already.")
    for alias in (source, target):
        relayed_topic(topic, alias)  # Or the sequencer could not store its messages.
    return Move(topic, via, source, target, **by)
