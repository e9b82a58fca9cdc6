"""The waits of jobs for their next attempts.

A row of delivery state that waits holds the watermark of its partition: whatever is settled behind it stays a row until
it has ended. So a long wait settles the message, and puts a copy of it into the outbox that is due later, as a redrive
of a dead letter does. Jobs have no order that this could break. The copy has the number of attempts in
``failure_count``, from which the claim that takes it continues, and the result of the job has the id of the copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from django_mysqlqueue.db.tables import LOG, OUTBOX, STATE
from django_mysqlqueue.exceptions import StaleDelivery
from django_mysqlqueue.names.ids import new_message_id
from django_mysqlqueue.names.keys import LOWEST_PRIORITY
from django_mysqlqueue.service import job_rows, losses
from django_mysqlqueue.service.deliveries import Copy, JobEnd, Settlement
from django_mysqlqueue.service.job_rows import READY
from django_mysqlqueue.service.log import PUBLISHED_ID
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.sequencing import DUE_ORDER
from django_mysqlqueue.service.watermarks import BY_ROW
from django_mysqlqueue.sql.session import Retry, Session, flat

LONGEST_IN_PLACE_MS = 60_000
"""The longest wait, in milliseconds, with which the message of a job stays where it is."""


class LongWait(NamedTuple):
    """A job whose next attempt is due later."""

    key: str
    offset: int
    delay_ms: int
    attempts: int
    """The number of attempts that its message has had."""
    job: str


class WaitingJob(NamedTuple):
    """A job whose message waits in the outbox for its next attempt."""

    outbox_id: int
    id: str
    offset: int
    """That of the message with which it was enqueued."""
    key: str
    """The partition key."""


def long_wait(settlement: Settlement, attempts: int) -> LongWait | None:
    """Return the long wait of a job that a settlement is, or None."""
    delivery, job = settlement.delivery, settlement.job
    if job is None or job.retry is None or settlement.delay_ms <= LONGEST_IN_PLACE_MS:
        return None
    return LongWait(delivery.key, delivery.offset, settlement.delay_ms, attempts, job.id)


def move(session: Session, ref: GroupRef, waits: Sequence[LongWait], how: str = "") -> dict[tuple[str, int], Copy]:
    """Settle messages whose rows are locked and unsettled, and put copies into the outbox that are due later.

    The copy of a job that was asked to stop is due at once, because the claim that takes it ends the job. Messages with
    a coalesce key are left, because a copy has none, and so are those that were deleted from the log.

    ``how``: the end of the statement that reads which jobs were asked to stop.

    Returns:
        The copies, by partition and offset.

    Raises:
        Retry: a message was deleted meanwhile.
    """
    log = f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o"
    offsets = [wait.offset for wait in waits]
    there = set(flat(session.joined("SELECT m.`offset`", "o", offsets, f"{log} AND m.coalesce_key IS NULL")))
    moved = {wait: new_message_id() for wait in sorted(waits) if wait.offset in there}
    stopped = job_rows.cancel_requested(session, [wait.job for wait in moved], how)
    settled = {"acked": "1", **losses.NOT_HELD, "delivered_by": "''", "retry_count": "v.n"}
    rows = [(wait.key, wait.offset, wait.attempts) for wait in moved]
    session.update(STATE, ("k", "o", "n"), rows, BY_ROW, settled, after=ref)
    for chunk in session.chunks(list(moved.items())):
        number = session.execute(
            f"INSERT INTO {OUTBOX} (topic, partition_key, id, payload, metadata, publisher_key, expires_at, "
            "target_group, original_id, original_topic, original_offset, failure_count, deliver_at) "
            "SELECT m.topic, m.partition_key, v.id, m.payload, m.metadata, m.publisher_key, m.expires_at, "
            f"%s, {PUBLISHED_ID}, CASE WHEN m.original_topic = '' THEN m.topic ELSE m.original_topic END, "
            "CASE WHEN m.original_offset = 0 THEN m.`offset` ELSE m.original_offset END, v.n, "
            f"{session.dialect.now_ms} + v.delay "
            f"FROM {session.dialect.rows(('o', 'id', 'n', 'delay'), len(chunk))} {log}",
            (
                ref.group,
                *flat(
                    (wait.offset, copy, wait.attempts, 0 if wait.job in stopped else wait.delay_ms)
                    for wait, copy in chunk
                ),
            ),
        )
        if number != len(chunk):
            raise Retry
    return {(wait.key, wait.offset): Copy(copy, wait.job in stopped) for wait, copy in moved.items()}


def waiting(session: Session, ref: GroupRef, *, size: int, other_than: int = 0) -> Iterator[list[WaitingJob]]:
    """Yield pages of the jobs of a queue that wait in the outbox, in order of their times; some may be empty.

    Those that are due at ``other_than``, in epoch milliseconds, are left out. This reads the index of scheduled
    messages from now to its end, and the rows of a page by primary key, without locks.
    """
    hint = session.dialect.force_index("queue_outbox_due")
    joins = (
        f"{session.dialect.join_to(OUTBOX, 's')} ON s.outbox_id = v.i AND s.topic = %s AND s.target_group = %s "
        "AND s.original_id <> '' AND s.deliver_at <> %s"
    )
    at, priority, last = session.now(), LOWEST_PRIORITY, 2**63 - 1
    while True:
        # Ranges of the index: however many are due at the same time, each is read once.
        page = session.rows(
            f"SELECT deliver_at, priority, outbox_id FROM {OUTBOX}{hint} WHERE deliver_at >= %s AND (deliver_at > %s "
            "OR (deliver_at = %s AND priority < %s) OR (deliver_at = %s AND priority = %s AND outbox_id > %s)) "
            f"ORDER BY {DUE_ORDER} LIMIT %s",
            (at, at, at, priority, at, priority, last, size),
        )
        ids = [outbox_id for *_, outbox_id in page]
        of_jobs = session.joined(
            "SELECT s.outbox_id, s.original_id, s.original_offset, s.partition_key",
            "i",
            ids,
            joins,
            after=(ref.topic, ref.group, other_than),
        )
        yield sorted(WaitingJob(*row) for row in of_jobs)
        if len(page) < size:
            return
        at, priority, last = page[-1]


def wait_here(using: str, settlement: Settlement, end: JobEnd) -> None:
    """Make a job wait for its next attempt, in the open transaction of its task. No attempt is counted.

    Raises:
        StaleDelivery: the delivery was revoked, claimed again or settled, or the job has ended meanwhile.
    """
    session, delivery = Session(using), settlement.delivery
    now, attempts = session.dialect.now_ms, delivery.attempt - 1
    sets = {**losses.NOT_HELD, "delivered_by": "''", "delivered_at": now, "invisible_until": f"{now} + %s"}
    is_ours = session.execute(
        f"UPDATE {STATE} SET {', '.join(f'{name} = {value}' for name, value in sets.items())}, retry_count = %s "
        "WHERE consumer_group = %s AND topic = %s AND partition_key = %s AND message_offset = %s "
        "AND delivery_token = %s AND acked = %s",
        (settlement.delay_ms, attempts, *delivery.ref, delivery.key, delivery.offset, delivery.token, False),
    )
    if is_ours and (wait := long_wait(settlement, attempts)) is not None:
        # Under lock: the snapshot of the transaction may be older.
        copies = move(session, delivery.ref, [wait], session.dialect.for_update)
        end = at(end, copies.get((delivery.key, delivery.offset)))
    if not is_ours or not job_rows.end(session, [(end, READY)]):
        raise StaleDelivery(
            f"The job {end.id!r} was claimed again or has ended meanwhile: the writes of its task were rolled back.",
            delivery=delivery,
        )


def at(end: JobEnd, copy: Copy | None) -> JobEnd:
    """Return the end of an attempt after which a copy of the message waits; None: the message itself does."""
    return end if copy is None or end.retry is None else end._replace(retry=end.retry._replace(redriven_id=copy.id))
