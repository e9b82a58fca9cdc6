"""Heartbeats. A subscriber's leases are valid as long as its heartbeat is recent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Unpack

from django.utils.translation import gettext_lazy

from django_mysqlqueue.db.tables import HEARTBEATS
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.service import audit
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.subsets import Subset
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, flat, run

KEY = ("consumer_group", "topic", "subscriber_name")
BY_KEY = " AND ".join(f"s.{name} = v.{name}" for name in KEY)
FORGET = audit.Action("forget", gettext_lazy("Forget subscriber"), audit.GROUPS)
FORGET_AFTER_MS = 86_400_000
"""Milliseconds after which rows are deleted: each start of a subscriber adds rows of its own."""


class RoundTrip(NamedTuple):
    """How long the database takes to answer the polls of a subscriber, in seconds."""

    p50: float
    """Half of the polls took at most this long."""
    p95: float
    """95 % of them did."""


def beat(
    using: str,
    subscriber: str,
    refs: Sequence[GroupRef],
    info: Mapping[str, Any],
    facts: Mapping[str, str | int] | None = None,
) -> None:
    """Write a subscriber's heartbeat for all its groups, with the database's time.

    The first one also writes ``info``, with the time as ``started_at``; the later ones change it by ``facts``.
    """

    def write(session: Session) -> None:
        now = session.dialect.now_ms
        assign = {"heartbeat_at": now, "deregistered_at": "0"}
        if facts:
            changes = "".join(f", '$.{name}', %s" for name in facts)
            assign["info"] = f"JSON_SET(info{changes})"
        rows = sorted((*ref, subscriber, json.dumps(info)) for ref in refs)
        session.execute(
            f"INSERT INTO {HEARTBEATS} (consumer_group, topic, subscriber_name, info, heartbeat_at) VALUES "
            + session.dialect.placeholders(len(rows), f"(%s, %s, %s, JSON_SET(%s, '$.started_at', {now}), {now})")
            + session.dialect.on_conflict(KEY, assign),
            (*flat(rows), *(facts or {}).values()),
        )

    run(using, write, alone=True)


def report(
    using: str, subscriber: str, ref: GroupRef, text: str, *, name: Literal["error", "unknown"] = "error"
) -> None:
    """Show in a subscriber's heartbeat for a group what it cannot do, and since when.

    ``text``: why its work for the group has broken down, or which tasks it cannot run; empty if it can again. ``name``:
    ``"error"`` or ``"unknown"``.
    """

    def write(session: Session) -> None:
        info, values = f"JSON_REMOVE(info, '$.{name}', '$.{name}_at')", tuple[str, ...]()
        if text:
            info = f"JSON_INSERT(JSON_SET(info, '$.{name}', %s), '$.{name}_at', {session.dialect.now_ms})"
            values = (text,)
        session.execute(
            f"UPDATE {HEARTBEATS} SET info = {info} WHERE consumer_group = %s AND topic = %s AND subscriber_name = %s",
            (*values, *ref, subscriber),
        )

    run(using, write)


def refuse(using: str, subscriber: str, info: Mapping[str, Any]) -> None:
    """Record that a subscriber has refused to start, in a row of no group: never live, and deleted after a day."""

    def write(session: Session) -> None:
        now, facts = session.dialect.now_ms, json.dumps(info)
        session.execute(
            f"INSERT INTO {HEARTBEATS} (consumer_group, topic, subscriber_name, info, heartbeat_at, deregistered_at) "
            f"VALUES ('', '', %s, %s, {now}, {now})"
            + session.dialect.on_conflict(KEY, {"info": "%s", "heartbeat_at": now, "deregistered_at": now}),
            (subscriber, facts, facts),
        )

    run(using, write)


def deregister(using: str, subscriber: str, refs: Iterable[GroupRef]) -> None:
    """Deregister a subscriber: its leases can be acquired at once."""
    run(using, lambda session: mark_deregistered(session, subscriber, refs))


def mark_deregistered(session: Session, subscriber: str, refs: Iterable[GroupRef]) -> None:
    """Deregister a subscriber in the caller's transaction."""
    rows = sorted((*ref, subscriber) for ref in refs)
    session.update(HEARTBEATS, KEY, rows, BY_KEY, {"deregistered_at": session.dialect.now_ms})


def mark_died(session: Session, subscriber: str, handled: Mapping[GroupRef, Sequence[int]], how: str) -> None:
    """Deregister a subscriber whose process has died, and record how."""
    rows = sorted((*ref, subscriber, how, json.dumps(list(offsets))) for ref, offsets in handled.items())
    info = "JSON_SET(s.info, '$.died', v.how, '$.handled', v.handled)"
    changes = {"deregistered_at": session.dialect.now_ms, "info": info}
    session.update(HEARTBEATS, (*KEY, "how", "handled"), rows, BY_KEY, changes)


def forget(using: str, subscriber: str, refs: Iterable[GroupRef]) -> None:
    """Delete a subscriber's rows, by primary key. ``InlineSubscriber`` leaves no trace."""
    rows = sorted((*ref, subscriber) for ref in refs)
    run(using, lambda session: session.delete(HEARTBEATS, KEY, rows, BY_KEY))


def names(session: Session) -> list[str]:
    """Return all subscribers that have a row, in order: those of the last day, live or lost."""
    rows = session.rows(f"SELECT subscriber_name FROM {HEARTBEATS}")
    return sorted({name for (name,) in rows})


