"""The queries of a poll: few for all topics, groups and partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from django_mysqlqueue.db.tables import LEASES, LOG, OUTBOX, STATE
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.subsets import Subset
from django_mysqlqueue.sql.session import Session, flat


class PollResult(NamedTuple):
    """The result of a poll, by the database's clock."""

    now: int
    due: bool
    """Whether the outbox has due messages."""
    next_deliver_at: int | None
    """When the next scheduled message comes due, in epoch milliseconds, above ``now``; None if there is none."""
    free_leases: bool
    """Whether there are partitions with work but no owner."""


class News(NamedTuple):
    """The partitions with new messages, and the offset up to which the log was read."""

    partitions: set[tuple[str, str]]
    """(topic, partition key)."""
    numbers: Counter[tuple[str, str]]
    """How many messages there are, by topic and ``target_group``."""
    tail: int
    more: bool


def poll(session: Session, ordered: Sequence[GroupRef] = ()) -> PollResult:
    """Return whether messages are due, when the next scheduled one will be, and whether leases are free, by one query.

    A scheduled message that is due but locked (its cancel has not committed) does not count as the next one:
    subscribers would poll for it without a pause.
    """
    now_ms = session.dialect.now_ms
    free = "0"
    if ordered:
        free = (
            f"EXISTS(SELECT 1 FROM {session.dialect.rows(('g', 't'), len(ordered))} "
            f"{session.dialect.join_to(LEASES, 's', 'queue_leases_owner')} "
            "ON s.leased_by = '' AND s.consumer_group = v.g AND s.topic = v.t)"
        )
    now, earliest, scheduled, free_leases = session.one(
        f"SELECT {now_ms}, (SELECT MIN(deliver_at) FROM {OUTBOX}), "
        f"(SELECT deliver_at FROM {OUTBOX}{session.dialect.force_index('queue_outbox_due')} "
        f"WHERE deliver_at > {now_ms} ORDER BY deliver_at LIMIT 1), {free}",
        flat(ordered),
    )
    return PollResult(int(now), earliest is not None and earliest <= now, scheduled, bool(free_leases))


def read_news(session: Session, tail: int, *, limit: int) -> News:
    """Return the partitions with messages above ``tail``.

    The query reads the primary key with a limit: with a WHERE on the topic, both optimizers read a whole secondary
    index.
    """
    rows = session.rows(
        "SELECT n.topic, n.partition_key, n.target_group, MAX(n.`offset`), COUNT(*) FROM "
        f"(SELECT topic, partition_key, target_group, `offset` FROM {LOG}{session.dialect.force_index('PRIMARY')} "
        "WHERE `offset` > %s ORDER BY `offset` LIMIT %s) n GROUP BY n.topic, n.partition_key, n.target_group",
        (tail, limit),
    )
    numbers = Counter[tuple[str, str]]()
    for topic, _, target, _, count in rows:
        numbers[topic, target] += int(count)
    return News(
        {(topic, key) for topic, key, *_ in rows},
        numbers,
        max((offset for _, _, _, offset, _ in rows), default=tail),
        numbers.total() >= limit,
    )


def next_due(session: Session, subsets: Mapping[GroupRef, Subset]) -> dict[GroupRef, int]:
    """Return when the next redelivery in a subset of each shared group is due, in epoch milliseconds.

    Groups whose subsets are equal, as almost all are, share a query.
    """
    found: dict[GroupRef, int] = {}
    for subset in dict.fromkeys(subsets.values()):
        inside, parameters = subset.condition(session.dialect, "partition_key")
        one = (
            f"SELECT %s AS g, %s AS t, invisible_until FROM {STATE}"
            f"{session.dialect.force_index('queue_delivery_state_due')} "
            f"WHERE consumer_group = %s AND topic = %s AND acked = %s{inside} ORDER BY invisible_until LIMIT 1"
        )
        refs = [ref for ref, its in subsets.items() if its == subset]
        rows = session.each(one, [(*ref, *ref, False, *parameters) for ref in refs])
        found |= {GroupRef(group, topic): due for group, topic, due in rows}
    return found
