"""Signs of life. A subscriber's leases are good as long as its heartbeat is fresh."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import SubscriberHeartbeat
from django_mysqlqueue.service import audit
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.subsets import Subset
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, flat, run

HEARTBEATS = SubscriberHeartbeat._meta.db_table
KEY = ("consumer_group", "topic", "subscriber_name")
FORGET_AFTER_MS = 86_400_000
"""Every start is a new incarnation with a row of its own: rows a day old are deleted."""


def beat(using: str, subscriber: str, refs: Sequence[GroupRef], info: Mapping[str, Any]) -> None:
    """Writes the subscriber's heartbeat for all its groups at the database's clock."""

    def write(session: Session) -> None:
        now = session.dialect.now_ms
        rows = sorted((ref.group, ref.topic, subscriber, json.dumps(info)) for ref in refs)
        session.execute(
            f"INSERT INTO {HEARTBEATS} (consumer_group, topic, subscriber_name, info, heartbeat_at) VALUES "
            + session.dialect.placeholders(len(rows), f"(%s, %s, %s, %s, {now})")
            + session.dialect.on_conflict(KEY, {"heartbeat_at": now, "deregistered_at": "0"}),
            flat(rows),
        )

    run(using, write)


def deregister(using: str, subscriber: str, refs: Iterable[GroupRef]) -> None:
    """Says that the subscriber has left: its leases are free at once."""
    run(using, lambda session: mark_deregistered(session, subscriber, refs))


def mark_deregistered(session: Session, subscriber: str, refs: Iterable[GroupRef]) -> None:
    """The same, in the caller's transaction."""
    rows = sorted((ref.group, ref.topic, subscriber) for ref in refs)
    on = " AND ".join(f"s.{name} = v.{name}" for name in KEY)
    session.execute(
        session.dialect.update_joined(HEARTBEATS, KEY, len(rows), on, {"deregistered_at": session.dialect.now_ms}),
        flat(rows),
    )


def forget(using: str, subscriber: str, refs: Iterable[GroupRef]) -> None:
    """Deletes the subscriber's rows, by primary key: it was here for a moment, and nobody will ask."""

    def delete(session: Session) -> None:
        rows = sorted((ref.group, ref.topic, subscriber) for ref in refs)
        on = " AND ".join(f"s.{name} = v.{name}" for name in KEY)
        session.execute(session.dialect.delete_joined(HEARTBEATS, KEY, len(rows), on), flat(rows))

    run(using, delete)


def names(session: Session) -> list[str]:
    """Every subscriber that has a row, in order: those of the last day, dead or alive."""
    rows = session.rows(f"SELECT subscriber_name FROM {HEARTBEATS}")
    return sorted({name for (name,) in rows})


def count_lost(session: Session, subscriber: str, lease_ms: int) -> int:
    """How many heartbeats a lost subscriber has, one for each of its groups.

    Raises:
        OperationRefused: it is alive.
    """
    rows = session.rows(
        f"SELECT CASE WHEN {fresh('s', session)} THEN 1 ELSE 0 END FROM {HEARTBEATS} s WHERE s.subscriber_name = %s",
        (lease_ms, lease_ms, subscriber),
    )
    if any(is_alive for (is_alive,) in rows):
        raise OperationRefused(_alive_text(subscriber))
    return len(rows)


def _alive_text(subscriber: str) -> str:
    return f"The subscriber {subscriber!r} is alive: stop it first."


def remove(using: str, subscriber: str, *, actor: str, lease_ms: int, reason: str = "") -> int:
    """Deletes a dead subscriber's rows, for all its groups: nobody waits for its leases to run out.

    Returns:
        How many rows there were.

    Raises:
        OperationRefused: it is alive.
    """

    def delete(session: Session) -> int:
        places = sorted(
            session.rows(
                f"SELECT consumer_group, topic, subscriber_name FROM {HEARTBEATS} WHERE subscriber_name = %s",
                (subscriber,),
            )
        )
        if not places:
            return 0
        # By primary key and under lock: it may beat at this moment.
        on = " AND ".join(f"s.{name} = v.{name}" for name in KEY)
        alive = session.rows(
            f"SELECT CASE WHEN {fresh('s', session)} THEN 1 ELSE 0 END "
            f"FROM {session.dialect.rows(KEY, len(places))} {session.dialect.join_to(HEARTBEATS, 's')} ON {on}"
            f"{session.dialect.for_update}",
            (lease_ms, lease_ms, *flat(places)),
        )
        if not alive:
            return 0  # somebody else has removed them meanwhile
        if any(is_alive for (is_alive,) in alive):
            raise OperationRefused(_alive_text(subscriber))
        session.execute(session.dialect.delete_joined(HEARTBEATS, KEY, len(places), on), flat(places))
        audit.once(session, "forget", len(alive), actor=actor, reason=reason, detail=subscriber)
        return len(alive)

    with apart(using):
        return run(using, delete)


def fresh(alias: str, session: Session) -> str:
    """The condition that a heartbeat row is fresh; takes the lease duration in ms twice.

    A beat further ahead of now than a lease lasts was written by a clock that
    has been mended since, and counts as long ago.
    """
    now = session.dialect.now_ms
    return f"{alias}.deregistered_at = 0 AND {alias}.heartbeat_at > {now} - %s AND {alias}.heartbeat_at < {now} + %s"


def live(session: Session, refs: Sequence[GroupRef], lease_ms: int) -> dict[GroupRef, dict[str, Subset]]:
    """The live subscribers of each group, in order of name, and the subset that each works on."""
    found: dict[GroupRef, dict[str, Subset]] = {ref: {} for ref in refs}
    for group, topic, name, info in session.rows(
        "SELECT h.consumer_group, h.topic, h.subscriber_name, h.info "
        f"FROM {session.dialect.rows(('g', 't'), len(refs))} {session.dialect.join_to(HEARTBEATS, 'h')} "
        "ON h.consumer_group = v.g AND h.topic = v.t "
        f"WHERE {fresh('h', session)}",
        (*flat(refs), lease_ms, lease_ms),
    ):
        found[GroupRef(group, topic)][name] = Subset.read(json.loads(info).get("subset"))
    return {ref: dict(sorted(subsets.items())) for ref, subsets in found.items()}


def forget_old(using: str, *, limit: int = 500) -> int:
    """Deletes heartbeats that are a day old, by primary key; returns how many."""

    def delete(session: Session) -> int:
        rows = session.rows(
            f"SELECT consumer_group, topic, subscriber_name FROM {HEARTBEATS} "
            f"WHERE heartbeat_at < {session.dialect.now_ms} - %s ORDER BY {', '.join(KEY)} LIMIT %s",
            (FORGET_AFTER_MS, limit),
        )
        if not rows:
            return 0
        on = " AND ".join(f"s.{name} = v.{name}" for name in KEY)
        return session.execute(session.dialect.delete_joined(HEARTBEATS, KEY, len(rows), on), flat(rows))

    return run(using, delete)
