"""Keys whose messages fail again and again, while those of others succeed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from django_mysqlqueue import log_queries, naming
from django_mysqlqueue.inspection.dead_letters import LINE
from django_mysqlqueue.models import QueueMessage
from django_mysqlqueue.service import messages
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session

LOG = QueueMessage._meta.db_table
MESSAGES = 200
"""Number of unsettled deliveries of a group that are read, latest due time first."""
GROUPS = 20
"""Maximum number of groups that are read."""
LEAST = 10
"""Minimum number of messages that have failed at least twice. A passing fault is seldom met twice."""
KEYS = 3
"""Maximum number of keys that these messages may have."""


@dataclass(frozen=True, slots=True)
class RetriedKeys:
    """Messages of a group that wait for another attempt after two or more, and their few keys."""

    offsets: tuple[int, ...]
    """The messages that were read, lowest offset first."""
    failures: int
    """How many attempts of these have failed."""
    keys: tuple[str, ...]
    """The publisher's keys, the one with most messages first."""
    exact: bool
    """True if all messages of the group that wait for another attempt were read."""
    error: str
    """The end of the last error of one of them."""


def find(session: Session, refs: Sequence[GroupRef]) -> dict[GroupRef, RetriedKeys]:
    """Return the groups of which the messages that wait for another attempt have few keys.

    Args:
        session: session on the queue's database.
        refs: groups with at least ``LEAST`` such messages. The first ``GROUPS`` of them are read.
    """
    found: dict[GroupRef, RetriedKeys] = {}
    for ref in refs[:GROUPS]:
        read = session.rows(
            "SELECT partition_key, message_offset, retry_count, delivery_token, "
            f"{session.dialect.ending('last_error', LINE)} {log_queries.claimed(session)} "
            "ORDER BY invisible_until DESC LIMIT %s",
            (*ref, False, MESSAGES),
        )
        rows = [
            (str(key), int(offset), int(attempts), str(error))
            for key, offset, attempts, token, error in read
            if not token and int(attempts) > 1
        ]
        if len(rows) < LEAST:
            continue
        publishers = _publisher_keys(session, {offset: key for key, offset, *_ in rows})
        numbers: dict[str, int] = {}
        for key in publishers.values():
            if key is not None:
                numbers[key] = numbers.get(key, 0) + 1
        # A message without a key, or that was deleted, has none in common with others.
        if len(numbers) <= KEYS and sum(numbers.values()) == len(rows):
            found[ref] = RetriedKeys(
                tuple(sorted(publishers)),
                sum(attempts for _key, _offset, attempts, _error in rows),
                tuple(sorted(numbers, key=lambda key: (-numbers[key], key))),
                len(read) < MESSAGES,
                rows[0][3],
            )
    return found


def _publisher_keys(session: Session, partitions: Mapping[int, str]) -> dict[int, str | None]:
    """Return the publisher's keys of messages, by offset: those of hashed keys are in the metadata."""
    hashed = sorted(
        offset
        for offset, key in partitions.items()
        if naming.lane_of(key).partition.startswith(naming.PARTITION_PREFIX)
    )
    metadata: dict[int, str] = {}
    for chunk in session.chunks(hashed):
        rows = session.rows(
            f"SELECT m.`offset`, m.metadata FROM {session.dialect.rows(('o',), len(chunk))} "
            f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o",
            chunk,
        )
        metadata |= {int(offset): text for offset, text in rows}
    return {
        offset: messages.publisher_key(key, messages.decode_metadata(metadata.get(offset, "{}")))
        for offset, key in partitions.items()
    }
