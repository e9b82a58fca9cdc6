"""What problems cost, and the errors of groups whose unsettled messages have none.

Nothing is read for a queue without such problems.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from django_mysqlqueue.inspection import error_kinds
from django_mysqlqueue.inspection.always_failing import AlwaysFailing
from django_mysqlqueue.inspection.overview import GroupOverview, QueueOverview
from django_mysqlqueue.inspection.partitions import HeadMessage
from django_mysqlqueue.inspection.problem import FAILURES, NONE, NOTE, OPERATIONS, Problem, age, most_frequent
from django_mysqlqueue.options.topics import is_dlq
from django_mysqlqueue.service import log_places
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.messages import last_line
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.subscriptions.handler import Handler
from django_mysqlqueue.subscriptions.options import overridden, with_registered
from django_mysqlqueue.text.error_texts import is_attempt

FAIL = FAILURES[:3]
"""Kinds of problems of groups whose handlers fail now."""
SOON = 3600.0
"""Seconds for which dead letters are predicted."""
FORGOTTEN = 3600.0
"""Seconds after which a group without subscribers is forgotten."""
GROUPS = 20
"""Maximum number of groups of which errors, or sizes, are read."""
ERRORS = 20
"""Number of recorded deliveries of a group whose errors are read, the newest ones."""
FURTHER = 100
"""Maximum number of further attempts of a message whose delays are added up."""


def added(
    session: Session,
    overview: QueueOverview,
    problems: Sequence[Problem],
    declared: Mapping[GroupRef, Handler],
    by_key: Mapping[GroupRef, AlwaysFailing],
) -> Iterator[Problem]:
    """Yield problems with what they cost, and with an error if handlers fail."""
    groups = {group.ref: group for group in overview.groups}
    errors = _errors(session, [one for one in problems if _fails(one) and one.ref and not one.error][:GROUPS])
    measured = 0
    for one in problems:
        group = None if one.ref is None else groups.get(one.ref)
        if group is not None and one.kind == "dead_letters" and _fails(one):
            one = replace(one, error=errors.get(group.ref, ""))
        elif group is not None and one.kind in FAIL:
            # With keys, the cost is that of their messages.
            only = by_key[group.ref].offsets if one.key is not None and group.ref in by_key else None
            soon = _soon(group, declared.get(group.ref), overview.now, only=only)
            one = replace(one, error=one.error or errors.get(group.ref, ""), dead_lettered_soon=soon)
        elif group is not None and _is_forgotten(one, overview.now) and measured < GROUPS:
            measured += 1
            one = replace(one, disk=_disk(session, group), operation="drop")
        if "redrive" in (one.operation, "" if one.advice else OPERATIONS.get(one.kind)):
            one = replace(one, upto=overview.last_offset)
        yield one


def _fails(problem: Problem) -> bool:
    """Return whether attempts of the group have failed lately: old dead letters have no error in the headline."""
    return problem.kind in FAIL or (problem.kind == "dead_letters" and problem.severity < NOTE)


def _errors(session: Session, problems: Sequence[Problem]) -> dict[GroupRef, str]:
    """Return the most frequent error of the newest recorded attempts of groups, which are dead letters by now."""
    refs = [one.ref for one in problems if one.ref is not None]
    found = error_kinds.recorded_deliveries(session, refs, ERRORS) if refs else {}
    return {
        ref: most_frequent(
            last_line(one.end) for one in attempts if one.outcome in error_kinds.FAILED and is_attempt(one.start)
        )
        for ref, attempts in found.items()
    }


def _soon(group: GroupOverview, handler: Handler | None, now: int, *, only: Collection[int] | None) -> int:
    """Return up to how many messages will be dead-lettered soon, as the first ones of partitions tell."""
    if handler is None or handler.runs_jobs or group.paused or is_dlq(group.ref.topic):
        return 0
    registered, _ = with_registered(handler, group.option_columns)
    applied, _ = overridden(registered, {one.name: one.value for one in group.overrides})
    number = group.retrying.value if only is None else len(only)
    heads = [one for one in group.heads if one.attempts and one.last_error and (only is None or one.offset in only)]
    soon = sum(_is_soon(head, applied, now) for head in heads)
    return round(number * soon / len(heads)) if heads else 0


def _is_soon(head: HeadMessage, handler: Handler, now: int) -> bool:
    """Return whether a message will be dead-lettered soon if each of its attempts fails as soon as it is due."""
    if handler.max_attempts is None:
        return False
    further = range(head.attempts + 1, handler.max_attempts)
    delays = (handler.backoff.delay(number, rng=lambda: 0.5) for number in further[:FURTHER])
    return len(further) <= FURTHER and max(0, head.invisible_until - now) / 1000 + sum(delays) <= SOON


def _is_forgotten(problem: Problem, now: int) -> bool:
    """Return whether nobody has worked for a group for long, as far as this is known."""
    waits = problem.oldest_at is not None and age(now, problem.oldest_at) >= FORGOTTEN
    return problem.kind == "no_subscriber" and waits and (problem.since is None or age(now, problem.since) >= FORGOTTEN)


def _disk(session: Session, group: GroupOverview) -> Count:
    """Return about how many bytes the messages take that wait for a group, from the sizes of some of the first."""
    if not group.heads:
        return NONE
    before = min(head.offset for head in group.heads) - 1
    each = log_places.disk_per_message(session, group.ref.topic, [head.key for head in group.heads], before)
    return Count(round(each * group.lag.value), group.lag.exact)
