"""What operators do, ended at every statement: run again it comes to what it would have come to at once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from django.db import connection, connections

from django_mysqlqueue import publish
from django_mysqlqueue.models import (
    ConsumerGroup,
    ConsumerOffset,
    DeliveryEvent,
    DeliveryState,
    Operation,
    OutboxMessage,
    PartitionLease,
    QueueMessage,
    Rollup,
    SubscriberHeartbeat,
)
from django_mysqlqueue.operations import dead_lettering, dropping, pausing, redriving, rescheduling, retrying, seeking
from django_mysqlqueue.operations.seeking import Position
from django_mysqlqueue.service import audit, delivery_events, heartbeats, leasing, rollups
from django_mysqlqueue.service.dead_letters import DeadLetterFilter
from django_mysqlqueue.sql.session import Session, run
from tests.conftest import Clock, empty
from tests.crash.audit import Observer
from tests.crash.crashes import ALIAS, DLQ, LOST, MODES, TOPIC, crashes
from tests.crash.worlds import LEASE_MS, G, claimed, orphaned, registered, sequenced
from tests.support import invariants
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.snapshots import Snapshot
from tests.support.tables import Tables

ME = "ada"


@dataclass(frozen=True)
class Act:
    """An operation, from what it starts, and what has been lost or doubled if its messages are not these at the end."""

    name: str
    setup: Callable[[], object]
    run: Callable[[], object]
    audited: bool
    """Each run of it is on record, and what the runs have changed adds up."""


ACTS: dict[str, Act] = {}


def act(name: str, setup: Callable[[], object], *, audited: bool = True) -> Callable[[Callable[[], object]], None]:
    def add(operation: Callable[[], object]) -> None:
        ACTS[name] = Act(name, setup, operation, audited)

    return add


def handled() -> None:
    """A group has handled everything."""
    claimed()
    DeliveryState.objects.all().delete()
    PartitionLease.objects.all().delete()
    last = max(QueueMessage.objects.values_list("offset", flat=True))
    ConsumerOffset.objects.filter(consumer_group="g").update(offset_acked=last, offset_claimed=last)
    ConsumerOffset.objects.filter(consumer_group="other").update(offset_acked=last, offset_claimed=last)


def buried() -> None:
    """All messages of a group are in the DLQ."""

    def fail(delivery: object) -> None:
        raise ValueError("no")

    registered()
    sub = Sub(handler(TOPIC, "g", fail, max_attempts=1), handler(TOPIC, "other"))
    sub.settle()
    sub.leave()
    sequence()
    SubscriberHeartbeat.objects.all().delete()
    DeliveryEvent.objects.all().delete()


def backing_off() -> None:
    claimed()
    later = Session(USING).now() + 10**7
    DeliveryState.objects.filter(consumer_group="g").update(
        delivered_by="", retry_count=2, invisible_until=later, delivery_token=0
    )
    SubscriberHeartbeat.objects.all().delete()
    PartitionLease.objects.all().delete()


def planned() -> None:
    sequenced()
    for number in range(3):
        publish(TOPIC, f"s{number}", key="s", id=f"s{number}", delay=10**6)


def ids() -> list[int]:
    return list(OutboxMessage.objects.using(ALIAS).filter(deliver_at__gt=1).values_list("pk", flat=True))


def counted() -> None:
    """Rows of history that have outlived their time, and a group that has something to count."""
    sequenced()
    with connection.cursor():
        DeliveryEvent.objects.create(
            consumer_group="g", topic=TOPIC, partition_key="a", message_offset=1, outcome="failed", settled_at=1
        )
        Operation.objects.create(action="pause", started_at=1, ended_at=1)
        Rollup.objects.create(grain=60, bucket_at=60_000, consumer_group="g", topic=TOPIC, acked=1)


@act("pause", sequenced)
def _() -> None:
    pausing.pause(ALIAS, G, actor=ME, reason="why not")


def paused() -> None:
    sequenced()
    pausing.pause(USING, G, actor="bob")


@act("resume", paused)
def _() -> None:
    pausing.resume(ALIAS, G, actor=ME)


@act("seek back", handled)
def _() -> None:
    seeking.seek(ALIAS, G, Position(0), actor=ME)


@act("seek to the end past what is claimed", claimed)
def _() -> None:
    seeking.seek(ALIAS, G, seeking.position_of(ALIAS, "latest"), actor=ME)


@act("drop", claimed)
def _() -> None:
    dropping.drop(ALIAS, G, actor=ME)


def half_sought() -> None:
    """A seek of the group died; what it had not deleted is still there."""
    claimed()
    run(USING, lambda session: seeking._begin(session, G, Position(0), "bob", ""))


@act("seek where another died", half_sought)
def _() -> None:
    seeking.seek(ALIAS, G, Position(0), actor=ME)


@act("drop where a seek died", half_sought)
def _() -> None:
    dropping.drop(ALIAS, G, actor=ME)


@act("redrive", buried)
def _() -> None:
    redriving.redrive(ALIAS, DeadLetterFilter(DLQ), actor=ME)


@act("discard", buried)
def _() -> None:
    redriving.discard(ALIAS, DeadLetterFilter(DLQ, group="g"), actor=ME, reason="test")


@act("replace", buried)
def _() -> None:
    letters = QueueMessage.objects.using(ALIAS).filter(topic=DLQ, original_id="b1").values_list("pk", flat=True)
    for offset in list(letters):
        redriving.replace(ALIAS, DLQ, offset, "corrected", actor=ME)


@act("retry", backing_off)
def _() -> None:
    retrying.retry_now(ALIAS, G, actor=ME, reset_attempts=True)


@act("dead-letter now", backing_off)
def _() -> None:
    waiting = DeliveryState.objects.using(ALIAS).filter(consumer_group="g", delivered_by="", acked=False)
    if offsets := list(waiting.values_list("message_offset", flat=True)):
        dead_lettering.dead_letter_now(ALIAS, G, offsets, actor=ME, reason="test")


@act("dead-letter what a lost subscriber held", orphaned)
def _() -> None:
    held = DeliveryState.objects.using(ALIAS).filter(delivered_by="vanished", partition_key="a", acked=False)
    if offsets := list(held.values_list("message_offset", flat=True)):
        dead_lettering.dead_letter_now(ALIAS, G, offsets, actor=ME)


@act("cancel", planned)
def _() -> None:
    rescheduling.cancel(ALIAS, ids(), actor=ME)


@act("deliver now", planned)
def _() -> None:
    rescheduling.deliver_now(ALIAS, ids(), actor=ME)


@act("reschedule", planned)
def _() -> None:
    later = 4 * 10**12
    rows = OutboxMessage.objects.using(ALIAS).filter(pk__in=ids()).exclude(deliver_at=later)
    rescheduling.move(ALIAS, list(rows.values_list("pk", flat=True)), later, actor=ME)


@act("release", claimed)
def _() -> None:
    leasing.revoke(ALIAS, G, ["a", "b"], actor=ME)


@act("forget a subscriber", orphaned)
def _() -> None:
    heartbeats.remove(ALIAS, "vanished", actor=ME, lease_ms=LEASE_MS)


@act("count", counted, audited=False)
def _() -> None:
    tally = rollups.Tally(failed=1)
    rollups.add(ALIAS, {G: tally})


@act("collect history", counted, audited=False)
def _() -> None:
    delivery_events.collect(ALIAS)
    rollups.collect(ALIAS)
    audit.collect(ALIAS)


@pytest.fixture(scope="module")
def crasher(_database, tmp_path_factory):
    if connection.vendor == "mysql" and "unix_socket" not in connection.settings_dict["OPTIONS"]:
        pytest.skip("the gate stands before a Unix socket")
    with crashes(tmp_path_factory.mktemp("gate")) as crasher:
        yield crasher


def begin(one: Act) -> None:
    empty()
    one.setup()


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
        for _ in range(4):
            for sub in subs:
                sub.settle()
        for sub in subs:
            sub.leave()
    finally:
        clock.restore()
    return sorted(done), (DeliveryState.objects.filter(consumer_group__in=refs).count(), on_record())


def on_record() -> tuple[list[object], ...]:
    return (
        sorted(ConsumerGroup.objects.values_list("consumer_group", "paused", "after_seek")),
        sorted(DeliveryEvent.objects.exclude(outcome__in=("lost",)).values_list("outcome", "partition_key")),
        sorted(Rollup.objects.filter(bucket_at__lt=10**9).values_list("grain", "acked", "failed")),
        sorted(Operation.objects.filter(started_at=1).values_list("action", flat=True)),
    )


@pytest.mark.promise("Interrupted operations")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ACTS)
def test_an_operation_that_is_ended_is_run_again(db, crasher, name, mode):
    one = ACTS[name]
    begin(one)
    start = Snapshot()
    one.run()
    changed = sum(Operation.objects.filter(actor=ME).values_list("changed", flat=True))
    there = whereabouts()
    expected = drained()
    seen: list[object] = []
    for number in itertools.count(1):
        start.restore()
        before = whereabouts()
        ended = crasher.run(mode, number, one.run)
        after = whereabouts()
        assert not invariants.at_any_moment(Tables.read(USING)), number
        # At the crash each message is where it was or where it is going: in one place.
        assert all(after[message] in (before[message], there[message]) for message in before | there), number
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
