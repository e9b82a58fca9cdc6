"""What operators do, ended at every statement: run again it comes to what it would have come to at once."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from django.db import connections

from django_mysqlqueue.models import (
    ConsumerGroup,
    DeliveryEvent,
    DeliveryState,
    Operation,
    OutboxMessage,
    QueueMessage,
    Rollup,
)
from tests.conftest import Clock
from tests.crash.acts import ACTS, ME, begin
from tests.crash.audit import Observer
from tests.crash.crashes import ALIAS, ENDS, LOST, TOPIC
from tests.support import invariants
from tests.support.harness import USING, Sub, handler
from tests.support.internals import audit
from tests.support.snapshots import Snapshot
from tests.support.tables import Tables


def whereabouts() -> Counter[tuple[str, str]]:
    """How often each message is in the log, the outbox or the DLQ: never gone, never twice."""
    found: Counter[tuple[str, str]] = Counter()
    for model in (QueueMessage, OutboxMessage):
        for topic, key, payload in model.objects.values_list("topic", "partition_key", "payload"):
            found[topic.removesuffix("_dlq"), f"{key} {bytes(payload).decode()}"] += 1
    return found


def drained() -> tuple[list[tuple[str, str]], object]:
    """What subscribers of both groups handle in the end, and what is left."""
    done: list[tuple[str, str]] = []

    def note(delivery):
        done.append((delivery.group, delivery.payload))

    clock = Clock()
    clock.advance(3700)
    try:
        refs = set(ConsumerGroup.objects.filter(paused=False).values_list("consumer_group", flat=True))
        subs = [Sub(handler(TOPIC, group, note), lease_renewal_interval=0.0) for group in sorted(refs)]
        while sum(sub.settle() for sub in subs):
            pass
        for sub in subs:
            sub.leave()
    finally:
        clock.restore()
    return sorted(done), (DeliveryState.objects.filter(consumer_group__in=refs).count(), on_record())


def on_record() -> tuple[list[object], ...]:
    return (
        sorted(
            (name, paused, after_seek, sorted((option, one["value"]) for option, one in overrides.items()))
            for name, paused, after_seek, overrides in ConsumerGroup.objects.values_list(
                "consumer_group", "paused", "after_seek", "overrides"
            )
        ),
        sorted(DeliveryEvent.objects.exclude(outcome__in=("lost",)).values_list("outcome", "partition_key")),
        sorted(Rollup.objects.filter(bucket_at__lt=10**9).values_list("grain", "acked", "failed")),
        sorted(Operation.objects.filter(started_at=1).values_list("action", flat=True)),
    )


ENDED: dict[str, tuple[object, list[object]]] = {}
"""By operation, what ``drained`` returns after it, and the rows for which it has returned that: the same rows come to
the same end, whatever has ended the operation."""


@pytest.mark.promise("Interrupted operations")
@pytest.mark.parametrize("mode", ENDS)
@pytest.mark.parametrize("name", ACTS)
def test_an_operation_that_is_ended_is_run_again(db, crasher, monkeypatch, name, mode):
    monkeypatch.setattr(audit, "BEAT_SECONDS", 0)  # An operation of several steps beats after each.
    one = ACTS[name]
    begin(one)
    start = Snapshot()
    one.run()
    changed = sum(Operation.objects.filter(actor=ME).values_list("changed", flat=True))
    there = whereabouts()
    expected, seen = ENDED.get(name) or (drained(), [])
    ENDED[name] = expected, seen
    for number in itertools.count(1):
        start.restore()
        before = whereabouts()
        ended = crasher.run(mode, number, one.run)
        after = whereabouts()
        assert not invariants.at_any_moment(Tables.read(USING)), number
        # At the crash each message is where it was or where it is going: in one place. (An erased one with a dead
        # letter has been in two.)
        for message in before | there:
            least, most = sorted((before[message], there[message]))
            assert least <= after[message] <= most, number
        if ended.stopped:
            one.run()
        connections[ALIAS].close()
        assert whereabouts() == there, number
        if one.audited:
            assert sum(Operation.objects.filter(actor=ME).values_list("changed", flat=True)) == changed, number
            assert Operation.objects.filter(actor=ME).exclude(ended_at=0).exists() or not changed
        if name.startswith(("seek", "drop")):
            assert not Operation.objects.filter(ended_at=0).exists(), number
        if name == "count" and ended.stopped:
            continue  # it is not run again by anybody: counts may be lost or, where an answer was lost, doubled
        picture = Observer().read()
        assert not picture.broken, number
        here = picture.tables, on_record()
        if here not in seen:  # the same rows come to the same end
            seen.append(here)
            assert drained() == expected, number
        if not ended.stopped:
            break
    assert number > 1 or mode == LOST
