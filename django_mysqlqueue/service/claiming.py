"""Claims: taking messages for one group, from many partitions, in one transaction.

Locks are taken in this order everywhere: group (shared), leases, offsets, delivery state, slots, coalesce keys, outbox,
results and stages of jobs; within a table by primary key, in key order. Only the results of jobs in no chain whose
outcomes a claim writes come before slots. After the lock of a group's slots, a claim waits for nothing but the results
and stages of jobs that are in chains, or that it passes: it locks rows of delivery state with SKIP LOCKED, and inserts
rows.
"""

from __future__ import annotations

from operator import attrgetter
from secrets import randbits

from django.db import IntegrityError

from django_mysqlqueue.db.tables import STATE
from django_mysqlqueue.service import groups, leasing, settling, slots, watermarks
from django_mysqlqueue.service.claims import Claim, ClaimRequest, Seen
from django_mysqlqueue.service.deliveries import Action, Claimed, Settlement
from django_mysqlqueue.service.job_outcomes import jobs_of
from django_mysqlqueue.service.new_messages import take_new
from django_mysqlqueue.service.redelivering import redeliver
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.taking import Taking
from django_mysqlqueue.sql.session import Session, run

PLACE = attrgetter("key", "offset")


def new_token() -> int:
    """Return a random 63-bit token above 0 for the deliveries of one claim. It is never used again."""
    return randbits(63) or 1


def claim(using: str, request: ClaimRequest) -> Claim:
    """Write the group's pending settlements and take new deliveries, in one transaction.

    Raises:
        CommitOutcomeUnknown: it is unknown whether this process holds the deliveries; see ``undo``.
    """
    try:
        return run(using, lambda session: _claim(session, request))
    except IntegrityError:  # A row is above the position. The next claim finds the position behind it.
        watermarks.pass_rows(using, request.claimant.ref, {want.key for want in request.wants})
        raise


def _claim(session: Session, request: ClaimRequest) -> Claim:
    claimant, ref, shared = request.claimant, request.claimant.ref, request.claimant.rules.shared
    keys = {want.key for want in request.wants}
    touched = keys | set(request.also) | {settlement.delivery.key for settlement in request.settlements}
    asked_fence = groups.ask_fence(session, ref, claimant.clock)
    asked_lost = None if shared else leasing.ask_lost(session, ref, claimant.subscriber, keys)
    asked_offsets = watermarks.ask_lock(session, ref, touched, skip_locked=shared)
    fence, lost, offsets = asked_fence(), asked_lost() if asked_lost else set(), asked_offsets()

    jobs = jobs_of(session, ref)
    flushed = settling.apply(
        session,
        ref,
        request.settlements,
        offsets,
        max_attempts=claimant.rules.max_attempts,
        also=request.also,
        jobs=jobs,
    )
    claim = Claim(flushed, fence, claimant.refusal(fence), partitions=dict.fromkeys(lost, Seen.LOST))
    positions: dict[str, int] = {}
    if fence is None or claim.refused is not None:
        if request.holding is not None and fence is not None:
            flushed.held = slots.settle(session, ref, request.holding)
    else:
        taking = Taking(session, request, claim, offsets, now=fence.now, jobs=jobs)
        redelivered = redeliver(taking)
        fresh, positions = take_new(taking)
        taking.store()
        # If a position has only moved past messages for other groups, no later settlement will advance the watermark.
        flushed.unfinished |= positions.keys() - {delivery.key for delivery in fresh}
        claim.deliveries = sorted([*redelivered, *fresh], key=PLACE)

    if jobs is not None:
        jobs.store()
    watermarks.store(session, ref, offsets, flushed.watermarks, positions)
    return claim


def undo(using: str, ref: GroupRef, token: int) -> None:
    """Release the deliveries that a claim with an unknown outcome may have taken. No attempt is counted.

    The exclusive lock on the group row waits until the claim's transaction, which holds it shared, has ended on the
    server.
    """

    def release(session: Session) -> None:
        groups.wait_for_claims(session, ref)
        rows = session.rows(
            f"SELECT partition_key, message_offset, retry_count, suspect FROM {STATE}"
            f"{session.dialect.force_index('queue_delivery_state_due')} "
            "WHERE consumer_group = %s AND topic = %s AND acked = %s AND delivery_token = %s",
            (*ref, False, token),
        )
        unstarted = [
            Settlement(Claimed(ref, key, offset, token, retries + 1, suspect, size=0), Action.RELEASE)
            for key, offset, retries, suspect in rows
        ]
        settling.settle(session, ref, unstarted, {}, max_attempts=None)

    run(using, release)
