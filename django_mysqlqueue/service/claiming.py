"""Claims: taking messages for one group, from many partitions, in one transaction.

Locks are taken in this order everywhere: group (shared), leases, offsets, delivery state, slots, coalesce keys, outbox,
results and stages of jobs; within a table by primary key, in key order. Only the results of jobs in no chain whose
outcomes a claim writes come before slots. After the lock of a group's slots, a claim waits for nothing but the results
and stages of jobs that are in chains, or that it passes: it locks rows of delivery state with SKIP LOCKED, and inserts
rows.
"""

from __future__ import annotations

import time
from secrets import randbits

from django.db import IntegrityError

from django_mysqlqueue.models import DeliveryState
from django_mysqlqueue.service import groups, job_results, leasing, settling, slots, watermarks
from django_mysqlqueue.service.claims import Claim, ClaimRequest
from django_mysqlqueue.service.deliveries import Action, Claimed, Settlement
from django_mysqlqueue.service.new_messages import take_new
from django_mysqlqueue.service.redelivering import redeliver
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.slots import Reservation
from django_mysqlqueue.service.superseding import Coalescing
from django_mysqlqueue.service.taking import Budget, Taking
from django_mysqlqueue.sql.session import Session, run

STATE = DeliveryState._meta.db_table


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
    claimant, ref, shared = request.claimant, request.claimant.ref, request.claimant.shared
    began = time.monotonic()
    fence = groups.fence(session, ref)
    clock = request.clock
    if clock is not None and fence is not None:
        # At once: a wait for the locks that follow, or a slow flush, would look like a step back.
        clock.check(fence.now, time.monotonic() - began)
    keys = {want.key for want in request.wants}
    lost: set[str] = set()
    if not shared:
        owners = leasing.lock(session, ref, sorted(keys))
        lost = {key for key in keys if owners.get(key) != claimant.subscriber}
    touched = keys | set(request.also) | {settlement.delivery.key for settlement in request.settlements}
    offsets = watermarks.lock(session, ref, touched, skip_locked=shared)
    flushed = settling.apply(
        session, ref, request.settlements, offsets, max_attempts=claimant.max_attempts, also=request.also, chains=False
    )
    result = Claim(flushed, lost=lost, began=began, dropped=fence is None, paused=fence is not None and fence.paused)
    if fence is not None and fence.mode != claimant.mode:
        result.other_mode = fence.mode
    if fence is not None and claimant.options not in (None, fence.options):
        result.options = fence.options
    if fence is None or fence.paused or result.other_mode or result.options is not None:
        if request.holding is not None and fence is not None:
            result.held = slots.settle(session, ref, claimant.limits, request.holding)
        job_results.follow(session, flushed.jobs)
        watermarks.store(session, ref, offsets, flushed.watermarks, {})
        return result
    is_doubtful = shared and clock is not None and clock.is_doubtful(claimant.visibility_ms or 0)
    reservation = None
    if request.holding is not None:
        reservation = Reservation(session, ref, claimant.limits, request.holding, claimant.lease_ms, clock)
    budget = Budget(request.max_bytes, request.max_rows)
    coalescing = Coalescing(session, ref, claimant.filter, shared=shared, now=fence.now, is_doubtful=is_doubtful)
    taking = Taking(
        session, request, fence.now, budget, reservation, result, coalescing, offsets.keys(), is_doubtful=is_doubtful
    )
    redelivered = redeliver(taking)
    fresh, positions = take_new(taking, offsets)
    coalescing.store()
    if reservation is not None:
        result.held = reservation.store()
    job_results.follow(session, flushed.jobs)
    # If a position has only moved past messages for other groups, no later settlement will advance the watermark.
    flushed.unfinished |= positions.keys() - {delivery.key for delivery in fresh}
    watermarks.store(session, ref, offsets, flushed.watermarks, positions)
    result.deliveries = sorted([*redelivered, *fresh], key=lambda delivery: (delivery.key, delivery.offset))
    return result


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
        settling.apply(session, ref, unstarted, {}, max_attempts=None)

    run(using, release)