def count_lost(session: Session, subscriber: str, lease_ms: int) -> int:
    """Return how many heartbeat rows a lost subscriber has, one for each of its groups. A live one is refused."""
    rows = session.rows(
        f"SELECT CASE WHEN {fresh('s', session)} THEN 1 ELSE 0 END FROM {HEARTBEATS} s WHERE s.subscriber_name = %s",
        (lease_ms, lease_ms, subscriber),
    )
    if any(is_alive for (is_alive,) in rows):
        raise OperationRefused(_alive_text(subscriber))
    return len(rows)


def _alive_text(subscriber: str) -> str:
    return f"The subscriber {subscriber!r} is alive: stop it first."


def remove(using: str, subscriber: str, *, lease_ms: int, **by: Unpack[By]) -> int:
    """Delete the rows of a lost subscriber for all its groups, so that its leases can be acquired; return how many.

    A live one is refused.
    """

    def delete(session: Session) -> int:
        rows = session.rows(f"SELECT {', '.join(KEY)} FROM {HEARTBEATS} WHERE subscriber_name = %s", (subscriber,))
        places = sorted(rows)
        if not places:
            return 0
        # By primary key and under lock, because the subscriber may send a heartbeat at this moment.
        alive = session.rows(
            f"SELECT CASE WHEN {fresh('s', session)} THEN 1 ELSE 0 END "
            f"FROM {session.dialect.rows(KEY, len(places))} {session.dialect.join_to(HEARTBEATS, 's')} ON {BY_KEY}"
            f"{session.dialect.for_update}",
            (lease_ms, lease_ms, *flat(places)),
        )
        if not alive:
            return 0  # Somebody else has removed them in the meantime.
        if any(is_alive for (is_alive,) in alive):
            raise OperationRefused(_alive_text(subscriber))
        session.delete(HEARTBEATS, KEY, places, BY_KEY)
        audit.once(session, FORGET, len(alive), detail=subscriber, **by)
        return len(alive)

    with apart(using):
        return run(using, delete)


def fresh(alias: str, session: Session, now: str = "") -> str:
    """Return the condition that a heartbeat row is recent. Its parameters are LEASE_DURATION in milliseconds, twice.

    A heartbeat further in the future than the duration of a lease was written by a clock that was corrected since. It
    counts as old.

    ``now``: the expression for the time (default: the statement's). Its parameters come before each LEASE_DURATION.
    """
    now = now or session.dialect.now_ms
    return f"{alias}.deregistered_at = 0 AND {alias}.heartbeat_at > {now} - %s AND {alias}.heartbeat_at < {now} + %s"


def live(
    session: Session, refs: Sequence[GroupRef], lease_ms: int, *, broken: bool = True, now: int | None = None
) -> dict[GroupRef, dict[str, Subset]]:
    """Return the live subscribers of each group, in order of name, with their subsets.

    ``broken``: whether to include those whose work for the group has broken down (``report``). ``now``: the database's
    time by which to judge, in epoch milliseconds (default: that of the statement).
    """
    if not refs:
        return {}
    given = ("", (lease_ms, lease_ms)) if now is None else ("%s", (now, lease_ms, now, lease_ms))
    found: dict[GroupRef, dict[str, Subset]] = {ref: {} for ref in refs}
    for group, topic, name, info in session.rows(
        "SELECT h.consumer_group, h.topic, h.subscriber_name, h.info "
        f"FROM {session.dialect.rows(('g', 't'), len(refs))} {session.dialect.join_to(HEARTBEATS, 'h')} "
        "ON h.consumer_group = v.g AND h.topic = v.t "
        f"WHERE {fresh('h', session, given[0])}",
        (*flat(refs), *given[1]),
    ):
        known = json.loads(info)
        if broken or "error" not in known:
            found[GroupRef(group, topic)][name] = Subset.read(known.get("subset"))
    return {ref: dict(sorted(subsets.items())) for ref, subsets in found.items()}


def bells(session: Session, lease_ms: int) -> set[tuple[str, str, str]]:
    """Return the topics of live subscribers that publishers of other hosts can ring, with their hosts and addresses."""
    # JSON_EXTRACT would take the server seven times as long.
    rows = session.rows(f"SELECT h.topic, h.info FROM {HEARTBEATS} h WHERE {fresh('h', session)}", (lease_ms, lease_ms))
    known = [(topic, json.loads(info)) for topic, info in rows if '"bell"' in info]
    # Clients in plain SQL write what they like.
    return {
        (topic, str(info.get("host")), str(info["bell"]))
        for topic, info in known
        if isinstance(info, dict) and "bell" in info
    }


def outdated(session: Session) -> tuple[str, tuple[object, ...]]:
    """Return the FROM and WHERE of the heartbeats that ``forget_old`` deletes."""
    return f"{HEARTBEATS} WHERE heartbeat_at < {session.dialect.now_ms} - %s", (FORGET_AFTER_MS,)


def forget_old(using: str, *, limit: int = 500) -> int:
    """Delete heartbeats that are a day old, by primary key; return how many."""

    def delete(session: Session) -> int:
        old, parameters = outdated(session)
        rows = session.rows(
            f"SELECT {', '.join(KEY)} FROM {old} ORDER BY {', '.join(KEY)} LIMIT %s",
            (*parameters, limit),
        )
        return session.delete(HEARTBEATS, KEY, rows, BY_KEY)

    return run(using, delete)
