"""Operations on topics: moving one to another database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Unpack

from django.db import connections
from django.utils.translation import gettext as _

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.names.rules import relayed_topic
from django_mysqlqueue.operations import moving, seeking
from django_mysqlqueue.operations.declaring import How, Work, operates, operating
from django_mysqlqueue.operations.limits import COUNTED
from django_mysqlqueue.operations.lookups import check_topic
from django_mysqlqueue.operations.moving import MOVE, Move
from django_mysqlqueue.operations.results import Result, result_of
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.topics import check_topic as check_topic_name
from django_mysqlqueue.service import heartbeats, routing
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.databases import queue_alias, works_on
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.text.humanize import up_to

PAUSE = 0.5
"""Seconds between two checks whether the groups have settled everything."""
FIRST_REPORT, REPORTS = 2.0, 10.0
"""Seconds until the first report of what a move waits for, and between two of them."""


@operates
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
        if known is not None and known.source != source and moving.groups_of(known.source, topic):
            raise OperationRefused(
                f"The topic {topic!r} has not left the database {known.source!r}: finish its move to {source!r} first."
            )
        check_topic(source, topic)
        found = moving.groups_of(source, topic)
        if not dry_run:
            moving.prepare(move)
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


@operates
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
        found = moving.groups_of(move.source, topic)
        if dry_run:
            return _preview(move, found)
        if known.target != move.route(target).target:
            moving.register(move)  # Those that were registered or changed since.
        offset = moving.cut(move, check=partial(moving.require_prepared, move))
        waiting = _Waiting(move, report)
        waiting.for_relay(offset)
        # This includes a group that was registered at the last moment. After the cut, none is registered.
        left = moving.groups_of(move.source, topic)
        number = len(found | left)
        while left:
            moving.require_cut(move)
            for ref in [ref for ref in left if moving.is_drained(move.source, ref)]:
                moving.hand_over(move, ref)
                del left[ref]
                progress(1)
            if left:
                waiting.for_groups()
        moving.finish(move)
        text = _("The topic %(topic)s has moved from the database %(source)s to %(target)s.")
        values = {"topic": topic, "source": move.source, "target": move.target}
        return result_of(Result, MOVE, max(1, number), text % values, dry_run=False)


@operates
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
        moving.check_cancel(move)
        names = _names(moving.waiting(move))
        if not dry_run:
            moving.cancel(move)
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
        while not moving.has_left(self._move, offset):
            self._turn(lambda: [line])
            moving.require_cut(self._move)

    def for_groups(self) -> None:
        """Wait a moment for the groups that have not moved."""
        self._turn(lambda: chain(*_states(self._move, moving.groups_of(self._move.source, self._move.topic))))

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
