"""Outcomes on their way into the database, alone or with a claim, and what a process counts of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from django_mysqlqueue.runtime.handling.observers import flushed_ends
from django_mysqlqueue.runtime.log import dead_lettered, delivery_fields, event, succeeded
from django_mysqlqueue.runtime.polling.context import Context
from django_mysqlqueue.runtime.polling.mode import Mode
from django_mysqlqueue.runtime.polling.parts import Parts
from django_mysqlqueue.service import rollups, settling
from django_mysqlqueue.service.claims import Claim
from django_mysqlqueue.service.deliveries import OUTCOMES, UNCALLED, Action, Flushed, Holding, Settlement
from django_mysqlqueue.service.refs import GroupRef

FAILED = (Action.NACK, Action.REJECT)


class Counts:
    """What a process has counted of a group since it last wrote the rollups."""

    def __init__(self, context: Context, ref: GroupRef) -> None:
        self._context = context
        self._ref = ref
        self._tally = rollups.Tally()

    def settled(self, settlements: Sequence[Settlement], flushed: Flushed) -> None:
        """Count the outcomes of a flush. Acks are counted when the rollups are written."""
        tally = self._tally
        stale = {id(settlement) for settlement in flushed.stale}
        for settlement in settlements:
            if settlement.action is not Action.ACK and id(settlement) not in stale:
                tally.failed += settlement.action in FAILED and settlement.is_started
                tally.dead_lettered += settlement.is_written and settlement.action is Action.REJECT
                if settlement.action in UNCALLED:
                    tally.passed[OUTCOMES[settlement.action]] += 1
        tally.dead_lettered += len(flushed.dead)

    def claimed(self, claim: Claim) -> None:
        """Count the messages that a claim has passed or dead-lettered."""
        self._tally.dead_lettered += len(claim.dead)
        if claim.passed:
            self._tally.passed.update(claim.passed)
            self._context.inbox.count_passed(self._ref, claim.passed)

    def read(self) -> rollups.Tally:
        """Return the counts since ``start``."""
        for published_before in self._context.inbox.take_acked(self._ref):
            self._tally.acked(round(self._context.clock.offset_ms - published_before))
        return self._tally

    def start(self) -> None:
        """Start counting from 0, because the counts have been stored."""
        self._tally = rollups.Tally()


class Unwritten(NamedTuple):
    """What a process has to write of a group."""

    settlements: list[Settlement]
    also: set[str]
    """Further partitions whose watermarks can advance."""
    holding: Holding | None
    """What this process holds, if the rows of a group with limits must say so."""


class Writer:
    """Writes the outcomes of a group, and knows what follows from their being written."""

    def __init__(self, parts: Parts, mode: Mode, counts: Counts) -> None:
        self._context, self._configuration, self._memory, self._limited, _ = parts
        self._inbox = parts.context.inbox
        self._ref = parts.configuration.ref
        self._mode = mode
        self._counts = counts

    def flush(self, unwritten: Unwritten) -> Flushed:
        """Write outcomes, advance watermarks, and store what this process holds, in a transaction of their own."""
        handler = self._configuration.handler
        flushed = settling.flush(
            self._context.using,
            self._ref,
            unwritten.settlements,
            max_attempts=handler.max_attempts,
            shared=handler.shared,
            also=unwritten.also,
            holding=unwritten.holding,
        )
        self._limited.written(flushed.held)
        return flushed

    def not_written(self, unwritten: Unwritten, error: Exception) -> None:
        """Keep what a transaction should have written, because it has failed, for the next one.

        Tokens fence what has been written all the same.
        """
        if unwritten.holding is not None:
            self._limited.not_written(unwritten.holding, error)
        self._inbox.put_back_settlements(self._ref, unwritten.settlements)
        self._memory.taken = []
        self._memory.unfinished |= unwritten.also

    def written(self, settlements: Sequence[Settlement], flushed: Flushed, claim: Claim | None = None) -> None:
        """Remember, log and count what a transaction has written: outcomes, and what a claim did not take."""
        memory, limited = self._memory, self._limited
        memory.taken = []
        ended = {settlement.delivery.slot.key for settlement in settlements if settlement.delivery.slot is not None}
        if flushed.locked:
            memory.locked += flushed.locked
            settlements = [settlement for settlement in settlements if settlement not in flushed.locked]
        self._inbox.written(settlements)
        if limited and ended:
            self._mode.notify(limited.finished(ended))
        self._mode.resume()
        memory.unfinished |= flushed.unfinished
        memory.skipped |= flushed.skipped
        for settlement in flushed.stale:
            delivery = settlement.delivery
            event(logging.WARNING, "delivery.lost", **delivery_fields(delivery), outcome=OUTCOMES[settlement.action])
        dead_lettered(flushed.dead)
        if self._configuration.handler.runs_jobs:
            succeeded(settlements, flushed.stale)
        self._counts.settled(settlements, flushed)
        if self._context.watch.is_wanted():
            self._context.watch.tell(flushed_ends(settlements, flushed, self._context.clock.now()))
        self._mode.settled(settlements, flushed)
        if claim is not None:
            dead_lettered(claim.dead)
            memory.unfinished |= {delivery.key for delivery, _ in claim.dead}
            self._counts.claimed(claim)

    def waits_for_poll(self) -> bool:
        """Return whether something is to be tried again after the next poll."""
        return bool(self._memory.skipped or self._memory.locked)

    def polled(self) -> None:
        """Retry, after each poll, rows that another transaction had locked."""
        memory = self._memory
        memory.unfinished |= memory.skipped
        memory.skipped.clear()
        self.retry_locked()

    def retry_locked(self) -> None:
        """Write outcomes whose rows were locked with the next flush."""
        if self._memory.locked:
            self._inbox.put_back_settlements(self._ref, self._memory.locked)
            self._memory.locked = []
